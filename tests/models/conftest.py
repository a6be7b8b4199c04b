"""Pico checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn


def saved(folder: Path, name: str = "test_resnet", *, seed: int = 0, half: bool = False, **options: Any) -> Path:
    """A timm model with random weights, saved by timm."""
    torch.manual_seed(seed)
    labels = options.pop("labels", None)
    model = timm.create_model(name, **options)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()  # type: ignore[union-attr]
    arguments = {key: value for key, value in options.items() if key != "num_classes"}
    save_for_hf(
        model.half() if half else model,
        folder,
        model_config={"label_names": labels} if labels else None,
        model_args=arguments or None,
        safe_serialization=True,
    )
    return folder


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, Path]]:
    """The content of a folder, for `hub.repository(id, files(folder))`."""
    return lambda folder: {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def save() -> Any:
    return saved
