"""A permutation: one index tensor for each group of one graph, kept as safetensors.

Convention: indices *gather*, ``new[i] = old[index[i]]``. A group with blocks has one row for each block,
addressed by the block's *new* position: ``new[h, d] = old[head[h], inner[h, d]]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_retarget.errors import PermutationError
from hf_retarget.files import load_tensors, save_tensors

_FORMAT = "hf-retarget/permutation/1"


@dataclass(frozen=True, eq=False)
class Permutation:
    """One index tensor for each group of the graph whose fingerprint it carries."""

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

    __hash__ = None  # type: ignore[assignment]  # tensors inside: equal, but not hashable

    @property
    def moved(self) -> float:
        """The share of neurons that it moves.

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
        """Write a safetensors file that remembers which graph it belongs to."""
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
            raise PermutationError(f"'{path}' is damaged: its indices are no whole numbers; find the permutation again")
        return cls(facts["fingerprint"], {name: index.long() for name, index in indices.items()})
