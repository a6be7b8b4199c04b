"""Ensembles of ported members compared with ensembles of fully fine-tuned models (table 3 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Answers = dict[str, np.ndarray]


def load_answers(folder: str | Path) -> Answers:
    """The outputs of a fine-tuning for the test images at each of its points."""
    with np.load(Path(folder) / "answers.npz") as file:
        return {name: file[name] for name in file.files}


def ensemble_accuracy(members: Sequence[Answers], step: int) -> float:
    """The accuracy of the mean of the members' probabilities after a number of steps.

    Example:
        >>> sure, unsure = np.array([[4.0, 0.0]]), np.array([[0.0, 1.0]])
        >>> labels = np.array([0])
        >>> ensemble_accuracy([{"step-5": sure, "labels": labels}, {"step-5": unsure, "labels": labels}], 5)
        1.0
    """
    mean = np.mean([_softmax(member[f"step-{step}"].astype(np.float64)) for member in members], axis=0)
    return float((mean.argmax(1) == members[0]["labels"]).mean())


def compare_ensembles(runs: Iterable[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """For each task and method with several members fine-tuned after the port: accuracies by steps, both ways."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if run["after"]:
            groups.setdefault((run["task"], run["method"]), []).append(run)
    rows = []
    for (task, method), some in groups.items():
        if len(some) < 2:
            continue
        after, plain = (
            {
                members[0]["step"]: ensemble_accuracy(
                    [load_answers(out / row["folder"]) for row in members], members[0]["step"]
                )
                for members in zip(*(run[kind] for run in some), strict=True)
            }
            for kind in ("after", "plain")
        )
        rows.append(
            {
                "task": task,
                "method": method,
                "members": len(some),
                "after": after,
                "plain": plain,
                "full": list(plain.values())[-1],
                "single": float(np.mean([run["test"]["direct"] for run in some])),
            }
        )
    return rows


def _softmax(answers: np.ndarray) -> np.ndarray:
    powers = np.exp(answers - answers.max(1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(1, keepdims=True)
    return shares
