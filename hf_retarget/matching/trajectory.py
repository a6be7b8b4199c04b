"""The fine-tuning as a path θ₁⁰ … θ₁ᵀ in weight space, and its transplantation onto another base."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.files import load_tensors
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.matching.objective import Tensors

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda step, steps: step / steps,
    "cosine": lambda step, steps: (
        sum(_cosine(t, steps) for t in range(step)) / sum(_cosine(t, steps) for t in range(steps))
    ),
}
"""The position of each step on the straight line: λ(step, steps), from 0 to 1."""


def _cosine(step: int, steps: int) -> float:
    return 1 + math.cos(math.pi * step / steps)


class Trajectory(Protocol):
    """A path of weights in `steps` steps, as deltas from the source."""

    @property
    def steps(self) -> int:
        """T, the number of steps."""

    def delta(self, step: int) -> dict[str, Tensor]:
        """θ₁ˢ − θ₁⁰."""


@dataclass(frozen=True)
class LinearTrajectory:
    """The straight line from the source to the tuned weights.

    Example:
        >>> import torch
        >>> path = LinearTrajectory({"w": torch.zeros(1)}, {"w": torch.ones(1)}, steps=4)
        >>> [float(path.delta(step)["w"]) for step in range(5)]
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    source: Tensors
    tuned: Tensors
    steps: int
    schedule: str = "uniform"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise MatchError(f"a trajectory needs at least one step, not {self.steps}")
        if self.schedule not in SCHEDULES:
            raise MatchError(f"unknown schedule '{self.schedule}'; choose one of {', '.join(sorted(SCHEDULES))}")
        same_tensors(self.source, self.tuned, "source", "tuned")

    def delta(self, step: int) -> dict[str, Tensor]:
        """λ(s) · (tuned − source)."""
        far = SCHEDULES[self.schedule](step, self.steps)
        return {name: (self.tuned[name] - start) * far for name, start in self.source.items()}


@dataclass(frozen=True)
class CheckpointTrajectory:
    """Recorded weights: state dicts or safetensors files, read on demand."""

    source: Tensors
    checkpoints: Sequence[Tensors | str | Path]

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise MatchError("a trajectory needs at least one checkpoint")

    @property
    def steps(self) -> int:
        """The number of checkpoints."""
        return len(self.checkpoints)

    def delta(self, step: int) -> dict[str, Tensor]:
        """checkpoint − source; nothing at step 0."""
        if step == 0:
            return {name: start.new_zeros(start.shape) for name, start in self.source.items()}
        weights = self._read(self.checkpoints[step - 1])
        known = {name: weights[name] for name in self.source if name in weights}
        same_tensors(self.source, known, "source", f"checkpoint {step}")
        return {name: weights[name] - start for name, start in self.source.items()}

    def _read(self, checkpoint: Tensors | str | Path) -> Tensors:
        if isinstance(checkpoint, Mapping):
            return checkpoint
        try:
            found, _ = load_tensors(checkpoint)
        except OSError as error:
            raise MatchError(f"cannot read the checkpoint '{checkpoint}': {error}") from error
        for name in [name for name in found if name in self.source]:
            if not found[name].is_floating_point() or not found[name].isfinite().all():
                raise MatchError(f"'{name}' in the checkpoint '{checkpoint}' must have finite real values")
        return found


def transplant(
    target: Tensors, delta: Tensors, graph: PermutationGraph, permutation: Permutation, scale: float = 1.0
) -> dict[str, Tensor]:
    """target + scale · π delta."""
    same_tensors(target, delta, "target", "delta")
    left = dict(delta)
    del delta  # its tensors leave memory one by one
    moved = graph.apply_each(permutation, ((name, left.pop(name)) for name in target))
    return {name: target[name] + scale * each.to(target[name]) for name, each in moved}


def same_tensors(ours: Tensors, theirs: Tensors, our_name: str, their_name: str) -> None:
    """Check that both sides have the same tensors; raise TensorMismatchError for the first difference."""
    for name in (*ours, *theirs):
        if name not in theirs:
            raise TensorMismatchError(f"'{name}' is in the {our_name} weights but not in the {their_name} weights")
        if name not in ours:
            raise TensorMismatchError(f"'{name}' is in the {their_name} weights but not in the {our_name} weights")
        if ours[name].shape != theirs[name].shape:
            raise TensorMismatchError(
                f"'{name}' has shape {list(ours[name].shape)} in the {our_name} weights, "
                f"but {list(theirs[name].shape)} in the {their_name} weights"
            )
