"""Pico models on disk and in memory, and a folder of pictures that can be learnt in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.recipe import Recipe

CLASSES = ("blue", "green", "red")


def make_pico(channels: int = 3, classes: int = 3) -> nn.Module:
    """A net without BatchNorm and without any configuration."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(channels, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, nn.Dropout(0.1), nn.Linear(8, classes))


def make_folder(folder: Path, name: str, labels: tuple[str, ...] | None = None, **options: Any) -> Path:
    torch.manual_seed(1)
    model = timm.create_model(name, **options)
    return save_model(folder, model.state_dict(), load_checkpoint(model), labels=labels)


def picture(number: int, channel: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 90, (12, 12, 3), dtype=np.uint8)
    pixels[..., channel] += 120
    return Image.fromarray(pixels)


def make_recipe(**values: Any) -> Recipe:
    """Short: `steps=4` stands for `finetune.steps`, `data__limit=60` for `data.limit`."""
    keys = {f"finetune.{key}" if "__" not in key else key.replace("__", "."): value for key, value in values.items()}
    return Recipe("short").override(**{"finetune.steps": 6, "finetune.batch_size": 16, **keys})


@pytest.fixture(scope="session")
def colours(tmp_path_factory) -> Path:
    """Blue, green and red pictures: training and test folders."""
    folder = tmp_path_factory.mktemp("colours")
    for split, count in (("train", 20), ("test", 8)):
        for channel, name in enumerate(reversed(CLASSES)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                picture(100 * channel + number, channel).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def gray_resnet(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "gray", "test_resnet", num_classes=7, in_chans=1)


@pytest.fixture(scope="session")
def vit(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "vit", "test_vit", num_classes=3)


@pytest.fixture(scope="session")
def labelled() -> Callable[..., Path]:
    return make_folder


@pytest.fixture
def pico() -> Callable[..., nn.Module]:
    return make_pico


@pytest.fixture(scope="session")
def short() -> Callable[..., Recipe]:
    return make_recipe
