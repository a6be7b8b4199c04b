"""Step by step along the trajectory: match, transplant, score on validation, keep the best, and remember everything."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from hf_retarget.errors import NotFiniteError, PortError, RetargetError
from hf_retarget.evaluate import Score
from hf_retarget.files import load_record, load_tensors, save_record, save_tensors
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.matching.fit import measure_fit
from hf_retarget.matching.problem import State
from hf_retarget.matching.trajectory import SCHEDULES
from hf_retarget.pipeline.judge import Judge
from hf_retarget.pipeline.pose import Task
from hf_retarget.training.batchnorm import BatchNormReset

PROGRESS = "progress.json"
_PERMUTATION = "permutation/"
_WEIGHTS = "weights/"


@dataclass(frozen=True)
class StepFigures:
    """What is known of one step."""

    step: int
    far: float | None
    """λ, the share of the way; None on an actual trajectory, which has no straight line to measure it on."""
    top1: float
    """Accuracy on validation."""
    loss: float
    objective: float
    sweeps: int
    moved: float
    """The share of neurons that the permutation puts elsewhere."""
    seconds: dict[str, float] = field(default_factory=dict)
    objectives: list[float] = field(default_factory=list)
    """After each sweep."""
    cosines: dict[str, float | None] | None = None
    """Of the gradients of both sides at this step: `before`, `unseen` and `after`, as `Cosines` has them."""

    @property
    def rank(self) -> tuple[float, float]:
        """What the best step is chosen by: accuracy, then the lower loss."""
        return self.top1, -self.loss if math.isfinite(self.loss) else -math.inf


@dataclass(frozen=True, eq=False)
class Best:
    """The best step so far: all weights of the ported model, BatchNorm's statistics included."""

    step: int
    weights: dict[str, Tensor] = field(repr=False)
    permutation: Permutation
    batchnorm: dict[str, Any] = field(repr=False)
    fit: dict[str, Any] = field(repr=False)
    """What the search for the permutation was worth, as plain values."""


@dataclass(frozen=True, eq=False)
class Walk:
    """All steps that were made, and the best of them."""

    history: tuple[StepFigures, ...]
    best: Best


@dataclass(frozen=True)
class Diary:
    """Files from which a walk that was killed goes on: state and best step of the last step that is wholly written."""

    folder: Path
    graph: PermutationGraph
    accelerator: Accelerator

    def read(self, say: Callable[[str], None]) -> tuple[State, list[StepFigures], Best] | None:
        """Where the walk has come to; None if it has not begun, or if what is there cannot be believed."""
        found = None
        if (self.folder / PROGRESS).exists():
            try:
                found = self._read()
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, RetargetError) as error:
                say(f"the state in '{self.folder}' is damaged ({error}); the steps are computed again")
        self.accelerator.wait_for_everyone()  # all have read before the main process goes on writing
        return found

    def write(self, state: State, history: Sequence[StepFigures], best: Best) -> None:
        """Remember a step. The file that says so is written last, and only then is the step before forgotten."""
        if not self.accelerator.is_main_process:
            return
        try:
            state.save(self._state(state.step))
            if best.step == state.step:
                self._write_best(best)
            facts = {"step": state.step, "best": best.step, "history": [asdict(each) for each in history]}
            save_record(self.folder / PROGRESS, facts)
            for path in (*self.folder.glob("state-*.safetensors"), *self.folder.glob("best-*.safetensors")):
                if path not in (self._state(state.step), self._best(best.step)):
                    path.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise PortError(f"cannot keep step {state.step} in '{self.folder}': {error}") from error

    def _read(self) -> tuple[State, list[StepFigures], Best]:
        facts = load_record(self.folder / PROGRESS)
        history = [StepFigures(**each) for each in facts["history"]]
        tensors, about = load_tensors(self._best(facts["best"]))
        indices = {group.name: tensors[_PERMUTATION + group.name] for group in self.graph.groups}
        weights = {name: tensors[_WEIGHTS + name] for name in about["order"]}
        permutation = Permutation(self.graph.fingerprint, indices)
        best = Best(facts["best"], weights, permutation, about["batchnorm"], about.get("fit", {}))
        return State.load(self._state(facts["step"]), self.graph), history, best

    def _write_best(self, best: Best) -> None:
        tensors = {_WEIGHTS + name: tensor for name, tensor in best.weights.items()}
        tensors |= {_PERMUTATION + name: index for name, index in best.permutation.indices.items()}
        facts = {"batchnorm": best.batchnorm, "fit": best.fit, "order": list(best.weights)}
        save_tensors(self._best(best.step), tensors, facts)

    def _state(self, step: int) -> Path:
        return self.folder / f"state-{step}.safetensors"

    def _best(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"


def walk(task: Task, judge: Judge, *, diary: Diary | None = None, doing: str = "porting") -> Walk:
    """Make all steps, or until the score has not become better for so many as the recipe says."""
    kept = diary.read(judge.progress.say) if diary else None
    state, history, best = kept if kept else (None, [], None)
    if history and diary:
        judge.progress.say(f"continuing the port after step {len(history)} of {task.steps}")
    states, warned = task.advance(state), set[str]()
    left = range(len(history) + 1, task.steps + 1)
    for step in judge.progress.track(left, doing, len(left)):
        if _stalled(history, judge.options.early_stop):
            break
        before = dict(judge.clock.seconds)
        with _naming_step(step, best):
            with judge.clock.stage("matching"), warnings.catch_warnings(record=True) as caught:
                state = next(states)
            # With a zero head, the first gradients are zero but for those of the head itself: nothing to warn of.
            for words in {str(each.message) for each in caught if step > 1} - warned:
                judge.progress.say(words)
                warned.add(words)
            reset = judge.settle(state.weights)
            score = judge.score(judge.inputs.data.validation)
        figures = _figures(task, judge, state, score, before)
        history.append(figures)
        better = best is None or figures.rank > history[best.step - 1].rank
        if best is None or better:
            fit = asdict(measure_fit(state.stacks, state.permutation))
            best = Best(step, judge.weights(), state.permutation, _summary(reset), fit)
        if diary:
            diary.write(state, history, best)
            judge.progress.row(
                _cells(figures, task.steps, history[best.step - 1]), _describe(figures, task.steps, better)
            )
    if best is None:
        raise PortError("the trajectory has no steps; a port needs at least one")
    return Walk(tuple(history), best)


@contextmanager
def _naming_step(step: int, best: Best | None) -> Iterator[None]:
    """Say at which step something became NaN, and up to where all was well."""
    try:
        yield
    except NotFiniteError as error:
        good = f"; all was well up to step {step - 1} (the best was step {best.step})" if best else ""
        raise NotFiniteError(
            f"step {step}: {error}{good}. Take smaller steps (--steps), or stop before (--early-stop)"
        ) from error


def share_moved(permutation: Permutation) -> float:
    """The share of neurons that a permutation puts elsewhere.

    Example:
        >>> share_moved(Permutation("", {"hidden": torch.tensor([1, 0, 2, 3])}))
        0.5
    """
    moved = sum(int((index != torch.arange(index.shape[-1])).sum()) for index in permutation.indices.values())
    total = sum(index.numel() for index in permutation.indices.values())
    return moved / total if total else 0.0


def _stalled(history: Sequence[StepFigures], patience: int | None) -> bool:
    if patience is None or not history:
        return False
    best = max(history, key=lambda each: (each.rank, -each.step))
    return history[-1].step - best.step >= patience


def _figures(task: Task, judge: Judge, state: State, score: Score, before: dict[str, float]) -> StepFigures:
    linear = judge.options.trajectory == "linear"
    return StepFigures(
        step=state.step,
        far=SCHEDULES[judge.options.schedule](state.step, task.steps) if linear else None,
        top1=score.top1,
        loss=score.loss,
        objective=state.objective,
        sweeps=state.sweeps,
        moved=share_moved(state.permutation),
        seconds=judge.clock.since(before),
        objectives=list(state.objectives),
        cosines=state.cosines._asdict() if state.cosines else None,
    )


def _summary(reset: BatchNormReset) -> dict[str, Any]:
    layers = {
        name: {"before": asdict(reset.before[name]), "after": asdict(after)} for name, after in reset.after.items()
    }
    return {"layers": reset.layers, "batches": reset.batches, "statistics": layers}


def _cells(figures: StepFigures, steps: int, best: StepFigures) -> dict[str, str]:
    return {
        "step": f"{figures.step} of {steps}",
        "validation": f"{figures.top1:.1%}",
        "best": f"{best.top1:.1%}{' ★' if best is figures else '  '}",
        "moved": f"{figures.moved:.0%}",
        "seconds": f"{sum(figures.seconds.values()):.1f}",
    }


def _describe(figures: StepFigures, steps: int, better: bool) -> str:
    moved = f", {figures.moved:.0%} of the neurons moved" if figures.moved else ""
    seconds = sum(figures.seconds.values())
    best = " (best so far)" if better else ""
    return f"step {figures.step} of {steps}: validation {figures.top1:.1%}{best}{moved}, {seconds:.1f} s"
