"""A split whose batch k depends only on the seed and k, and a network with BatchNorm, dropout and tied weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn


class Split:
    """Three classes of 8×8 images that differ in their mean."""

    def __init__(self, size: int = 96) -> None:
        self.size = size
        self.asked: list[dict] = []

    def __len__(self) -> int:
        return self.size

    def batches(
        self, batch_size, *, seed=None, count=None, augment=False, skip=0, **more
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self.asked.append({"batch_size": batch_size, "seed": seed, "augment": augment, "skip": skip, **more})
        number = skip
        while count is None or number < skip + count:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            labels = torch.randint(0, 3, (batch_size,), generator=generator)
            images = torch.randn(batch_size, 3, 8, 8, generator=generator)
            images[torch.arange(batch_size), labels] += 1
            yield images, labels
            number += 1


def make_net() -> nn.Module:
    """A resumed run must restore the statistics of BatchNorm and the randomness of dropout."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(6, 3))


@pytest.fixture
def split() -> Split:
    return Split()


@pytest.fixture
def small_split() -> type[Split]:
    return Split


@pytest.fixture
def net():
    return make_net
