"""Made-up port.json documents: the smallest that a comparison takes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_retarget.recipe import Recipe


def make_document(top1: float = 0.6, **changes: Any) -> dict[str, Any]:
    """`port__seed=1` changes a field of the recipe, anything else a key of the document."""
    fields = {key.replace("__", "."): value for key, value in changes.items() if "__" in key}
    recipe = Recipe("made-up").override(**{"data.reference": "photos", "port.method": "fgmt", **fields})
    side = {"reference": "models/new", "architecture": "resnet18", "hashes": {"model.safetensors": "ab" * 32}}
    scores = {"port": top1, "naive": 0.3, "control": 0.5, "finetuned": top1 + 0.1, "tuned": 0.8}
    return {
        "format": "hf-retarget/port/1",
        "verdict": "Worth it: …",
        "best_step": 3,
        "steps_planned": 4,
        "test": {name: {"top1": value, "loss": 1.0 - value} for name, value in scores.items()},
        "steps": [{"step": step, "top1": top1 * step / 4} for step in range(1, 5)],
        "gradients": {"port": 40, "control": 60},
        "curves": {"control": [[0, 0.1], [60, 0.5]], "finetuned": [[40, top1], [60, top1 + 0.1]]},
        "head": {"policy": "zero"},
        "permutation": {"given": False},
        "inputs": {
            **{name: copy.deepcopy(side) for name in ("source", "tuned", "target")},
            "data": {"name": "photos", "fingerprint": "cd" * 32, "classes": 10},
        },
        "recipe": recipe.to_dict(),
        "device": {"precision": "no"},
        "seconds": {"matching": 10.0, "evaluation": 2.5},
    } | {key: value for key, value in changes.items() if "__" not in key}


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return make_document


@pytest.fixture
def port(tmp_path) -> Callable[..., Path]:
    """Write a made-up port; returns its folder."""

    def write(name: str, *arguments: Any, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "port.json").write_text(json.dumps(make_document(*arguments, **changes)))
        return folder

    return write
