"""The contest of a port: contenders enter one by one, validation images choose the winner, a verdict sums it up."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from hf_retarget.contenders import AFTER, AUTO, PORT, Contender
from hf_retarget.data import ImageData, Split
from hf_retarget.document import GateFacts, RelationFacts, StepFigures
from hf_retarget.errors import MatchError, ModelError, PortError, TraceError
from hf_retarget.evaluation.gates import Evidence, list_errors, list_warnings, look_at_gates
from hf_retarget.evaluation.refit import HEAD_IMAGES, Fitted, fit_head
from hf_retarget.evaluation.scorer import Score, Scorer, Teacher, answer_for_labels, measure_lead, paired_error
from hf_retarget.graph import Permutation, load_permutation
from hf_retarget.matching.problem import Problem
from hf_retarget.models.relation import INDEPENDENT
from hf_retarget.porting.cost import FEW, Price, count_images, price_port
from hf_retarget.porting.inputs import Inputs, Traced, trace_model
from hf_retarget.porting.resume import BestStep, Track, Workplace
from hf_retarget.recipe import Recipe
from hf_retarget.run import Run
from hf_retarget.words import percent

Rank = tuple[float, float]
Curve = tuple[tuple[float, float], ...]  # (training images used for gradients so far, validation accuracy)

CLOSE = 0.9
"""Between bases of one lineage, matching is skipped once a port without gradients reaches this share of the tuned
model's validation accuracy: it would find the identity, or move neurons that should stay (docs/method.md)."""


def rank(figures: StepFigures | Score) -> Rank:
    """Sort key of steps and contenders: higher accuracy, then lower loss."""
    loss = figures.loss
    return figures.top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


class Declined(Exception):
    """Raised by a contender that does not enter; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class Made:
    """The weights a contender made, and how they were chosen."""

    weights: dict[str, Tensor] = field(repr=False)
    """The full state dict."""
    validation: Score
    """Score on the images that choose among contenders."""
    gradients: int = 0
    """Minibatch gradients taken."""
    steps: tuple[StepFigures, ...] = ()
    best: BestStep | None = None
    curve: Curve = ()
    detail: str = ""
    """What was chosen, for display: a factor, a learning rate."""
    targets: str = ""
    """The targets its head was fitted to."""

    @property
    def rank(self) -> Rank:
        """Sort key for choosing the winner."""
        return rank(self.validation)


@dataclass(frozen=True, eq=False)
class Entry:
    """A contender that has entered, what it made, and its score on the test images."""

    contender: Contender
    role: str
    made: Made
    test: Score
    also: Score | None = None
    """Test score on the second set of images."""
    images: int = 0
    """Images forwarded to make it, without those the tuned model answered for all contenders."""
    seconds: float = 0.0


class Contest:
    """Everything a contender may use, and the entries so far."""

    def __init__(self, inputs: Inputs, run: Run, place: Workplace) -> None:
        self.run, self.place, recipe = run, place, inputs.recipe
        self.scorer = Scorer(inputs.model, inputs.data, inputs.classes, recipe.port, run)
        self.teacher = Teacher(self.scorer, inputs.tuned.in_float32())
        self.judges_by_agreement = not inputs.data.labelled or recipe.port.targets == "teacher"
        """Whether contenders are chosen by agreement with the tuned model instead of labels."""
        if self.judges_by_agreement:
            data = answer_for_labels(inputs.data, self.teacher, test=not inputs.data.labelled)
            inputs = replace(inputs, data=data)
            self.scorer = self.teacher.scorer = Scorer(inputs.model, data, inputs.classes, recipe.port, run)
        if inputs.also is not None and not inputs.also.labelled:
            inputs = replace(inputs, also=answer_for_labels(inputs.also, self.teacher, test=True))
        self.inputs = inputs
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self.courses: dict[str, dict[str, Track]] = {}
        """Steps shared by several contenders, by name."""
        self.role = PORT
        """Role of the contender that is entering."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the port."""
        return self.inputs.recipe

    @property
    def relation(self) -> RelationFacts:
        """How the bases are related."""
        return self.inputs.relation

    @property
    def is_auto(self) -> bool:
        """Whether several contenders may win."""
        return self.inputs.given.asked(self.recipe).method == AUTO

    def note(self, words: str) -> None:
        """Show a message, and record it in the result."""
        self.notes.append(words)
        self.run.progress.say(words)

    # ---- images and targets

    @cached_property
    def is_small(self) -> bool:
        """Whether there are too few validation images to choose among contenders on them alone."""
        data = self.inputs.data
        alike = data.validation.rows is data.train.rows
        return self.is_auto and len(data.validation) < FEW and alike

    @cached_property
    def chosen_by(self) -> Split:
        """The images that choose among steps and contenders.

        Where validation images are few, training images are added; closed-form heads are then scored by leaving one
        image out.
        """
        data = self.inputs.data
        if not self.is_small:
            return data.validation
        return data.train.join(data.validation, f"{data.name}, to choose by").take(HEAD_IMAGES, self.recipe.port.seed)

    @cached_property
    def _head_images(self) -> tuple[Split, ...]:
        data, also, seed = self.inputs.data, self.inputs.also, self.recipe.port.seed
        own = self.chosen_by if self.is_small else data.train.take(HEAD_IMAGES, seed)
        own = replace(own, name=f"{data.name}, for heads")
        if also is None or not self.inputs.given.also_data_fit:
            return (own,)
        return own, replace(also.train.take(HEAD_IMAGES, seed), name=f"{also.name}, for heads")

    @cached_property
    def kinds_of_targets(self) -> tuple[str, ...]:
        """Candidate targets of heads and fine-tuning."""
        asked = self.recipe.port.targets
        if not self.inputs.data.labelled:
            return ("teacher",)
        return ("labels", "teacher", "both") if asked == AUTO else (asked,)

    @property
    def targets(self) -> str:
        """Targets of the gradients. With `auto`: labels, or those that suited the new base's head best."""
        head = next((each for each in self.entries if each.contender.sets_targets), None) if self.is_auto else None
        return head.made.targets if head and len(self.kinds_of_targets) > 1 else self.kinds_of_targets[0]

    def fit_head(self) -> Fitted:
        """Fit a closed-form head for the weights loaded into the scorer.

        On a second set of images, labels are used wherever they may be: it shows what the tuned model is bad at.
        """
        images, kinds = self._head_images, self.kinds_of_targets
        more = "teacher" if kinds == ("teacher",) else "labels"
        targets = {
            kind: [self.teacher.shares(each, more if number else kind) for number, each in enumerate(images)]
            for kind in kinds
        }
        by = None if self.is_small else self.chosen_by
        try:
            return fit_head(self.scorer, self.inputs.comparison.head, images, targets, by)
        except ModelError as error:
            raise Declined(str(error)) from error

    @cached_property
    def tuned_score(self) -> Score:
        """Score of the tuned model on `chosen_by`."""
        self.scorer.load(self.inputs.tuned.in_float32())
        return self.scorer.score(self.chosen_by)

    # ---- gates

    def look_at_gates(self) -> tuple[GateFacts, ...]:
        """Evaluate the gates on the evidence available so far."""
        inputs, tests = self.inputs, None
        if self.entries:
            free = [each for each in self.entries if not each.made.gradients and each.contender.may_replace]
            tests = {"": self.result.test} | {each.contender.label: each.test for each in free if each != self.result}
        return look_at_gates(
            Evidence(
                inputs.relation,
                inputs.head_tuned,
                None if self.judges_by_agreement else count_per_class(inputs.data),
                inputs.labels,
                self.tuned_score,
                labelled=not self.judges_by_agreement,
                tests=tests,
            )
        )

    def refuse_nonsense(self) -> None:
        """Raise PortError if a gate rules out a meaningful result."""
        if errors := list_errors(self.look_at_gates()):
            raise PortError(errors[0])

    # ---- matching

    @property
    def nothing_to_match(self) -> str:
        """Why matching is skipped; empty if it is not."""
        if self.relation.word == INDEPENDENT or not self.ports:
            return ""
        best = max(each.made.validation.top1 for each in self.ports)
        level = self.tuned_score.top1
        if best < CLOSE * level:
            return ""
        return (
            f"nothing was matched: the bases are of one lineage, and a port without gradients gets {percent(best)} of "
            f"the validation images right, at least {CLOSE:.0%} of the tuned model's {percent(level)}"
        )

    @cached_property
    def traced(self) -> Traced:
        """The permutation graph, traced and verified when it is first needed."""
        with self.run.stage("tracing", "tracing the model"):
            inputs, check = self.inputs, self.recipe.port.verify
            found = trace_model(inputs.model, inputs.preprocess.input_size, check=check, key=inputs.structure)
        if found.held:
            self.run.progress.say(f"{len(found.held)} groups act on fixed tables of the new base and are not permuted")
        for unknown in found.graph.unknown_operators[:3]:
            self.run.progress.say(str(unknown))
        return found

    @property
    def is_traced(self) -> bool:
        """Whether anything needed the permutation graph."""
        return "traced" in vars(self)

    @cached_property
    def problem(self) -> Problem:
        """The matching problem."""
        train = self.teacher.teach(self.inputs.data.train, self.targets)
        return self.inputs.problem(self.traced.graph, self.run, train, self.targets)

    @cached_property
    def given_permutation(self) -> Permutation:
        """The permutation given by the user."""
        found, graph = self.inputs.given.permutation, self.traced.graph
        permutation = found if isinstance(found, Permutation) else load_permutation(Path(found).expanduser(), graph)
        graph.apply(permutation, {})  # raises an error if it belongs to another graph
        return permutation

    # ---- entries

    @property
    def ports(self) -> list[Entry]:
        """Entries that may win."""
        return [each for each in self.entries if each.role == PORT]

    @property
    def winner(self) -> Entry:
        """The best entry that may win, or the simplest one that it does not clearly beat."""
        if not self.ports:
            raise PortError(f"no contender could be made: {'; '.join(self.notes)}")
        return choose_winner(self.ports)

    @property
    def result(self) -> Entry:
        """The entry that is saved: the winner, or its continuation."""
        return next((each for each in self.entries if each.role == AFTER), self.winner)

    @property
    def price(self) -> Price:
        """The price of the port, and the budget of its alternatives."""
        steps = max((len(each.made.steps) for each in self.ports if each.made.gradients), default=0)
        steps = steps or max((len(each.made.steps) for each in self.ports), default=0)
        asked, entered = self.inputs.given.asked(self.recipe), [each.contender for each in self.ports]
        answered = self.teacher.images if self.is_auto else 0
        counts = count_images(self.inputs)
        return price_port(self.recipe, counts, steps=steps, asked=asked, entered=entered, answered=answered)

    @property
    def original(self) -> Entry | None:
        """The tuned model, if anything is compared with it."""
        return next((each for each in self.entries if each.contender.is_original), None)

    def find(self, name: str) -> Entry | None:
        """The entry of this name, if any."""
        return next((each for each in self.entries if each.contender.name == name), None)

    def enter(self, contender: Contender, role: str) -> None:
        """Make a contender and score it on the test images; a failure is noted unless no other contender may win."""
        self.role, began = role, time.monotonic()
        before, answered, inputs = self.scorer.images, self.teacher.images, self.inputs
        try:
            made: Made = contender.resolve(contender.make)(self, contender)
            images = self.scorer.images - before - self.teacher.images + answered
            self.scorer.load(made.weights)
            test = self.scorer.score(inputs.data.test)
            also = self.scorer.score(inputs.also.test) if inputs.also else None
        except Declined as reason:
            if str(reason) and str(reason) not in self.notes:
                self.note(str(reason))
            return
        except (PortError, TraceError, MatchError) as error:
            # A NaN loss, for example, says something about a learning rate; it must not end the port.
            if role == PORT and not self.is_auto:
                raise
            self.note(f"{contender.label} failed: {error}")
            return
        if role not in (PORT, AFTER) and not contender.place:  # others may start from weights that could win
            made = replace(made, weights={}, best=replace(made.best, weights={}) if made.best else None)
        self.entries.append(Entry(contender, role, made, test, also, images, time.monotonic() - began))

    def judge(self) -> str:
        """The verdict, in one line."""
        said = judge_port(self.entries, self.winner, self.result, labelled=self.inputs.data.labelled)
        warnings = list_warnings(self.look_at_gates())
        return f"Check first: {'; '.join(warnings)}. {said}" if warnings else said


def count_per_class(data: ImageData) -> dict[str, list[int]]:
    """Training and test images per class."""
    splits = {"training": data.train, "test": data.test}
    return {name: split.targets.bincount(minlength=data.classes).tolist() for name, split in splits.items()}


def choose_winner(ports: Sequence[Entry]) -> Entry:
    """The best on validation, or the simplest one within a paired standard error of it."""
    best = max(ports, key=lambda each: each.made.rank)
    for each in sorted(ports, key=lambda each: each.contender.place):
        lead = best.made.validation.top1 - each.made.validation.top1
        if lead <= paired_error(best.made.validation, each.made.validation):
            return each
    return best


# ---- the verdict


def judge_port(entries: Sequence[Entry], port: Entry, result: Entry, *, labelled: bool = True) -> str:
    """The verdict in one line: the winner, its rivals, whether differences are significant, and what to do next."""
    ours = result.test
    what = result.contender.label if result is port else f"{port.contender.label}, fine-tuned further"
    start = f"{percent(ours.top1)} {'' if labelled else 'agreement with the tuned model '}on {ours.count:,} test images"
    others = [each for each in entries if each.contender.instead and each is not port]
    tuned = next((each for each in others if each.contender.is_original), None)
    kept = ""
    if tuned is not None and labelled and tuned.test.top1:
        kept = f", {ours.top1 / tuned.test.top1:.0%} of the tuned model's {percent(tuned.test.top1)}"
    unmatched = find_unmatched(entries, port)
    rivals = [each for each in others if each not in (tuned, unmatched)]
    leads = {each.contender.name: measure_lead(ours, each.test) for each in others}
    compared = "; ".join(f"{leads[each.contender.name].sentence} against {each.contender.label}" for each in rivals)
    gain = "matched steps were" if port.contender.course else "the matching itself was"
    worth = measure_lead(port.test, unmatched.test) if unmatched else None
    beside = f"; {gain} worth {worth.sentence}" if worth else ""
    facts = f"{what}: {start}{kept}{f'; {compared}' if compared else ''}{beside}"
    better = [each for each in others if each is not tuned and leads[each.contender.name].is_behind]
    if better:
        best = max(better, key=lambda each: each.test.top1)
        return f"Not worth it: {facts}; {best.contender.instead}."
    if port.contender.instead and not port.contender.step:
        return f"No port needed: {facts}; that is what was saved."
    if not any(each.contender.is_alternative for each in rivals):
        return f"Undecided: {facts}; not compared with plain fine-tuning (--control full does)."
    if not all(leads[each.contender.name].is_clear for each in rivals):
        return f"Undecided: {facts}; more test images would tell."
    if worth and not (worth.is_clear and worth.value > 0):
        return f"Worth it, but not for its permutation: {facts}; the matching is not shown to have helped."
    further = "fine-tune longer to go further" if result is not port else "continue fine-tuning it to go further"
    return f"Worth it: {facts}; {further}."


def find_unmatched(entries: Sequence[Entry], port: Entry) -> Entry | None:
    """The winner's counterpart without matching, if it entered."""
    return next((each for each in entries if each.contender.name == port.contender.without_matching), None)
