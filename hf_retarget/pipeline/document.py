"""port.json: every figure, option, seed, version and input of a port."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from hf_retarget.evaluate import Score
from hf_retarget.models import Checkpoint
from hf_retarget.pipeline.clock import peak_memory
from hf_retarget.pipeline.controls import Measured
from hf_retarget.pipeline.held import Derived
from hf_retarget.pipeline.inputs import Inputs
from hf_retarget.pipeline.judge import Judge
from hf_retarget.pipeline.pose import Task
from hf_retarget.pipeline.start import describe_broken
from hf_retarget.pipeline.steps import Walk
from hf_retarget.pipeline.verdict import judge_port
from hf_retarget.pipeline.versions import list_versions
from hf_retarget.publish.paths import identify, shorten_all
from hf_retarget.recipe import Recipe

FORMAT = "hf-retarget/port/1"
_IN_DETAIL = ("port", "control", "finetuned")
"""Scores that are kept with their confusions."""


def compose_document(
    recipe: Recipe,
    inputs: Inputs,
    derived: Derived,
    task: Task,
    judge: Judge,
    found: Walk,
    measured: Measured,
    samples: dict[str, Any] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """All that is known about a finished port, as plain JSON values: a number that is none becomes null."""
    best = found.history[found.best.step - 1]
    versions = list_versions()
    document = {
        "format": FORMAT,
        "version": versions["hf-retarget"],
        "verdict": judge_port(measured.scores, minibatches=measured.control_steps, control=recipe.port.control),
        "best_step": found.best.step,
        "validation": {"top1": best.top1, "loss": best.loss},
        "test": {name: _score(score, name in _IN_DETAIL) for name, score in measured.scores.items()},
        "steps": [asdict(each) for each in found.history],
        "steps_planned": task.steps,
        "naive_steps": [asdict(each) for each in measured.naive.history] if measured.naive else None,
        "naive_best_step": measured.naive.best.step if measured.naive else None,
        "masked_steps": [asdict(each) for each in measured.masked.history] if measured.masked else None,
        "masked_best_step": measured.masked.best.step if measured.masked else None,
        "oracle_steps": [asdict(each) for each in measured.oracle.history] if measured.oracle else None,
        "oracle_best_step": measured.oracle.best.step if measured.oracle else None,
        "levels": measured.levels,
        "samples": samples,
        "gradients": {"port": measured.gradients, "control": measured.control_steps},
        "curves": {name: [list(point) for point in curve] for name, curve in measured.curves.items()},
        "head": {"policy": inputs.heads.policy, "why": inputs.heads.why, "tensors": list(inputs.comparison.head)},
        "graph": _graph(derived),
        "permutation": {"moved": best.moved, "given": task.permutation is not None, "from": task.origin},
        "matching": found.best.fit,
        "batchnorm": found.best.batchnorm,
        "inputs": _inputs(inputs, recipe),
        "recipe": recipe.to_dict(),
        "device": {
            "type": judge.accelerator.device.type,
            "precision": str(judge.accelerator.mixed_precision),
            "processes": judge.accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
        "notes": [*inputs.comparison.notes, *inputs.data.notes, *describe_broken(inputs.data), *measured.notes],
        "seconds": {name: round(value, 3) for name, value in judge.clock.seconds.items()},
        "memory": dict(judge.clock.memory),
        "peak_memory": peak_memory(),
        "command": command,
        "versions": versions,
    }
    return dict(shorten_all(_plain(document)))  # it goes to others: the paths of this machine do not


def _score(score: Score, in_detail: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "top1": score.top1,
        "top5": score.top5,
        "loss": score.loss,
        "images": score.count,
        "per_class": list(score.per_class),
    }
    return figures | ({"confusion": [list(row) for row in score.confusion]} if in_detail else {})


def _graph(derived: Derived) -> dict[str, Any]:
    graph, check = derived.graph, derived.check
    return {
        "groups": len(graph.groups),
        "fingerprint": graph.fingerprint,
        "share_on_a_free_axis": graph.share(1),
        "held": list(derived.held),
        "unknown_operators": [str(each) for each in graph.unknown_operators],
        "check": check.to_json() if check else None,
    }


def _inputs(inputs: Inputs, recipe: Recipe) -> dict[str, Any]:
    data = inputs.data
    sides = {"source": inputs.source, "tuned": inputs.tuned, "target": inputs.target}
    if inputs.tuned_target is not None:
        sides["tuned_target"] = inputs.tuned_target
    return {
        **{name: _checkpoint(side) for name, side in sides.items()},
        "data": {
            "name": data.name,
            "location": identify(recipe.data.reference),
            "revision": data.revision,
            "fingerprint": data.fingerprint,
            "images": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
            "classes": inputs.classes,
            "labels": list(inputs.labels) if inputs.labels else None,
            "preprocess": asdict(inputs.preprocess),
        },
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "reference": checkpoint.reference,
        "location": identify(checkpoint.reference),
        "architecture": checkpoint.architecture,
        "library": checkpoint.library,
        "options": dict(checkpoint.options),
        "classes": checkpoint.num_classes,
        "revision": checkpoint.revision,
        "hub_id": checkpoint.hub_id,
        "base_models": list(checkpoint.base_models),
        "license": checkpoint.config.get("license"),
        "license_link": checkpoint.config.get("license_link"),
        "hashes": dict(checkpoint.hashes),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
    }


def _plain(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
