"""Small networks with every kind of group, and problems made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hf_retarget as rt


class Attention(nn.Module):
    """Two heads, fused QKV, a residual stream, a classifier."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(5, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        return self.head((x + self.proj(mixed)).mean(1))


class Segments(nn.Module):
    """Concatenation, grouped convolution, BatchNorm, and a square matrix on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(10)
        self.mix = nn.Conv2d(10, 8, 1)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([self.left(x), self.right(x)], 1)).relu()
        x = self.grouped(self.mix(x).relu()).mean((2, 3))
        return self.head(x + self.inner(x))  # a square matrix: its group acts on both of its axes


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)), (4, 5)),
    "attention": (Attention, (4, 6, 5)),
    "segments": (Segments, (4, 3, 8, 8)),
}


@pytest.fixture(params=sorted(MODELS))
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, rt.PermutationGraph, Tensor]:
    """A model, its graph and an input."""
    torch.manual_seed(0)
    make, shape = MODELS[request.param]
    model = make()
    return model, rt.trace(model, torch.zeros(shape)), torch.randn(shape)


Noise = Callable[[nn.Module, int], dict[str, Tensor]]


@pytest.fixture(scope="session")
def noise() -> Noise:
    """Random tensors in the shapes of a model's parameters, by seed."""

    def draw(model: nn.Module, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}

    return draw
