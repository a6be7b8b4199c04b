"""Made-up port.json documents, as small as a comparison accepts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_retarget.document import FORMAT
from hf_retarget.recipe import Recipe

BATCH, AFTER = 128, 64
"""Images of a minibatch, of the port and of the fine-tuning after it."""


def make_contender(name: str, top1: float, role: str = "beside", **more: Any) -> dict[str, Any]:
    """One entry of `contenders`."""
    test = {"top1": top1, "top5": None, "loss": 1.0 - top1, "images": 100}
    return {"name": name, "role": role, "gradients": 0, "validation": top1, "test": test} | more


def make_steps(*accuracies: float) -> list[dict[str, Any]]:
    """The steps of a contender."""
    return [
        {"step": step, "far": step / len(accuracies), "top1": top1, "loss": 1.0 - top1}
        for step, top1 in enumerate(accuracies, 1)
    ]


def make_document(top1: float = 0.6, **changes: Any) -> dict[str, Any]:
    """`port__seed=1` changes a field of the recipe, `steps` those of the port, `only` drops the other contenders.

    Anything else changes a key of the document.
    """
    fields = {key.replace("__", "."): value for key, value in changes.items() if "__" in key}
    sizes = {"port.batch_size": BATCH, "finetune.batch_size": AFTER}
    recipe = Recipe("made-up").override(
        **{"data.reference": "photos", "port.method": "fgmt", **sizes, **fields},
    )
    given = changes.get("permutation", {}).get("given", False)
    winner = "given" if given else recipe.port.method
    steps = changes.pop("steps", make_steps(*(top1 * step / 4 for step in range(1, 5))))
    contenders = [
        make_contender(winner, top1, "port", gradients=40, steps=steps, best_step=min(3, len(steps))),
        make_contender(
            "finetuned", top1 + 0.1, "after", curve=[[40 * BATCH, top1], [40 * BATCH + 20 * AFTER, top1 + 0.1]]
        ),
        make_contender("naive", 0.3),
        make_contender("plain", 0.5, gradients=60, curve=[[0, 0.1], [60 * BATCH, 0.5]]),
        make_contender("tuned", 0.8),
    ]
    if only := changes.pop("only", None):
        contenders = [each for each in contenders if each["name"] in only]
    contenders += changes.pop("besides", [])
    side = {"reference": "models/new", "architecture": "resnet18", "classes": 10}
    side["hashes"] = {"model.safetensors": "ab" * 32}
    return {
        "format": FORMAT,
        "version": "0.1.0",
        "verdict": "Worth it: …",
        "winner": winner,
        "contenders": contenders,
        "steps_planned": 4,
        "models": {name: copy.deepcopy(side) for name in ("source", "tuned", "target")},
        "data": {"name": "photos", "fingerprint": "cd" * 32, "classes": 10, "images": {"test": 100}},
        "recipe": recipe.to_dict(),
        "head": {"policy": "zero"},
        "graph": {},
        "permutation": {"moved": 0.5, "given": given},
        "device": {"precision": "no"},
        "seconds": {"matching": 10.0, "evaluation": 2.5},
    } | {key: value for key, value in changes.items() if "__" not in key}


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return make_document


@pytest.fixture
def contender() -> Callable[..., dict[str, Any]]:
    return make_contender


@pytest.fixture
def course() -> Callable[..., list[dict[str, Any]]]:
    return make_steps


@pytest.fixture
def port(tmp_path) -> Callable[..., Path]:
    """Write a made-up port; returns its folder."""

    def write(name: str, *arguments: Any, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "port.json").write_text(json.dumps(make_document(*arguments, **changes)))
        return folder

    return write
