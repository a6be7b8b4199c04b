"""A pico model in memory, and short recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_retarget.recipe import Recipe


def make_pico(channels: int = 3, classes: int = 3) -> nn.Module:
    """A network without BatchNorm and without a configuration."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(channels, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, nn.Dropout(0.1), nn.Linear(8, classes))


def make_recipe(**values: Any) -> Recipe:
    """A recipe: `steps=4` sets `finetune.steps`, `data__limit=60` sets `data.limit`."""
    keys = {f"finetune.{key}" if "__" not in key else key.replace("__", "."): value for key, value in values.items()}
    return Recipe("short").override(**{"finetune.steps": 6, "finetune.batch_size": 16, **keys})


@pytest.fixture
def pico() -> Callable[..., nn.Module]:
    return make_pico


@pytest.fixture(scope="session")
def short() -> Callable[..., Recipe]:
    return make_recipe
