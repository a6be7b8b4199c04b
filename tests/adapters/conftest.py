"""Small models with BatchNorm, grouped convolutions or attention, adapters saved by PEFT, and a short recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
from torch import nn

from hf_retarget.models import Checkpoint, load_checkpoint, save_model

SMALL = {"test_vit": {"img_size": 32, "in_chans": 3}, "test_resnet": {}, "test_efficientnet": {}}
HEADS = {"test_vit": "head", "test_resnet": "fc", "test_efficientnet": "classifier"}
SHORT = {
    "data.validation": 0.2,
    "data.image_size": 32,
    "port.steps": 2,
    "port.batch_size": 16,
    "port.grad_batches": 1,
    "port.bn_batches": 1,
    "port.method": "naive",
    "port.control": "none",
    "port.verify": False,
    "port.samples": 0,
}


def make_base(folder: Path, name: str = "test_vit", seed: int = 0, classes: int = 5) -> Path:
    """A base with non-trivial statistics, saved like timm does."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, **SMALL[name])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)  # timm begins with blocks that do nothing
    like = load_checkpoint(model)
    options = {key: value for key, value in SMALL[name].items() if key == "img_size"}
    return save_model(folder, model.state_dict(), like_with(like, options), config={"input_size": (3, 32, 32)})


def like_with(checkpoint: Checkpoint, options: dict[str, Any]) -> Checkpoint:
    from dataclasses import replace

    return replace(
        checkpoint, options={**checkpoint.options, **options}, architecture=checkpoint.config["architecture"]
    )


def make_adapter(folder: Path, base: Checkpoint, kind: str = "LORA", classes: int = 3, **options: Any) -> nn.Module:
    """A random adapter of a base, saved by PEFT; returns the model it makes."""
    given = {"target_modules": ["qkv", "fc1"], "modules_to_save": ["head"], **options}
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**given)
    model = peft.get_peft_model(base.build(classes), config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "old")


@pytest.fixture
def base(base_folder) -> Checkpoint:
    return load_checkpoint(base_folder)


@pytest.fixture(scope="session")
def adapt() -> Callable[..., nn.Module]:
    return make_adapter


@pytest.fixture(scope="session")
def make() -> Callable[..., Path]:
    return make_base


@pytest.fixture(scope="session")
def short() -> dict[str, Any]:
    return SHORT


@pytest.fixture(scope="session")
def heads() -> dict[str, str]:
    return HEADS
