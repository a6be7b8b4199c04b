"""Fine-tuning with scores at several steps, on validation images (to choose) and test images (to report)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_retarget.data import ImageData, Split
from hf_retarget.errors import PortError
from hf_retarget.files import save_tensors
from hf_retarget.recipe.options import TrainOptions
from hf_retarget.training import TrajectoryRecorder, train_model

TRAIN_IMAGES = 500
"""Number of training images to score if the gap between training and test accuracy is measured."""


@dataclass
class Scorer:
    """Scores a model at given steps, and keeps its outputs for the test images."""

    data: ImageData
    points: Sequence[int]
    gap: bool = False
    rows: list[dict[str, float]] = field(default_factory=list)
    answers: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, model: nn.Module, step: int) -> float:
        """Score if this step is due; the loop needs a number in any case."""
        if step not in self.points:
            return math.nan
        row: dict[str, float] = {"step": step}
        splits: dict[str, tuple[Split, int | None]] = {
            "validation": (self.data.validation, None),
            "test": (self.data.test, None),
        }
        if self.gap:
            splits["train"] = (self.data.train, TRAIN_IMAGES)
        for name, (split, count) in splits.items():
            answers, labels = answer(model, split, count)
            row[name] = float((answers.argmax(1) == labels).float().mean())
            if name == "test":
                self.answers[f"step-{step}"] = answers.half().numpy()
                self.answers["labels"] = labels.numpy()
        self.rows.append(row)
        return row["validation"]


def answer(model: nn.Module, split: Split, count: int | None = None) -> tuple[Tensor, Tensor]:
    """A model's outputs for all images of a split, or for the first `count`, and the labels."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    answers, labels = [], []
    with torch.no_grad():
        for inputs, numbers in split.batches(256):
            answers.append(model(inputs).float().cpu())
            labels.append(numbers)
            if count is not None and sum(map(len, labels)) >= count:
                break
    for module, training in modes:
        module.training = training
    return torch.cat(answers), torch.cat(labels)


def follow(
    model: nn.Module,
    data: ImageData,
    options: TrainOptions,
    points: Sequence[int],
    folder: Path,
    *,
    record: int | None = None,
    gap: bool = False,
) -> dict[str, Any]:
    """Train in place, score at the points, and keep the weights, the outputs and, if requested, the trajectory.

    A loss of NaN ends the curve: the learning rate is too high.
    """
    scorer = Scorer(data, points, gap)
    recorder = TrajectoryRecorder(folder / "trajectory", record) if record else None
    every = math.gcd(*points)
    options = TrainOptions(**{**vars(options), "evaluate_every": every})
    began, failed = time.perf_counter(), None
    try:
        train_model(model, data.train, options, score=scorer, recorder=recorder)
    except PortError as error:
        failed = str(error)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    save_tensors(folder / "model.safetensors", weights, {})
    np.savez_compressed(folder / "answers.npz", **scorer.answers)
    seconds = round(time.perf_counter() - began, 1)
    return {"curve": scorer.rows, "seconds": seconds, "lr": options.lr, "failed": failed}


def last_validation(facts: dict[str, Any]) -> float:
    """The final validation accuracy; −1 if it failed."""
    return -1.0 if facts["failed"] else float(facts["curve"][-1]["validation"])


def climb(
    train: Callable[[int, float], dict[str, Any]],
    first: Callable[[int, float], dict[str, Any]],
    budgets: Sequence[int],
    rates: Sequence[float],
) -> list[dict[str, Any]]:
    """The accuracy of fine-tunings of increasing length, each with its own schedule.

    `train` takes steps and a learning rate; `first` does the same for the first seed, with which the rate is chosen.
    """
    rows = []
    for steps in budgets:
        best = max(rates, key=lambda lr, steps=steps: last_validation(first(steps, lr)))  # type: ignore[misc]
        rows.append(row_of(train(steps, best)))
    return rows


def row_of(done: dict[str, Any], index: int = -1) -> dict[str, Any]:
    """The end of a fine-tuning (or another of its points), its cost, and its folder."""
    if done["failed"]:
        raise PortError(f"{done['folder']}: {done['failed']}")
    row = done["curve"][index]
    return {**row, "lr": done["lr"], "seconds": done["seconds"] if row["step"] else 0.0, "folder": done["folder"]}


def steps_to(curve: Sequence[dict[str, float]], accuracy: float) -> float | None:
    """The number of steps to reach a test accuracy, interpolated linearly between points; None if never reached.

    Example:
        >>> steps_to([{"step": 0, "test": 0.2}, {"step": 10, "test": 0.6}], 0.5)
        7.5
    """
    before: dict[str, float] | None = None
    for row in curve:
        if row["test"] >= accuracy:
            if before is None:
                return float(row["step"])
            share = (accuracy - before["test"]) / (row["test"] - before["test"])
            return before["step"] + share * (row["step"] - before["step"])
        before = row
    return None
