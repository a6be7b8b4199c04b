"""Dividing labelled rows by lot, so that each class keeps its share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_retarget.data.images import derive_seed


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows and their labels.

    Example:
        >>> Part.of(torch.tensor([2, 0, 1])).renumbered(torch.tensor([5, -1, 4]))
        Part(indices=tensor([0, 1]), targets=tensor([4, 5]))
    """

    indices: Tensor
    targets: Tensor

    @classmethod
    def of(cls, targets: Tensor) -> Part:
        """All rows."""
        return cls(torch.arange(len(targets)), targets)

    def __len__(self) -> int:
        return len(self.indices)

    def renumbered(self, numbers: Tensor) -> Part:
        """With the new number of each label, without the rows whose new number is negative."""
        targets = numbers[self.targets]
        return Part(self.indices[targets >= 0], targets[targets >= 0])

    def divided(self, count: int, *purpose: object) -> tuple[Part, Part]:
        """`count` rows drawn by lot, each class with its share, and the others; both in their old order.

        `purpose` seeds the lot: draws for different purposes do not depend on each other.

        Example:
            >>> some, others = Part.of(torch.tensor([0, 0, 0, 0, 1, 1])).divided(3, "validation", 0)
            >>> some.targets, others.targets
            (tensor([0, 0, 1]), tensor([0, 0, 1]))
        """
        generator = torch.Generator().manual_seed(derive_seed(*purpose))
        # Each class spreads its rows, shuffled, evenly over 0 … 1; the lowest are drawn, of each class the same share.
        height = torch.empty(len(self), dtype=torch.float64)
        for label in self.targets.unique():
            members = (self.targets == label).nonzero().flatten()
            rank = torch.randperm(len(members), generator=generator)
            height[members] = (rank + torch.rand((), dtype=torch.float64, generator=generator)) / len(members)
        drawn = torch.zeros(len(self), dtype=torch.bool)
        drawn[height.argsort(stable=True)[:count]] = True
        return self._where(drawn), self._where(~drawn)

    def _where(self, mask: Tensor) -> Part:
        return Part(self.indices[mask], self.targets[mask])
