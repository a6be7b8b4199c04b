"""Assumption (P): do two networks learn along the same path once their neurons are matched? (figure 3)"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.matching.descent import descend
from hf_retarget.matching.objective import Stacks
from hf_retarget.training import train_model
from quality.bench import Bench
from quality.networks import MLP
from quality.store import Kept
from quality.task import Task

WIDTHS = (64, 256, 1024, 4096)
"""Hidden neurons of the 2-MLP."""
STEPS, EVERY = 5, 10
"""Number of checkpoints, and iterations between them, as in the paper's figure."""

Delta = dict[str, Tensor]


def measure_cosine(bench: Bench, seed: int) -> dict[str, Any]:
    """Train both bases of a pair briefly on the same minibatches, and compare their steps."""
    task, pair = bench.task, bench.task.pair(seed)
    kept = Kept(bench.out / task.name / "cosine" / f"seed-{seed}")
    key = {**bench._key(task.tuning, f"{pair.old} {pair.new}"), "steps": STEPS, "every": EVERY}
    if (done := kept.read(key)) is None:
        bench.say(f"{task.name}: cosine of the first {STEPS * EVERY} iterations, seed {seed}")
        # One head for both, so that only the bases differ.
        starts = [bench.start(bench.base(name), task.start_head, seed) for name in (pair.old, pair.new)]
        size: tuple[int, ...] = starts[0].preprocess.input_size
        graph = rt.trace(starts[0].model, torch.zeros(2, *size))
        old, new = ([*_walk(bench, start, seed)] for start in starts)
        stacks = Stacks(graph)
        for ours, theirs in zip(new, old, strict=True):
            stacks.add(ours, theirs)
        permutation = descend(stacks).permutation
        pairs = [*zip(new, old, strict=True)]
        identity = [cosine(ours, theirs) for ours, theirs in pairs]
        matched = [cosine(ours, graph.apply(permutation, theirs)) for ours, theirs in pairs]
        kept.begin()
        done = kept.finish(key, {"identity": _mean(identity), "matched": _mean(matched)})
    return done


def _walk(bench: Bench, start: Any, seed: int) -> Iterator[Delta]:
    """The change of a model's weights in each of the first steps of its training."""
    how = bench.task.tuning
    model, before = start.model, _parameters(start.model)
    for number in range(STEPS):
        # A constant rate, as at the start of a long training; each stretch has its own minibatches.
        values = replace(how, steps=EVERY, schedule="constant").overrides(max(how.lrs), seed * 100 + number)
        train_model(model, start.data.train, bench.recipe.override(**values).finetune)
        after = _parameters(model)
        yield {name: after[name] - before[name] for name in after}
        before = after


def _parameters(model: nn.Module) -> Delta:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def cosine(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The cosine of two sets of tensors, taken as vectors.

    Example:
        >>> cosine({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 1.0])})
        0.7071067811865475
    """
    inner = sum(float((ours[name].double() * theirs[name].double()).sum()) for name in ours)
    return inner / math.sqrt(_square(ours) * _square(theirs) or 1.0)


def _square(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def wide_tasks(task: Task) -> list[Task]:
    """The 2-MLP at several widths."""
    return [replace(task, name=f"{task.name}-{width}", network=_of_width(width)) for width in WIDTHS]


def _of_width(width: int) -> Any:
    return lambda classes: MLP(width, classes)


def load_cosines(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Task → the measurements for each seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("*/cosine/seed-*")):
        if (done := Kept(path).read()) is not None:
            found.setdefault(path.parent.parent.name, []).append(done)
    return found
