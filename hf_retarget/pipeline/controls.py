"""What a port is compared with: naive, the bases as they are, and plain fine-tuning at the same price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from hf_retarget.errors import NotFiniteError, PortError
from hf_retarget.evaluate import Score
from hf_retarget.pipeline.judge import Judge
from hf_retarget.pipeline.pose import Task
from hf_retarget.pipeline.price import Price, price_port
from hf_retarget.pipeline.steps import Walk, walk
from hf_retarget.recipe import Recipe
from hf_retarget.training.loop import finetune
from hf_retarget.training.options import TrainOptions

_POINTS = 5  # of a validation curve, if the recipe does not say how often to evaluate
_CHECKPOINTS = 5

Curve = tuple[tuple[int, float], ...]
"""(gradients of a minibatch so far, accuracy on validation)."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything that was measured on the test images, and the weights that the port ends with."""

    weights: dict[str, Tensor] = field(repr=False)
    scores: dict[str, Score] = field(repr=False)
    """By name: port, naive, masked, oracle, control, base, tuned, tuned_target, finetuned; those that there are."""
    levels: dict[str, float]
    """Accuracy on validation of what makes no steps: base, tuned, tuned_target."""
    naive: Walk | None
    masked: Walk | None
    oracle: Walk | None
    """Ports without a permutation and with another one, to compare with: the mask alone for sign-masked ports, the
    oracle's for those who have the real fine-tuning."""
    gradients: int
    """Gradients of a minibatch that the port took, on both sides together."""
    control_steps: int
    """Steps of plain fine-tuning at the same price, that of the fine-tuning after the port included."""
    curves: dict[str, Curve]
    notes: tuple[str, ...]


def measure(task: Task, judge: Judge, found: Walk, recipe: Recipe, work: Path | None = None) -> Measured:
    """Fine-tune the ported model on if the recipe says so; score it and what it is compared with on the test images."""
    return _Measuring(task, judge, found, recipe, work).run()


@dataclass(frozen=True)
class _Measuring:
    task: Task
    judge: Judge
    found: Walk
    recipe: Recipe
    work: Path | None
    scores: dict[str, Score] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Measured:
        inputs, control = self.judge.inputs, self.recipe.port.control
        weights = self.found.best.weights
        self._score("port", lambda: self.judge.load(weights))
        tuned_on = self._train("finetuned", weights, self.recipe.finetune, self._price.gradients)
        naive = masked = oracle = None
        real = inputs.tuned_target
        if control != "none":
            naive = self._walk("naive", "naive", "porting naively")
            masked = self._walk("masked", "naive-sign", "porting with the mask alone") if self.task.masked else None
            oracle = self._walk("oracle", "oracle", "porting with the oracle's permutation") if real else None
            self._level("tuned", inputs.tuned.in_float32())
            self._level("base", inputs.heads.target)
        if real is not None:
            self._level("tuned_target", real.in_float32())
        if control == "full":
            self._train("control", inputs.heads.target, self._control_options(), 0)
        return Measured(
            weights=tuned_on or weights,
            scores=self.scores,
            levels=self.levels,
            naive=naive,
            masked=masked,
            oracle=oracle,
            gradients=self._price.gradients,
            control_steps=self._control_options().steps if control == "full" else 0,
            curves=self.curves,
            notes=tuple(self.notes),
        )

    def _score(self, name: str, load: Callable[[], None]) -> None:
        load()
        self.scores[name] = self.judge.score(self.judge.inputs.data.test)

    def _level(self, name: str, weights: dict[str, Tensor]) -> None:
        self._score(name, lambda: self.judge.load(weights))
        self.levels[name] = self.judge.score(self.judge.inputs.data.validation).top1

    def _walk(self, name: str, method: str, doing: str) -> Walk | None:
        if self.task.method == method and self.task.permutation is None:
            self.scores[name] = self.scores["port"]
            return self.found
        try:
            found = walk(Task(self.task.problem, method), self.judge, doing=doing)
            self._score(name, lambda: self.judge.load(found.best.weights))
        except NotFiniteError as error:  # of what is only compared with: no reason to lose a port
            self.notes.append(f"{doing} failed: {error}")
            self.judge.progress.say(self.notes[-1])
            return None
        return found

    @property
    def _price(self) -> Price:
        given, made = self.task.permutation is not None, len(self.found.history)
        return price_port(self.recipe, len(self.judge.inputs.data.train), steps=made, given=given)

    def _control_options(self) -> TrainOptions:
        """Plain fine-tuning on as many images as the port and the fine-tuning after it see."""
        size = self.recipe.port.batch_size
        return replace(self.recipe.finetune, steps=self._price.control, epochs=0.0, batch_size=size)

    def _train(
        self, name: str, weights: dict[str, Tensor], options: TrainOptions, spent: int
    ) -> dict[str, Tensor] | None:
        """Train from these weights, score the result, and keep its curve; None if nothing was to be done, or it failed.

        A loss that is not a number is a fact about a learning rate, and no reason to lose a port.
        """
        judge, data = self.judge, self.judge.inputs.data
        steps = options.total_steps(len(data.train))
        judge.load(weights)
        if not steps:
            if name == "control":
                self.notes.append("no control: this port took no gradients, so plain fine-tuning had none to take")
            return None
        options = replace(
            options,
            evaluate_every=options.evaluate_every or -(-steps // _POINTS),
            checkpoint_every=options.checkpoint_every or -(-steps // _CHECKPOINTS),
        )

        def score(model: nn.Module, step: int) -> float:
            return judge.score(data.validation).top1

        try:
            with judge.clock.stage(name):
                history = finetune(
                    judge.model,
                    data.train,
                    options,
                    accelerator=judge.accelerator,
                    progress=judge.progress,
                    checkpoint=self.work / f"{name}.safetensors" if self.work else None,
                    score=score,
                    workers=judge.workers,
                )
            self.scores[name] = judge.score(data.test)
        except PortError as error:
            self.notes.append(f"{'plain' if name == 'control' else 'further'} fine-tuning failed: {error}")
            judge.progress.say(self.notes[-1])
            return None
        self.curves[name] = tuple((spent + step, value) for step, value in history.scores)
        return judge.weights()
