"""How groups act on one tensor: strided blocks that tile it, each a product of factors.

This one form covers everything the axis algebra can express: a plain axis, the segments of a concatenation,
the three parts of a fused QKV, and heads that carry an inner permutation each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hf_retarget.errors import TensorMismatchError


class Axis(NamedTuple):
    """One dimension of one named parameter or persistent buffer."""

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
    """Positions, within the block, of the factors that say which row of the group's permutation applies."""


class Block(NamedTuple):
    """A strided region of a contiguous tensor; the blocks of a layout tile the tensor."""

    offset: int
    factors: tuple[Factor, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """The region of a contiguous `tensor` as a view with one dimension for each factor."""
        sizes = [factor.size for factor in self.factors]
        strides = [factor.stride for factor in self.factors]
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Layout:
    """How the groups act on one tensor."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def free_axes(self) -> Iterator[tuple[int, int]]:
        """(number of elements, number of free axes they lie on), block by block.

        Example:
            >>> block = Block(0, (Factor(4, 3, 0, "hidden"), Factor(3, 1, 1)))
            >>> list(Layout((4, 3), (block,)).free_axes())
            [(12, 1)]
        """
        for block in self.blocks:
            elements = 1
            for factor in block.factors:
                elements *= factor.size
            yield elements, len({factor.dim for factor in block.factors if factor.group is not None})

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
    """A permuted copy of a view that has one dimension for each factor (and possibly more behind them).

    Groups without an entry in `indices` are left as they are.
    """
    # Outer factors first: a row of an inner permutation is addressed by the block's new position.
    for position, factor in sorted(enumerate(factors), key=lambda item: len(item[1].outer)):
        if factor.group is None or factor.group not in indices:
            continue
        index = indices[factor.group].to(view.device)
        if not factor.outer:
            view = view.index_select(position, index)
            continue
        # index has the outer positions in the group's own order, then the inner one: bring it into the view's order
        places = (*factor.outer, position)
        order = sorted(range(len(places)), key=places.__getitem__)
        shape = [view.shape[p] if p in places else 1 for p in range(view.dim())]
        view = view.take_along_dim(index.permute(order).reshape(shape), position)
    return view
