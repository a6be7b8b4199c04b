"""A finished folder as written by `hf-retarget finetune`, and clients that push it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from loopback_hub import Hub

from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model

COMMAND = (sys.executable, "-c", "from hf_retarget.cli import main; main()")
CARD = """---
library_name: timm
tags: [Grüße]
---
# Käfer 🐞

model = timm.create_model("local-dir:./", pretrained=True)
"""
LABELS = ("Äpfel", "a|b", "<b>🍒</b>")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The content of a finished folder, including files that must not be published."""
    folder = tmp_path_factory.mktemp("finished") / "tuned"
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=len(LABELS))
    save_model(folder, model.state_dict(), load_checkpoint(model), labels=LABELS)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "finetune.json").write_text('{"format": "hf-retarget/finetune/1"}\n')
    (folder / "recipe.yaml").write_text("name: käfer\n", encoding="utf-8")
    for name in ("figures/curve.png", "trajectory/step-1.safetensors", ".secret/notes.txt", "diary.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG\0")
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "tuned")


Push = Callable[..., Result]


@pytest.fixture
def push(connected: Hub) -> Push:
    """`hf-retarget push` in this process; settings go to the environment."""

    def run(*arguments: object, **settings: str | None) -> Result:
        return CliRunner(env=settings).invoke(main, ["push", *map(str, arguments)])

    return run


@pytest.fixture
def push_alone(hub: Hub) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`hf-retarget push` in its own process, with unmodified clients."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        client = hub.client(token="hf_ada_write", HF_RETARGET_HUB_PATIENCE="8")
        return client.run(*COMMAND, "push", *map(str, arguments))

    return run


@pytest.fixture
def refused(push: Push) -> Callable[..., str]:
    """Push, expect a failure with one line, and return it."""

    def run(*arguments: object, **settings: str | None) -> str:
        done = push(*arguments, **settings)
        assert (done.exit_code, done.stdout) == (1, ""), done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("Error: "), done.stderr
        assert "Traceback" not in done.stderr
        return last.removeprefix("Error: ")

    return run
