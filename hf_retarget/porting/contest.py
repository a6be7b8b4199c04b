"""The contest of a port: contenders enter one after the other, the winner is chosen on validation images."""

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
from hf_retarget.evaluation.scorer import Score, Scorer, paired_error
from hf_retarget.evaluation.teacher import Teacher, answer_for_labels
from hf_retarget.graph import Permutation, load_permutation
from hf_retarget.matching.problem import Problem
from hf_retarget.models.relation import INDEPENDENT
from hf_retarget.porting.cost import FEW, Price, count_images, price_port
from hf_retarget.porting.inputs import Inputs, Traced, trace_model
from hf_retarget.porting.resume import BestStep, Track, Workplace
from hf_retarget.porting.verdict import judge_port
from hf_retarget.recipe import Recipe
from hf_retarget.run import Run
from hf_retarget.words import percent

Rank = tuple[float, float]
Curve = tuple[tuple[float, float], ...]  # training images behind the gradients so far, accuracy on validation

CLOSE = 0.9
"""Share of the tuned model's validation accuracy from which nothing is matched between bases of one lineage: there,
matching finds the identity, or moves neurons that should have stayed (docs/method.md)."""


def rank(figures: StepFigures | Score) -> Rank:
    """What steps and contenders are compared by: accuracy, then the lower loss."""
    loss = figures.loss
    return figures.top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


class Declined(Exception):
    """A contender does not enter, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class Made:
    """What a contender made."""

    weights: dict[str, Tensor] = field(repr=False)
    """The whole state dict."""
    validation: Score
    """On the images that contenders are chosen by."""
    gradients: int = 0
    """Gradients of a minibatch that it took."""
    steps: tuple[StepFigures, ...] = ()
    best: BestStep | None = None
    curve: Curve = ()
    detail: str = ""
    """What was chosen for it, in words."""
    targets: str = ""
    """What its head was fitted to."""

    @property
    def rank(self) -> Rank:
        """What the winner is chosen by."""
        return rank(self.validation)


@dataclass(frozen=True, eq=False)
class Entry:
    """A contender that has entered, what it made, and its score on the test images."""

    contender: Contender
    role: str
    made: Made
    test: Score
    also: Score | None = None
    """On the second set of images."""
    images: int = 0
    """Images that went forward to make it, without those that the tuned model answered for all."""
    seconds: float = 0.0


class Contest:
    """All that a contender may use, and those that have entered."""

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
        """Steps that several contenders share, by name."""
        self.role = PORT
        """That of the contender which is entering."""

    @property
    def recipe(self) -> Recipe:
        """What to do."""
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
        """Say something that belongs into the result."""
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
        """The images by which steps and contenders are chosen.

        Where there are few validation images, training images, too: on those, a closed-form head is judged by what a
        head fitted on all the others would answer.
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
        """What heads and fine-tuning may aim at, to choose from."""
        asked = self.recipe.port.targets
        if not self.inputs.data.labelled:
            return ("teacher",)
        return ("labels", "teacher", "both") if asked == AUTO else (asked,)

    @property
    def targets(self) -> str:
        """What gradients aim at. If nothing was asked for: labels, or what suited the new base's head best."""
        head = self.find("head") if self.is_auto else None
        return head.made.targets if head and len(self.kinds_of_targets) > 1 else self.kinds_of_targets[0]

    def fit_head(self) -> Fitted:
        """A closed-form head for the weights that are in the scorer."""
        images = self._head_images
        targets = {kind: [self.teacher.shares(each, kind) for each in images] for kind in self.kinds_of_targets}
        by = None if self.is_small else self.chosen_by
        try:
            return fit_head(self.scorer, self.inputs.comparison.head, images, targets, by)
        except ModelError as error:
            raise Declined(str(error)) from error

    @cached_property
    def tuned_score(self) -> Score:
        """That of the tuned model on the images to choose by."""
        self.scorer.load(self.inputs.tuned.in_float32())
        return self.scorer.score(self.chosen_by)

    # ---- gates

    def look_at_gates(self) -> tuple[GateFacts, ...]:
        """What gates find, as far as can be seen by now."""
        inputs, tests = self.inputs, None
        if self.entries:
            free = [each for each in self.entries if not each.made.gradients and each.contender.may_replace]
            tests = {"": self.result.test} | {each.contender.label: each.test for each in free if each != self.result}
        return look_at_gates(
            Evidence(
                inputs.relation,
                inputs.head_tuned,
                None if self.judges_by_agreement else count_classes(inputs.data),
                inputs.labels,
                self.tuned_score,
                labelled=not self.judges_by_agreement,
                tests=tests,
            )
        )

    def refuse_nonsense(self) -> None:
        """PortError if nothing sensible can come out."""
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
            f"nothing was matched: the bases are of one lineage, and without gradients {percent(best)} of the "
            f"validation images are right, at least {CLOSE:.0%} of the tuned model's {percent(level)}"
        )

    @cached_property
    def traced(self) -> Traced:
        """The permutation graph, traced and verified when it is first needed."""
        with self.run.stage("tracing", "tracing the model"):
            inputs, check = self.inputs, self.recipe.port.check
            found = trace_model(inputs.model, inputs.preprocess.input_size, check=check, key=inputs.structure)
        if found.held:
            words = "groups act on tables that the new base keeps, and stay as they are"
            self.run.progress.say(f"{len(found.held)} {words}")
        for unknown in found.graph.unknown_operators[:3]:
            self.run.progress.say(str(unknown))
        return found

    @property
    def is_traced(self) -> bool:
        """Whether anything needed the permutation graph."""
        return "traced" in vars(self)

    @cached_property
    def problem(self) -> Problem:
        """What is to be matched."""
        train = self.teacher.teach(self.inputs.data.train, self.targets)
        return self.inputs.problem(self.traced.graph, self.run, train, self.targets)

    @cached_property
    def given_permutation(self) -> Permutation:
        """The one that was found before."""
        found, graph = self.inputs.given.permutation, self.traced.graph
        permutation = found if isinstance(found, Permutation) else load_permutation(Path(found).expanduser(), graph)
        graph.apply(permutation, {})  # raises an error if it belongs to another graph
        return permutation

    # ---- who has entered

    @property
    def ports(self) -> list[Entry]:
        """Those that may win."""
        return [each for each in self.entries if each.role == PORT]

    @property
    def winner(self) -> Entry:
        """The best of those that may win; of those that it does not clearly beat, the simplest."""
        if not self.ports:
            raise PortError(f"no contender could be made: {'; '.join(self.notes)}")
        return choose_winner(self.ports)

    @property
    def result(self) -> Entry:
        """What is saved: what continued from the winner, or the winner itself."""
        return next((each for each in self.entries if each.role == AFTER), self.winner)

    @property
    def price(self) -> Price:
        """What the port cost, and what its alternatives may cost."""
        steps = max((len(each.made.steps) for each in self.ports if each.made.gradients), default=0)
        steps = steps or max((len(each.made.steps) for each in self.ports), default=0)
        asked, entered = self.inputs.given.asked(self.recipe), [each.contender for each in self.ports]
        answered = self.teacher.images if self.is_auto else 0
        counts = count_images(self.inputs)
        return price_port(self.recipe, counts, steps=steps, asked=asked, entered=entered, answered=answered)

    def find(self, name: str) -> Entry | None:
        """The contender of this name, if it entered."""
        return next((each for each in self.entries if each.contender.name == name), None)

    def enter(self, contender: Contender, role: str) -> None:
        """Make a contender and score it on the test images. If one that is not alone to win fails, that is noted."""
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
            # A loss that is NaN, say, is a fact about a learning rate, and no reason to lose a port.
            if role == PORT and not self.is_auto:
                raise
            self.note(f"{contender.label} failed: {error}")
            return
        if role not in (PORT, AFTER) and not contender.place:  # what might win elsewhere, others may start from
            made = replace(made, weights={}, best=replace(made.best, weights={}) if made.best else None)
        self.entries.append(Entry(contender, role, made, test, also, images, time.monotonic() - began))

    def judge(self) -> str:
        """The verdict, in one line."""
        said = judge_port(self.entries, self.winner, self.result, labelled=self.inputs.data.labelled)
        warnings = list_warnings(self.look_at_gates())
        return f"Check first: {'; '.join(warnings)}. {said}" if warnings else said


def count_classes(data: ImageData) -> dict[str, list[int]]:
    """Images of each class to train and to test on."""
    splits = {"training": data.train, "test": data.test}
    return {name: split.targets.bincount(minlength=data.classes).tolist() for name, split in splits.items()}


def choose_winner(ports: Sequence[Entry]) -> Entry:
    """The best on validation; but where it leads a simpler one by no more than a paired standard error, the simpler."""
    best = max(ports, key=lambda each: each.made.rank)
    for each in sorted(ports, key=lambda each: each.contender.place):
        lead = best.made.validation.top1 - each.made.validation.top1
        if lead <= paired_error(best.made.validation, each.made.validation):
            return each
    return best
