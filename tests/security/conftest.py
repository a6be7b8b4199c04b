"""A private home folder with an honest model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from loopback_hub import Hub
from machine import Machine

from hf_retarget.models import load_checkpoint, save_model


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("machine")
    for place in ("home", "tmp", "work", "elsewhere"):
        (root / place).mkdir()
    (root / "home" / "secret.txt").write_text("private")
    with Hub(root / "hub") as hub:
        hub.add_user("ada")
        machine = Machine(root, hub)
        yield machine
        machine.forks.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest model: a small ResNet for grey images of ten classes."""
    torch.manual_seed(0)
    net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    return save_model(tmp_path_factory.mktemp("honest") / "model", net.state_dict(), load_checkpoint(net))
