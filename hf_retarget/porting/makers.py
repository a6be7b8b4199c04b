"""How contenders are made: steps along the trajectory, models kept as they are, and fine-tuning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_retarget.contenders import PORT, Contender
from hf_retarget.document import StepFigures
from hf_retarget.errors import NotFiniteError, PortError
from hf_retarget.evaluation.batchnorm import BatchNormReset
from hf_retarget.evaluation.scorer import Score
from hf_retarget.graph import Permutation
from hf_retarget.matching.fit import measure_fit
from hf_retarget.matching.methods import begin, run
from hf_retarget.matching.problem import State
from hf_retarget.matching.trajectory import SCHEDULES, transplant
from hf_retarget.porting.resume import BestStep, StepDiary
from hf_retarget.recipe import TrainOptions
from hf_retarget.training.loop import train_model

if TYPE_CHECKING:
    from hf_retarget.porting.contest import Contest

_POINTS = 5  # of a validation curve, if the recipe does not say how often to evaluate
_CHECKPOINTS = 5

Curve = tuple[tuple[float, float], ...]
"""(training images behind the gradients so far, accuracy on validation)."""


class Declined(Exception):
    """A contender does not enter, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class Made:
    """What a contender made."""

    weights: dict[str, Tensor] = field(repr=False)
    """The whole state dict."""
    validation: float
    """Accuracy on validation."""
    gradients: int = 0
    """Gradients of a minibatch that it took."""
    steps: tuple[StepFigures, ...] = ()
    best: BestStep | None = None
    curve: Curve = ()

    @property
    def rank(self) -> tuple[float, float]:
        """What the winner is chosen by: accuracy on validation, then the lower loss."""
        return _rank(self.steps[self.best.step - 1]) if self.best else (self.validation, -math.inf)


# ---- models as they are


def keep_tuned(contest: Contest, contender: Contender) -> Made:
    """The tuned model, on the old base."""
    return _keep(contest, contest.inputs.tuned.in_float32())


def keep_base(contest: Contest, contender: Contender) -> Made:
    """The new base with the head that the port starts from."""
    return _keep(contest, contest.inputs.heads.target)


def keep_tuned_target(contest: Contest, contender: Contender) -> Made:
    """The real fine-tuning of the new base."""
    if contest.inputs.tuned_target is None:
        raise Declined("the real fine-tuning of the new base was not given")
    return _keep(contest, contest.inputs.tuned_target.in_float32())


def _keep(contest: Contest, weights: dict[str, Tensor]) -> Made:
    contest.scorer.load(weights)
    return Made(weights, contest.scorer.score(contest.inputs.data.validation).top1)


# ---- steps along the trajectory


def follow_trajectory(contest: Contest, contender: Contender) -> Made:
    """Step by step: match, transplant, reset BatchNorm, score on validation; the best step counts."""
    return _follow(contest, contender, None)


def follow_given_permutation(contest: Contest, contender: Contender) -> Made:
    """The same with one permutation for all steps, which was found before."""
    return _follow(contest, contender, contest.given_permutation)


def _follow(contest: Contest, contender: Contender, permutation: Permutation | None) -> Made:
    problem, progress = contest.problem, contest.run.progress
    options, total = contest.recipe.port, problem.trajectory.steps
    diary = _open_diary(contest, contender)
    kept = diary.read() if diary else None
    state, history, best = kept if kept else (None, [], None)
    if history:
        progress.say(f"continuing the port after step {len(history)} of {total}")
    states = run(contender.name, problem, state) if permutation is None else _carry(contest, permutation, state)
    left, warned = range(len(history) + 1, total + 1), set[str]()
    for step in progress.track(left, contender.label, len(left)):
        if _stalled(history, options.early_stop):
            break
        before = dict(contest.run.clock.seconds)
        with _naming_step(step, best):
            with contest.run.clock.stage("matching"), warnings.catch_warnings(record=True) as caught:
                state = next(states)
            # With a zero head, the first gradients are zero but for those of the head itself: nothing to warn of.
            for words in {str(each.message) for each in caught if step > 1} - warned:
                progress.say(words)
                warned.add(words)
            contest.scorer.load(contest.inputs.heads.target, state.weights)
            reset = contest.scorer.reset_batchnorm()
            score = contest.scorer.score(contest.inputs.data.validation)
        figures = _describe_step(contest, state, score, before)
        history.append(figures)
        if best is None or _rank(figures) > _rank(history[best.step - 1]):
            fit = asdict(measure_fit(state.stacks, state.permutation))
            best = BestStep(step, contest.scorer.weights(), state.permutation, _describe_reset(reset), fit)
        if diary:
            diary.write(state, history, best)
        if contest.role == PORT:
            progress.row(*_describe_row(figures, total, history[best.step - 1]))
    if best is None:
        raise PortError("the trajectory has no steps; a port needs at least one")
    spent = [contender.gradients(each.step) * options.grad_batches for each in history]
    curve = tuple((options.batch_size * at, each.top1) for at, each in zip(spent, history, strict=True) if at)
    return Made(best.weights, history[best.step - 1].top1, spent[-1], tuple(history), best, curve)


def _open_diary(contest: Contest, contender: Contender) -> StepDiary | None:
    if contest.place.out is None or (contest.role != PORT and not contender.gradients(1)):
        return None  # what costs no gradients is computed again
    return StepDiary(contest.place.hidden, contender.name, contest.problem.graph, contest.run)


def _carry(contest: Contest, permutation: Permutation, state: State | None) -> Iterator[State]:
    problem = contest.problem
    state = begin(problem) if state is None else state
    for step in range(state.step + 1, problem.trajectory.steps + 1):
        weights = transplant(problem.target, problem.trajectory.delta(step), problem.graph, permutation)
        yield State(step, permutation, weights, state.stacks)


@contextmanager
def _naming_step(step: int, best: BestStep | None) -> Iterator[None]:
    """Say at which step something became NaN, and up to where all was well."""
    try:
        yield
    except NotFiniteError as error:
        good = f"; all was well up to step {step - 1} (the best was step {best.step})" if best else ""
        raise NotFiniteError(
            f"step {step}: {error}{good}. Take smaller steps (--steps), or stop before (--early-stop)"
        ) from error


def _rank(figures: StepFigures) -> tuple[float, float]:
    loss = figures.loss
    return figures.top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


def _stalled(history: Sequence[StepFigures], patience: int | None) -> bool:
    if patience is None or not history:
        return False
    best = max(history, key=lambda each: (_rank(each), -each.step))
    return history[-1].step - best.step >= patience


def _describe_step(contest: Contest, state: State, score: Score, before: dict[str, float]) -> StepFigures:
    options, steps = contest.recipe.port, contest.problem.trajectory.steps
    return StepFigures(
        step=state.step,
        far=SCHEDULES[options.schedule](state.step, steps) if options.trajectory == "linear" else None,
        top1=score.top1,
        loss=score.loss,
        objective=state.objective,
        sweeps=state.sweeps,
        moved=state.permutation.moved,
        seconds=contest.run.clock.since(before),
        objectives=tuple(state.objectives),
        cosines=state.cosines._asdict() if state.cosines else None,
    )


def _describe_reset(reset: BatchNormReset) -> dict[str, Any]:
    layers = {
        name: {"before": asdict(reset.before[name]), "after": asdict(after)} for name, after in reset.after.items()
    }
    return {"layers": reset.layers, "batches": reset.batches, "statistics": layers}


def _describe_row(figures: StepFigures, steps: int, best: StepFigures) -> tuple[dict[str, str], str]:
    """The row of a growing table, and the line for those who have no terminal."""
    better, seconds = best is figures, sum(figures.seconds.values())
    cells = {
        "step": f"{figures.step} of {steps}",
        "validation": f"{figures.top1:.1%}",
        "best": f"{best.top1:.1%}{' ★' if better else '  '}",
        "moved": f"{figures.moved:.0%}",
        "seconds": f"{seconds:.1f}",
    }
    moved = f", {figures.moved:.0%} of the neurons moved" if figures.moved else ""
    words = " (best so far)" if better else ""
    return cells, f"step {figures.step} of {steps}: validation {figures.top1:.1%}{words}{moved}, {seconds:.1f} s"


# ---- fine-tuning


def train_on(contest: Contest, contender: Contender) -> Made:
    """Fine-tune the winner, as the recipe says."""
    spent = contest.recipe.port.batch_size * contest.winner.made.gradients
    return _train(contest, contender, contest.winner.made.weights, contest.recipe.finetune, spent)


def train_plainly(contest: Contest, contender: Contender) -> Made:
    """Fine-tune the new base on as many images as the port and the fine-tuning after it saw."""
    recipe, price = contest.recipe, contest.price
    if not price.alternative:
        raise Declined("no control: this port took no gradients, so plain fine-tuning had none to take")
    options = replace(recipe.finetune, steps=price.alternative, epochs=0.0, batch_size=recipe.port.batch_size)
    return _train(contest, contender, contest.inputs.heads.target, options, 0)


def _train(
    contest: Contest, contender: Contender, weights: dict[str, Tensor], options: TrainOptions, spent: int
) -> Made:
    scorer, data, name = contest.scorer, contest.inputs.data, contender.name
    steps = options.total_steps(len(data.train))
    options = replace(
        options,
        evaluate_every=options.evaluate_every or -(-steps // _POINTS),
        checkpoint_every=options.checkpoint_every or -(-steps // _CHECKPOINTS),
    )
    scorer.load(weights)

    def score(model: nn.Module, step: int) -> float:
        return scorer.score(data.validation).top1

    with contest.run.clock.stage(name):
        checkpoint = contest.place.hidden / f"{name}.training.safetensors" if contest.place.out else None
        history = train_model(scorer.model, data.train, options, contest.run, checkpoint=checkpoint, score=score)
    curve = tuple((float(spent + options.batch_size * step), value) for step, value in history.scores)
    return Made(scorer.weights(), history.scores[-1][1], steps, curve=curve)
