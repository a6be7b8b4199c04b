"""How contenders are made: models as they are, closed-form heads, a line, steps of a trajectory, and fine-tuning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_retarget.contenders import FACTORS, FURTHER, PORT, Contender
from hf_retarget.document import StepFigures
from hf_retarget.errors import NotFiniteError, PortError
from hf_retarget.evaluation.refit import Fitted
from hf_retarget.evaluation.scorer import Score, paired_error
from hf_retarget.files import load_tensors, save_tensors
from hf_retarget.matching.fit import measure_fit
from hf_retarget.matching.methods import begin, fgmt, fgmt_sign
from hf_retarget.matching.problem import State
from hf_retarget.matching.trajectory import SCHEDULES, transplant
from hf_retarget.porting.contest import Contest, Declined, Made, Rank, rank
from hf_retarget.porting.resume import BestStep, StepDiary, Track
from hf_retarget.recipe import TrainOptions
from hf_retarget.training import train_model

Tensors = Mapping[str, Tensor]

EARLY_LEAD, LATE_LEAD = 0.1, 0.01
"""Lead on validation images that makes a course follow whole steps instead of masked ones: from the second step, and
from half of the way. Between wide random networks (MNIST), whole steps lead by 20 points from the start; between two
ResNet-20 by up to 6 until the fourth step, and they end 8 to 16 points behind."""
BEHIND = 0.05
"""Whole steps this far behind at half of the way or later are no longer scored: none in our records recovered. Where
a port ends this far behind, its head is not refitted: it won in none of our records."""
_PILOT = 3  # start, learning rate and targets are chosen on one third of the steps
_RATES = (1 / 3, 3.0)  # further learning rates to try, as factors of the recipe's
_POINTS = 5  # points of a validation curve, and checkpoints, unless the recipe sets them


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
    return Made(weights, contest.scorer.score(contest.chosen_by))


# ---- closed-form heads


def refit_tuned(contest: Contest, contender: Contender) -> Made:
    """The tuned model with its head refitted."""
    return _refit(contest, contest.inputs.tuned.in_float32())


def refit_source(contest: Contest, contender: Contender) -> Made:
    """The old base with a closed-form head."""
    return _refit_base(contest, contest.inputs.heads.source)


def refit_target(contest: Contest, contender: Contender) -> Made:
    """The new base with a closed-form head."""
    return _refit_base(contest, contest.inputs.heads.target)


def refit_entered(contest: Contest, contender: Contender) -> Made:
    """An entry with its head refitted; declines if another entry of its course is far ahead."""
    entered = contest.find(contender.refits)
    if entered is None:
        raise Declined("")  # the reason has been noted already
    tracks = contest.courses.get(contender.course, {})
    reached = {name: max(step.top1 for step in track.steps) for name, track in tracks.items()}
    if tracks and max(reached.values()) - reached[contender.refits] > BEHIND:
        raise Declined("")
    made = _refit(contest, entered.made.weights)
    best = replace(entered.made.best, weights=made.weights) if entered.made.best else None
    step = entered.made.detail or (f"step {best.step}" if best else "")
    detail = ", ".join(filter(None, (step, made.detail)))
    return replace(made, gradients=entered.made.gradients, best=best, detail=detail)


def _refit_base(contest: Contest, weights: dict[str, Tensor]) -> Made:
    """Keep or re-estimate the base's BatchNorm statistics, whichever is better on validation."""
    made = _refit(contest, weights)
    contest.scorer.load(weights)
    if not contest.scorer.reset_batchnorm().layers:
        return made
    other = _refit(contest, contest.scorer.weights())
    if other.rank > made.rank:
        return replace(other, detail=f"{other.detail}, BatchNorm re-estimated")
    return made


def _refit(contest: Contest, weights: dict[str, Tensor]) -> Made:
    contest.scorer.load(weights)
    found: Fitted = contest.fit_head()
    detail = f"fitted to {found.targets}"
    return Made({**weights, **found.weights}, found.score, detail=detail, targets=found.targets)


# ---- the naive line


def follow_line(contest: Contest, contender: Contender) -> Made:
    """The new base plus a multiple of the fine-tuning, for several factors, with BatchNorm re-estimated for each."""
    inputs, scorer = contest.inputs, contest.scorer
    delta = inputs.trajectory.delta(inputs.trajectory.steps)
    base = inputs.parameters(inputs.heads.target)
    chosen = contest.recipe.port.alpha
    steps, best, reached = list[StepFigures](), None, None
    for factor in contest.run.progress.track((chosen,) if chosen else FACTORS, contender.label):
        before = dict(contest.run.clock.seconds)
        scorer.load(inputs.heads.target, {name: base[name] + factor * delta[name] for name in base})
        try:
            reset = scorer.reset_batchnorm()
            score = scorer.score(contest.chosen_by)
        except NotFiniteError:  # too far; other factors may work
            continue
        seconds = contest.run.clock.since(before)
        steps.append(StepFigures(len(steps) + 1, factor, score.top1, score.loss, seconds=seconds))
        if best is None or rank(score) > rank(steps[best.step - 1]):
            best, reached = BestStep(len(steps), scorer.weights(), None, reset.to_json(), {}), score
    if best is None or reached is None:
        raise PortError("the model returns NaN at every factor of the fine-tuning; try a smaller one (--alpha)")
    return Made(best.weights, reached, steps=tuple(steps), best=best, detail=f"factor {steps[best.step - 1].far:g}")


# ---- steps along the trajectory

Advance = Callable[[State, Mapping[str, Track]], tuple[State, dict[str, Tensors]]]
"""One step of a course: returns the next state, and the weights it offers for each track."""


def follow_trajectory(contest: Contest, contender: Contender) -> Made:
    """Match, transplant, reset BatchNorm and score at each step; the best step on validation is kept."""
    method = contender.resolve(contender.step)

    def advance(state: State, tracks: Mapping[str, Track]) -> tuple[State, dict[str, Tensors]]:
        after: State = method(contest.problem, state)
        return after, {contender.name: after.weights}

    return _make(contest, contender, _follow(contest, contender, contender.name, advance))


def follow_given_permutation(contest: Contest, contender: Contender) -> Made:
    """Follow the trajectory with one given permutation for all steps."""
    problem, permutation = contest.problem, contest.given_permutation

    def advance(state: State, tracks: Mapping[str, Track]) -> tuple[State, dict[str, Tensors]]:
        delta = problem.trajectory.delta(state.step + 1)
        weights = transplant(problem.target, delta, problem.graph, permutation)
        return State(state.step + 1, permutation, weights, state.stacks), {contender.name: weights}

    return _make(contest, contender, _follow(contest, contender, contender.name, advance))


def follow_course(contest: Contest, contender: Contender) -> Made:
    """Follow masked and whole steps with one permutation, sharing the gradients.

    Gradients are taken along the masked steps until whole ones lead on validation images, and along those afterwards.
    """
    if contender.course not in contest.courses:
        if reason := contest.nothing_to_match:
            raise Declined(reason)
        advance = partial(_advance_both, contest)
        contest.courses[contender.course] = _follow(contest, contender, contender.course, advance)
        masked, whole = (len(contest.courses[contender.course][name].steps) for name in ("matched", "whole"))
        if masked < whole:
            contest.note(
                f"whole steps were ahead of masked ones after step {masked}, so gradients followed them from there"
            )
    made = _make(contest, contender, contest.courses[contender.course])
    return _go_further(contest, made) if contender.goes_further else made


def _go_further(contest: Contest, made: Made) -> Made:
    """Scale up masked steps, which leave out half of the fine-tuning, as long as validation images agree."""
    scorer, target, found = contest.scorer, contest.inputs.heads.target, made
    for factor in FURTHER:
        moved = {name: torch.lerp(target[name], made.weights[name], factor) for name in contest.inputs.names}
        scorer.load(target, moved)
        try:
            reset, score = scorer.reset_batchnorm(), scorer.score(contest.chosen_by)
        except NotFiniteError:  # too far
            break
        if rank(score) <= found.rank or made.best is None:
            break
        best = replace(made.best, weights=scorer.weights(), batchnorm=reset.to_json())
        words = f"step {best.step}, factor {factor:g}"
        found = replace(made, weights=best.weights, validation=score, best=best, detail=words)
    return found


def _advance_both(contest: Contest, state: State, tracks: Mapping[str, Track]) -> tuple[State, dict[str, Tensors]]:
    problem = contest.problem

    def carry(state: State) -> dict[str, Tensor]:
        return transplant(problem.target, problem.trajectory.delta(state.step), problem.graph, state.permutation)

    going = _choose_steps(tracks, problem.trajectory.steps)
    if going == ("whole",):
        after = fgmt(problem, replace(state, weights=carry(state)))
        return after, {"whole": after.weights}
    after = fgmt_sign(problem, state)
    return after, {name: after.weights if name == "matched" else carry(after) for name in going}


def _choose_steps(tracks: Mapping[str, Track], total: int) -> tuple[str, ...]:
    both = ("matched", "whole")
    masked, whole = (tracks[name].steps if name in tracks else [] for name in both)
    if len(masked) != len(whole):  # already decided
        return both[:1] if len(masked) > len(whole) else both[1:]
    if len(whole) < 2:
        return both
    lead, late = whole[-1].top1 - masked[-1].top1, 2 * len(whole) >= total
    if lead > (LATE_LEAD if late else EARLY_LEAD):
        return both[1:]
    return both[:1] if late and -lead > BEHIND else both


def _follow(contest: Contest, contender: Contender, course: str, advance: Advance) -> dict[str, Track]:
    problem, progress = contest.problem, contest.run.progress
    options, total = contest.recipe.port, problem.trajectory.steps
    diary = _open_diary(contest, contender, course)
    kept = diary.read() if diary else None
    state, tracks = kept if kept else (begin(problem), dict[str, Track]())
    if state.step:
        progress.say(f"continuing the port after step {state.step} of {total}")
    left, warned = range(state.step + 1, total + 1), set[str]()
    for step in progress.track(left, contender.label, len(left)):
        active = [
            each.steps for each in tracks.values() if len(each.steps) == state.step
        ]  # the other track was dropped
        if active and all(_stalled(each, options.early_stop) for each in active):
            break
        before = dict(contest.run.clock.seconds)
        with _naming_step(step, tracks):
            with (
                contest.run.clock.stage("matching"),
                contest.scorer.without_weights(),  # gradients are taken at other weights
                warnings.catch_warnings(record=True) as caught,
            ):
                state, offered = advance(state, tracks)
            # With a zero head, all first gradients but the head's own are zero: no reason to warn.
            for words in {str(each.message) for each in caught if step > 1} - warned:
                progress.say(words)
                warned.add(words)
            for name, weights in offered.items():
                _add_step(contest, tracks.setdefault(name, Track()), state, weights, before)
                before = dict(contest.run.clock.seconds)
        if diary:
            diary.write(state, tracks)
        if contest.role == PORT:
            ahead = max((tracks[name] for name in offered), key=lambda each: rank(each.steps[-1]))
            progress.row(*ahead.describe(total))
    if not tracks:
        raise PortError("the trajectory has no steps; a port needs at least one")
    return tracks


def _add_step(contest: Contest, track: Track, state: State, weights: Tensors, before: dict[str, float]) -> None:
    scorer = contest.scorer
    scorer.load(contest.inputs.heads.target, weights)
    reset = scorer.reset_batchnorm()
    score = scorer.score(contest.chosen_by)
    track.steps.append(_describe_step(contest, state, score, before))
    if track.best is None or rank(score) > rank(track.steps[track.best.step - 1]):
        fit = asdict(measure_fit(state.stacks, state.permutation))
        reached = scorer.weights(known=weights)
        track.best = BestStep(state.step, reached, state.permutation, reset.to_json(), fit)
        track.score = score


def _make(contest: Contest, contender: Contender, tracks: Mapping[str, Track]) -> Made:
    track, options = tracks[contender.name], contest.recipe.port
    assert track.best is not None
    taken = max(len(each.steps) for each in tracks.values())
    spent = [contender.gradients(each.step) * options.grad_batches for each in track.steps]
    curve = tuple((options.batch_size * at, each.top1) for at, each in zip(spent, track.steps, strict=True) if at)
    score = track.score
    if score is None:  # from a run that was killed
        contest.scorer.load(track.best.weights)
        score = contest.scorer.score(contest.chosen_by)
    gradients = contender.gradients(taken) * options.grad_batches
    return Made(track.best.weights, score, gradients, tuple(track.steps), track.best, curve)


def _open_diary(contest: Contest, contender: Contender, course: str) -> StepDiary | None:
    if contest.place.out is None or (contest.role != PORT and not contender.gradients(1)):
        return None  # without gradients, steps are cheap to repeat
    return StepDiary(contest.place.hidden, course, contest.problem.graph, contest.run)


@contextmanager
def _naming_step(step: int, tracks: Mapping[str, Track]) -> Iterator[None]:
    """Name the step at which something became NaN, and the best step before it."""
    try:
        yield
    except NotFiniteError as error:
        best = next((each.best for each in tracks.values() if each.best), None)
        good = f"; all steps up to {step - 1} were finite (best: step {best.step})" if best else ""
        raise NotFiniteError(
            f"step {step}: {error}{good}. Take smaller steps (--steps), or stop earlier (--early-stop)"
        ) from error


def _stalled(history: Sequence[StepFigures], patience: int | None) -> bool:
    if patience is None or not history:
        return False
    best = max(history, key=lambda each: (rank(each), -each.step))
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


# ---- fine-tuning


@dataclass(frozen=True, eq=False)
class _Way:
    """One way to fine-tune: initial weights, learning rate and targets."""

    name: str
    weights: dict[str, Tensor] = field(repr=False)
    lr: float
    targets: str

    @property
    def detail(self) -> str:
        aim = {"labels": "", "teacher": ", after the tuned model", "both": ", after labels and the tuned model"}
        return f"lr {self.lr:g}{aim[self.targets]}"


def train_on(contest: Contest, contender: Contender) -> Made:
    """Fine-tune the winner, with targets and (with `--method auto`) a learning rate chosen on validation images."""
    options = contest.recipe.finetune
    spent = contest.recipe.port.batch_size * contest.winner.made.gradients
    start = contest.winner.made.weights
    kinds = contest.kinds_of_targets
    ways = [_Way(f"{contender.name}-{kind}", start, options.lr, kind) for kind in kinds]
    made = _train(contest, contender, ways, options, spent)
    if not contest.judges_by_agreement:
        return made
    # Learning from the tuned model raises agreement with it, mistakes included: a small increase is not a gain.
    contest.scorer.load(start)
    before = contest.scorer.score(contest.inputs.data.validation)
    if made.validation.top1 - before.top1 > paired_error(made.validation, before):
        return made
    return replace(made, weights=start, validation=before, detail=f"{made.detail}: no clear gain, left as it was")


def train_plainly(contest: Contest, contender: Contender) -> Made:
    """Fine-tune the new base at the price of the port and the fine-tuning after it, as well as possible.

    The better of two initial heads and the best of three learning rates are used; the search is not charged.
    """
    recipe, price = contest.recipe, contest.price
    if not price.alternative:
        raise Declined("no control: the port cost nothing, which leaves plain fine-tuning no budget")
    options = replace(recipe.finetune, steps=price.alternative, epochs=0.0, batch_size=recipe.port.batch_size)
    targets = contest.kinds_of_targets[0]  # labels, if there are any
    way = _Way("plain-zero", contest.inputs.heads.target, options.lr, targets)
    starts, fitted = [way], contest.find("head")
    if fitted is not None:
        starts.append(replace(way, name="plain-head", weights=fitted.made.weights))
    return _train(contest, contender, starts, options, 0)


def _train(contest: Contest, contender: Contender, ways: Sequence[_Way], options: TrainOptions, spent: int) -> Made:
    """Try several ways to fine-tune on a third of the steps, and pursue the best one on validation images."""
    steps = options.total_steps(len(contest.inputs.data.train))
    short, whole = replace(options, steps=steps // _PILOT, epochs=0.0), replace(options, steps=steps, epochs=0.0)
    with contest.run.clock.stage(f"{contender.name}: search"):
        way, rank = _try(contest, ways, short)
        if contender.is_alternative or contest.is_auto:
            faster = [replace(way, name=f"{way.name}-{each:.2g}", lr=way.lr * each) for each in _RATES]
            other, better = _try(contest, faster, short)
            way = other if better > rank else way
    with contest.run.clock.stage(contender.name):
        made = _pursue(contest, replace(way, name=contender.name), whole)
    curve = tuple((float(spent + options.batch_size * at), value) for at, value in made.curve)
    helped = any(not torch.equal(made.weights[name], way.weights[name]) for name in way.weights)
    detail = f"{steps:,} minibatches, {way.detail}" if helped else f"{steps:,} minibatches did not help"
    return replace(made, curve=curve, detail=detail)


def _try(contest: Contest, ways: Sequence[_Way], options: TrainOptions) -> tuple[_Way, Rank]:
    """The best of several ways to fine-tune; the first if there are too few steps to try them."""
    best, highest = ways[0], (-math.inf, -math.inf)
    if options.steps < _PILOT:
        return best, highest
    for way in ways:
        try:
            rank = _pursue(contest, replace(way, name=f"{way.name}-trial"), options).rank
        except NotFiniteError:  # the learning rate is too high
            continue
        if rank > highest:
            best, highest = way, rank
    return best, highest


def _pursue(contest: Contest, way: _Way, options: TrainOptions) -> Made:
    """Fine-tune in one way and keep the best scored step; after the first, BatchNorm is re-estimated before scoring.

    Only validation images are used for scoring, since training images are memorised.
    """
    scorer, place, data = contest.scorer, contest.place, contest.inputs.data
    options = replace(
        options,
        lr=way.lr,
        evaluate_every=options.evaluate_every or -(-options.steps // _POINTS),
        checkpoint_every=options.checkpoint_every or -(-options.steps // _POINTS),
    )
    checkpoint = place.hidden / f"{way.name}.training.safetensors" if place.out else None
    store = place.hidden / f"{way.name}.best.safetensors" if place.out else None
    best, weights = _read_best(store, checkpoint, way.weights)
    contest.run.accelerator.wait_for_everyone()  # every process reads before the main one writes

    def score(model: nn.Module, step: int) -> float:
        nonlocal best, weights
        if step:
            scorer.reset_batchnorm()
        found = scorer.score(data.validation)
        if rank(found) > best:
            best, weights = rank(found), scorer.weights()
            if store is not None and contest.run.is_main:
                save_tensors(store, weights, {"top1": found.top1, "loss": found.loss})
        return found.top1

    scorer.load(way.weights)
    train = contest.teacher.teach(data.train, way.targets)
    history = train_model(scorer.model, train, options, contest.run, checkpoint=checkpoint, score=score)
    scorer.load(weights)
    return Made(weights, scorer.score(data.validation), options.steps, curve=history.scores)


def _read_best(store: Path | None, checkpoint: Path | None, start: Tensors) -> tuple[Rank, dict[str, Tensor]]:
    """The best weights of an interrupted fine-tuning; without them, it starts over."""
    with suppress(OSError, KeyError):  # missing or damaged
        if store is not None:
            tensors, about = load_tensors(store)
            return (about["top1"], -about["loss"]), {name: tensors[name] for name in start}
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return (-math.inf, -math.inf), dict(start)
