"""The contest of a port: contenders enter one after the other, the winner is chosen on validation images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hf_retarget.contenders import AFTER, PORT, Contender, find_contender
from hf_retarget.errors import PortError
from hf_retarget.evaluation.scorer import Score, Scorer
from hf_retarget.graph import Permutation, load_permutation
from hf_retarget.matching.problem import Problem
from hf_retarget.porting.cost import Price, price_port
from hf_retarget.porting.inputs import Inputs, Traced, trace_model
from hf_retarget.porting.makers import Declined, Made
from hf_retarget.porting.resume import Workplace
from hf_retarget.porting.verdict import Compared, judge_port
from hf_retarget.recipe import Recipe
from hf_retarget.run import Run


@dataclass(frozen=True, eq=False)
class Entry:
    """A contender that has entered, what it made, and its score on the test images."""

    contender: Contender
    role: str
    made: Made
    test: Score


class Contest:
    """All that a contender may use, and those that have entered."""

    def __init__(self, inputs: Inputs, run: Run, place: Workplace) -> None:
        self.inputs, self.run, self.place = inputs, run, place
        self.scorer = Scorer(inputs.model, inputs.data, inputs.classes, inputs.recipe.port, run)
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self.role = PORT
        """That of the contender which is entering."""

    @property
    def recipe(self) -> Recipe:
        """What to do."""
        return self.inputs.recipe

    @cached_property
    def traced(self) -> Traced:
        """The permutation graph, traced and verified when it is first needed."""
        with self.run.stage("tracing", "tracing the model"):
            found = trace_model(self.inputs.model, self.inputs.preprocess.input_size, check=self.recipe.port.check)
        if found.held:
            words = "groups act on tables that the new base keeps, and stay as they are"
            self.run.progress.say(f"{len(found.held)} {words}")
        for unknown in found.graph.unknown_operators[:3]:
            self.run.progress.say(str(unknown))
        return found

    @cached_property
    def problem(self) -> Problem:
        """What is to be matched."""
        return self.inputs.problem(self.traced.graph, self.run)

    @cached_property
    def given_permutation(self) -> Permutation:
        """The one that was found before."""
        found, graph = self.inputs.given.permutation, self.traced.graph
        permutation = found if isinstance(found, Permutation) else load_permutation(Path(found).expanduser(), graph)
        graph.apply(permutation, {})  # raises an error if it belongs to another graph
        return permutation

    @property
    def winner(self) -> Entry:
        """The best of those that may win."""
        if not (ports := [each for each in self.entries if each.role == PORT]):
            raise PortError("no contender could be made; see the notes")
        return max(ports, key=lambda each: each.made.rank)  # of equals the first

    @property
    def result(self) -> Entry:
        """What is saved: what continued from the winner, or the winner itself."""
        return next((each for each in self.entries if each.role == AFTER), self.winner)

    @property
    def price(self) -> Price:
        """What the port cost, and what its alternatives may cost."""
        asked = replace(self.inputs.given.asked(self.recipe), method=self.winner.contender.name)
        return price_port(self.recipe, len(self.inputs.data.train), steps=len(self.winner.made.steps), asked=asked)

    def find(self, name: str) -> Entry | None:
        """The contender of this name, if it entered."""
        return next((each for each in self.entries if each.contender.name == name), None)

    def enter(self, contender: Contender, role: str) -> None:
        """Make a contender and score it on the test images. If one that cannot win fails, that is noted."""
        self.role = role
        try:
            made: Made = contender.resolve(contender.make)(self, contender)
            self.scorer.load(made.weights)
            test = self.scorer.score(self.inputs.data.test)
        except Declined as reason:
            self.notes.append(str(reason))
            return
        except PortError as error:  # a loss that is NaN is a fact about a learning rate, and no reason to lose a port
            if role == PORT:
                raise
            self.notes.append(f"{contender.label} failed: {error}")
            self.run.progress.say(self.notes[-1])
            return
        if role not in (PORT, AFTER):
            made = replace(made, weights={}, best=replace(made.best, weights={}) if made.best else None)
        self.entries.append(Entry(contender, role, made, test))

    def judge(self) -> str:
        """The verdict, in one line."""
        port, result = self.winner, self.result
        method = port.contender.without_matching
        unmatched = self.find(method)
        alternative = next((each for each in self.entries if each.contender.is_alternative), None)
        return judge_port(
            Compared(
                port=port.test,
                after=result.test if result is not port else None,
                unmatched=unmatched.test if unmatched else None,
                unmatched_method=find_contender(method).name,
                alternative=alternative.test if alternative else None,
                minibatches=alternative.made.gradients if alternative else 0,
                control=self.recipe.port.control,
            )
        )
