"""Small images that a network learns in seconds: stripes in one of four directions, in colour and in noise."""

from __future__ import annotations

import torch
from torch import Tensor

DIRECTIONS = ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (1.0, -1.0))


def draw_stripes(count: int, seed: int, width: float = 4.0) -> list[tuple[Tensor, int]]:
    """Pairs of a 3 × 32 × 32 tensor and the number of its direction."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    images = []
    for number in range(count):
        label = number % len(DIRECTIONS)
        across, down = DIRECTIONS[label]
        shift = 6.28 * torch.rand(1, generator=generator)
        waves = torch.sin((across * columns + down * rows) * 3.14 / width + shift)
        colour = torch.rand(3, 1, 1, generator=generator)
        noise = 0.5 * torch.randn(3, 32, 32, generator=generator)
        images.append((colour * waves + noise, label))
    return images
