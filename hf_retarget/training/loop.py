"""The training loop: seeded at every step and kept in checkpoints, so that a killed run ends in the same weights."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hf_retarget.errors import DataError, NotFiniteError, PortError, RecipeError
from hf_retarget.files import hash_tensors, load_tensors, save_tensors
from hf_retarget.matching.gradients import cross_entropy
from hf_retarget.recipe.options import TrainOptions
from hf_retarget.run import Progress, Run
from hf_retarget.training.recorder import TrajectoryRecorder


def frozen_parts(model: nn.Module, freeze: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """The parameters and modules under the given names; `blocks.1` is not the beginning of `blocks.10`.

    The modules are there so that their BatchNorm statistics and dropout can be kept still, too.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> [len(part) for part in frozen_parts(model, ["0"])]
        [2, 1]
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for prefix in freeze:
        if not any(_is_under(name, [prefix]) for name in parameters):
            known = sorted({*modules, *parameters} - {""})
            near = difflib.get_close_matches(prefix, known, n=3) or known[:3]
            raise RecipeError(f"freeze: the model has no parameter under '{prefix}'; there are {', '.join(near)}, …")
    frozen = [parameter for name, parameter in parameters.items() if _is_under(name, freeze)]
    if not any(parameter.requires_grad for name, parameter in parameters.items() if not _is_under(name, freeze)):
        raise RecipeError(f"no parameter is left to train (freeze: {', '.join(freeze) or 'nothing'}); freeze fewer")
    return frozen, [module for name, module in modules.items() if _is_under(name, freeze)]


def _is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


Batch = tuple[Any, Tensor]
"""Inputs and labels."""


class TrainSplit(Protocol):
    """Images to train on: minibatch k depends on the seed and k alone."""

    def __len__(self) -> int: ...

    def batches(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        count: int | None = None,
        augment: bool = False,
        skip: int = 0,
    ) -> Iterator[Batch]:
        """Shuffled minibatches: `count` of them, from number `skip` on."""


@dataclass(frozen=True)
class History:
    """What happened: the loss of every step, the scores as (step, value), and the seconds it took, resumed or not."""

    losses: tuple[float, ...]
    scores: tuple[tuple[int, float], ...]
    seconds: float


def train_model(
    model: nn.Module,
    split: TrainSplit,
    options: TrainOptions,
    run: Run | None = None,
    *,
    checkpoint: Path | None = None,
    recorder: TrajectoryRecorder | None = None,
    score: Callable[[nn.Module, int], float] | None = None,
) -> History:
    """Train the model in place; options without steps and epochs train nothing.

    With a `checkpoint` path the state is kept there, and a training that was killed continues to the very same
    weights. Several processes all take the same steps: the result is that of one, and `score` may share its work.
    """
    if not (options.steps or options.epochs):
        return History((), (), 0.0)
    if not len(split):
        raise DataError("there are no images to train on; is the training split empty?")
    run, steps = run or Run(), options.total_steps(len(split))
    model.to(run.accelerator.device)
    with _training(model, options.freeze) as still:
        training = _begin(model, options, run)
        file = CheckpointFile(Path(checkpoint), _key(model, split, options)) if checkpoint else None
        log = _Log.resume(file.load(training, run.progress.say) if file else None, run.progress)
        run.accelerator.wait_for_everyone()  # all have read the checkpoint before the main process writes the next
        _Loop(training, still, options, steps, log, run, file, recorder, score).follow(split)
        training.optimizer.zero_grad()
    return log.history()


@dataclass(frozen=True)
class _Loop:
    training: Training
    still: list[nn.Module]
    """Modules that stay in evaluation mode."""
    options: TrainOptions
    steps: int
    log: _Log
    run: Run
    file: CheckpointFile | None
    recorder: TrajectoryRecorder | None
    score: Callable[[nn.Module, int], float] | None

    def follow(self, split: TrainSplit) -> None:
        options, log = self.options, self.log
        if self.recorder is not None:
            self.recorder.start(self.training.model, log.step)
        if self.score is not None and options.evaluate_every and not log.step:
            log.scores.append((0, float(self.score(self.training.model, 0))))
        left = self.steps - log.step
        loading = {"workers": self.run.workers} if self.run.workers else {}  # a split need not know of workers
        batches = split.batches(
            options.batch_size, seed=options.seed, count=left, augment=options.augment, skip=log.step, **loading
        )
        for inputs, labels in self.run.progress.track(batches, "fine-tuning", left):
            log.losses.append(self.take_step(inputs, labels))
            self.keep()
        if log.step < self.steps:
            raise DataError(f"the training split gave {log.step} minibatches of the {self.steps} that were asked for")

    def take_step(self, inputs: Any, labels: Tensor) -> float:
        model, optimizer, scaler = self.training.model, self.training.optimizer, self.training.scaler
        device = self.run.accelerator.device
        rate = self.options.learning_rate(self.log.step, self.steps)
        model.train()
        for module in self.still:
            module.eval()
        # Dropout depends on the seed and the step alone, not on what was drawn before.
        torch.manual_seed((self.options.seed * 1_000_003 + self.log.step) % 2**63)
        with self.run.accelerator.autocast():
            output = model(inputs.to(device))
            loss = cross_entropy(output, labels.to(device), label_smoothing=self.options.label_smoothing)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self.diverged(f"the loss is {value}", self.log.step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if self.options.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)
        scaler.step(optimizer)
        scaler.update()
        return value

    def diverged(self, what: str, step: int) -> NotFiniteError:
        """What became NaN, at which step, up to where the state is kept, and what to do."""
        every = self.options.checkpoint_every if self.file is not None else 0
        last = (step - 1) // every * every if every else 0
        kept = f" (the state of step {last} is kept)" if last else ""
        advice = f"lower lr (now {self.options.lr:g}), or set clip or warmup"
        return NotFiniteError(f"{what} at step {step} of {self.steps}{kept}; {advice}")

    def keep(self) -> None:
        """After a step: record it, score it, and store all, in this order, so that a checkpoint knows of its score."""
        model, step, options = self.training.model, self.log.step, self.options
        last = step == self.steps
        if self.recorder is not None:
            (self.recorder.finish if last else self.recorder.record)(model, step)
        if self.score is not None and _due(step, options.evaluate_every, last):
            try:
                self.log.scores.append((step, float(self.score(model, step))))
            except NotFiniteError as error:
                raise self.diverged(str(error), step) from error
        if self.file is not None and self.run.is_main and _due(step, options.checkpoint_every, last):
            self.file.save(self.training, asdict(self.log.history()))


@dataclass
class _Log:
    losses: list[float]
    scores: list[tuple[int, float]]
    began: float

    @classmethod
    def resume(cls, facts: dict[str, Any] | None, progress: Progress) -> _Log:
        if facts is None:
            return cls([], [], time.monotonic())
        progress.say(f"continuing the fine-tuning at step {len(facts['losses'])}")
        scores = [(int(step), float(value)) for step, value in facts["scores"]]
        return cls(list(facts["losses"]), scores, time.monotonic() - facts["seconds"])

    @property
    def step(self) -> int:
        return len(self.losses)

    def history(self) -> History:
        return History(tuple(self.losses), tuple(self.scores), time.monotonic() - self.began)


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _key(model: nn.Module, split: TrainSplit, options: TrainOptions) -> dict[str, Any]:
    """All that the course of a fine-tuning depends on, as far as it is cheap to know."""
    key = {"start": hash_tensors(model.state_dict())[:20], "images": len(split), **asdict(options)}
    del key["checkpoint_every"]
    return key


def _begin(model: nn.Module, options: TrainOptions, run: Run) -> Training:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        betas = (options.momentum, 0.999)
        optimizer = torch.optim.AdamW(parameters, options.lr, betas, weight_decay=options.weight_decay)
    else:
        optimizer = torch.optim.SGD(parameters, options.lr, options.momentum, weight_decay=options.weight_decay)
    scaler = torch.amp.GradScaler(run.accelerator.device.type, enabled=run.precision == "fp16")
    return Training(model, optimizer, scaler)


@contextmanager
def _training(model: nn.Module, freeze: tuple[str, ...]) -> Iterator[list[nn.Module]]:
    """Frozen parts and seeded randomness, for the time of training only; gives the modules that are frozen."""
    parameters, modules = frozen_parts(model, freeze)
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in parameters]
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield modules
        finally:
            for parameter, wants in wanted:
                parameter.requires_grad_(wants)
            model.train()  # lets models drop what they keep for evaluation
            for module, training in modes:
                module.training = training


# ---- checkpoints


@dataclass(frozen=True)
class Training:
    """What changes while a model trains. The loop steps it, a checkpoint stores it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all parameters, buffers and optimizer state, by name."""
        state = self.optimizer.state_dict()["state"]
        found = {f"model.{name}": value for name, value in _weights(self.model).items()}
        for number, name in enumerate(self._optimised()):
            for key, value in state.get(number, {}).items():
                if value is not None:
                    found[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
        # Copies, because tied weights and views share memory, which safetensors refuses.
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def restore(self, tensors: dict[str, Tensor], scaler: dict[str, Any]) -> None:
        """Put back what `tensors` returned."""
        with torch.no_grad():
            for name, value in _weights(self.model).items():
                value.copy_(tensors[f"model.{name}"])
        numbers = {name: number for number, name in enumerate(self._optimised())}
        state: dict[int, dict[str, Tensor]] = {}
        for full, value in tensors.items():
            part, _, rest = full.partition(".")
            if part == "optimizer":
                key, _, name = rest.partition(".")
                state.setdefault(numbers[name], {})[key] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if scaler:
            self.scaler.load_state_dict(scaler)

    def _optimised(self) -> list[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class CheckpointFile:
    """A file for the state of one fine-tuning. `key` says which one: another fine-tuning may not continue from it.

    Example:
        >>> CheckpointFile(Path("training.safetensors"), {"lr": 0.01}).path.name
        'training.safetensors'
    """

    path: Path
    key: dict[str, Any]

    def save(self, training: Training, facts: dict[str, Any]) -> None:
        """Write all state and the loop's own facts (any JSON)."""
        stored = {"key": self.key, "scaler": training.scaler.state_dict(), "facts": facts}
        try:
            save_tensors(self.path, training.tensors(), stored)
        except (OSError, SafetensorError) as error:
            raise PortError(f"cannot write the checkpoint '{self.path}': {error}") from error

    def load(self, training: Training, say: Callable[[str], None] = lambda line: None) -> dict[str, Any] | None:
        """Put the state back and return the loop's facts; None if there is none yet, or if it is damaged."""
        if not self.path.exists():
            return None
        try:
            tensors, stored = load_tensors(self.path)
        except OSError as error:
            say(f"the checkpoint '{self.path}' is damaged ({error}); the fine-tuning is computed again")
            return None
        try:
            self._compare(stored.get("key") or {})
            training.restore(tensors, stored["scaler"])
            return dict(stored["facts"])
        except (KeyError, RuntimeError, TypeError) as error:
            raise PortError(
                f"cannot continue from the checkpoint '{self.path}': {error}; delete it to start again"
            ) from error

    def _compare(self, theirs: dict[str, Any]) -> None:
        ours = json.loads(json.dumps(self.key))  # as it comes back from a file: tuples are lists
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name) != ours.get(name):
                raise PortError(
                    f"the checkpoint '{self.path}' belongs to another fine-tuning "
                    f"({name} was {theirs.get(name)!r} and is {ours.get(name)!r} now); delete it to start again"
                )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once; also those that a state dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
