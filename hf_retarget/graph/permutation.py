"""Permutations (one index tensor per group of a graph), and the layouts by which they act on tensors.

Indices *gather*: ``new[i] = old[index[i]]``. A group with blocks has one row per block, addressed by the block's *new*
position: ``new[h, d] = old[head[h], inner[h, d]]``.

A layout tiles a tensor with strided blocks, each a product of factors. This covers everything that the axis algebra
can express: a plain axis, the segments of a concatenation, the three parts of a fused QKV, and heads with an inner
permutation each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_retarget.errors import PermutationError, TensorMismatchError
from hf_retarget.files import load_tensors, save_tensors

_FORMAT = "hf-retarget/permutation/1"


@dataclass(frozen=True, eq=False)
class Permutation:
    """One index tensor for each group of the graph with this fingerprint."""

    fingerprint: str
    indices: Mapping[str, Tensor]

    def __getitem__(self, group: str) -> Tensor:
        return self.indices[group]

    def __iter__(self) -> Iterator[str]:
        return iter(self.indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation):
            return NotImplemented
        return (
            self.fingerprint == other.fingerprint
            and self.indices.keys() == other.indices.keys()
            and all(torch.equal(index, other.indices[name]) for name, index in self.indices.items())
        )

    __hash__ = None  # type: ignore[assignment]  # tensors have no hash by value

    @property
    def moved(self) -> float:
        """The share of neurons that are moved.

        Example:
            >>> Permutation("", {"hidden": torch.tensor([1, 0, 2, 3])}).moved
            0.5
        """
        moved, total = self._count()
        return moved / total if total else 0.0

    def _count(self) -> tuple[int, int]:
        moved = sum(int((index != torch.arange(index.shape[-1])).sum()) for index in self.indices.values())
        return moved, sum(index.numel() for index in self.indices.values())

    def __repr__(self) -> str:
        moved, total = self._count()
        return (
            f"Permutation({len(self.indices)} groups, {moved} of {total} indices moved, graph {self.fingerprint[:12]})"
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that records the fingerprint of the graph."""
        save_tensors(path, dict(self.indices), {"format": _FORMAT, "fingerprint": self.fingerprint})

    @classmethod
    def load(cls, path: str | Path) -> Permutation:
        """Read what `save` wrote."""
        try:
            indices, facts = load_tensors(path)
        except OSError as error:
            raise PermutationError(f"cannot read a permutation from '{path}': {error}") from error
        if facts.get("format") != _FORMAT or "fingerprint" not in facts:
            raise PermutationError(
                f"'{path}' is not a permutation: its format is {facts.get('format')!r}, not {_FORMAT!r}"
            )
        whole = all(index.dtype in (torch.int64, torch.int32) for index in indices.values())
        if not isinstance(facts["fingerprint"], str) or not whole:
            raise PermutationError(f"'{path}' is damaged: its indices are not integers; compute the permutation again")
        return cls(facts["fingerprint"], {name: index.long() for name, index in indices.items()})


# ---- how a permutation acts on a tensor


class Axis(NamedTuple):
    """One dimension of a named parameter or persistent buffer."""

    tensor: str
    dim: int

    def __str__(self) -> str:
        return f"{self.tensor}:{self.dim}"


class Factor(NamedTuple):
    """One factor of a block: `size` steps of `stride` elements along dimension `dim` of its tensor."""

    size: int
    stride: int
    dim: int
    group: str | None = None
    outer: tuple[int, ...] = ()
    """Positions, within the block, of the factors that select the row of the group's permutation."""


class Block(NamedTuple):
    """A strided region of a contiguous tensor; the blocks of a layout tile the tensor."""

    offset: int
    factors: tuple[Factor, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """The region of a contiguous `tensor` as a view with one dimension per factor."""
        sizes = [factor.size for factor in self.factors]
        strides = [factor.stride for factor in self.factors]
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + self.offset)


class Layout(NamedTuple):
    """How the groups act on one tensor."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def permute(self, tensor: Tensor, indices: Mapping[str, Tensor]) -> Tensor:
        """A permuted copy of `tensor`: ``new[i] = old[index[i]]`` on every axis that belongs to a group."""
        if tuple(tensor.shape) != self.shape:
            raise TensorMismatchError(f"has shape {list(tensor.shape)}, the graph expects {list(self.shape)}")
        old = tensor.contiguous()
        new = old.clone()
        for block in self.blocks:
            if any(factor.group is not None for factor in block.factors):
                block.view(new).copy_(gather(block.view(old), block.factors, indices))
        return new


def gather(view: Tensor, factors: Sequence[Factor], indices: Mapping[str, Tensor]) -> Tensor:
    """A permuted copy of a view that has one dimension per factor (and possibly more behind them).

    Groups without an entry in `indices` are not permuted.
    """
    # Outer factors first: a row of an inner permutation is addressed by the block's new position.
    for position, factor in sorted(enumerate(factors), key=lambda item: len(item[1].outer)):
        if factor.group is None or factor.group not in indices:
            continue
        index = indices[factor.group].to(view.device)
        if not factor.outer:
            view = view.index_select(position, index)
            continue
        # The index has the outer positions in the group's order, then the inner one: reorder it like the view.
        places = (*factor.outer, position)
        order = sorted(range(len(places)), key=places.__getitem__)
        shape = [view.shape[p] if p in places else 1 for p in range(view.dim())]
        view = view.take_along_dim(index.permute(order).reshape(shape), position)
    return view
