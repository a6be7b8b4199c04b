"""Fine-tuning: the loop, seeded at every step so that a resumed run ends in the same weights, and the recorder."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_retarget.data import Split
from hf_retarget.errors import DataError, NotFiniteError, PortError, RecipeError, RetargetError
from hf_retarget.files import hash_tensors, load_tensors, save_tensors, write_json
from hf_retarget.matching.gradients import cross_entropy, enough_for_batchnorm
from hf_retarget.recipe.options import TrainOptions
from hf_retarget.run import Run
from hf_retarget.untrusted import read_json


@dataclass(frozen=True)
class History:
    """The loss of every step, the scores as (step, value), and the seconds, including those before resuming."""

    losses: tuple[float, ...]
    scores: tuple[tuple[int, float], ...]
    seconds: float


def train_model(
    model: nn.Module,
    split: Split,
    options: TrainOptions,
    run: Run | None = None,
    *,
    checkpoint: Path | None = None,
    recorder: TrajectoryRecorder | None = None,
    score: Callable[[nn.Module, int], float] | None = None,
) -> History:
    """Train the model in place; without steps or epochs, do nothing.

    With a `checkpoint` path the state is saved there, and an interrupted training resumes to exactly the same weights.
    Several processes all take the same steps, so the result is that of one; `score` may distribute its work.
    """
    if not (options.steps or options.epochs):
        return History((), (), 0.0)
    if not len(split):
        raise DataError("there are no images to train on; is the training split empty?")
    if not options.total_steps(len(split)):
        raise RecipeError(f"{options.epochs:g} epochs of {len(split)} images make no step; give more epochs, or steps")
    run = run or Run()
    model.to(run.accelerator.device)
    with _training(model, options.freeze) as still:
        training = _Training(model, split, options, run, checkpoint)
        run.accelerator.wait_for_everyone()  # the main process may overwrite the checkpoint once all have read it
        training.follow(split, still, recorder, score)
        training.optimizer.zero_grad()
    return training.history()


@contextmanager
def _training(model: nn.Module, freeze: tuple[str, ...]) -> Iterator[list[nn.Module]]:
    """Freeze parts and fork the random state during training; yield the frozen modules."""
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
            model.train()  # lets models drop what they cache for evaluation
            for module, training in modes:
                module.training = training


def frozen_parts(model: nn.Module, freeze: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """The parameters and modules under the given names; `blocks.1` does not match `blocks.10`.

    The modules are needed to freeze their BatchNorm statistics and dropout, too.

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


class _Training:
    """A model, its optimizer and the history so far: the state that a checkpoint stores."""

    def __init__(
        self, model: nn.Module, split: Split, options: TrainOptions, run: Run, checkpoint: Path | None
    ) -> None:
        self.model, self.options, self.run, self.checkpoint = model, options, run, checkpoint
        self.steps = options.total_steps(len(split))
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "adamw":
            betas = (options.momentum, 0.999)
            self.optimizer = torch.optim.AdamW(named, options.lr, betas, weight_decay=options.weight_decay)
        else:
            self.optimizer = torch.optim.SGD(named, options.lr, options.momentum, weight_decay=options.weight_decay)
        self.scaler = torch.amp.GradScaler(run.accelerator.device.type, enabled=run.precision == "fp16")
        self.losses: list[float] = []
        self.scores: list[tuple[int, float]] = []
        self.began = time.monotonic()
        # What a fine-tuning depends on, as far as it is cheap to compute, in the form read back from a file.
        key = {"start": hash_tensors(model.state_dict())[:20], "images": len(split), **asdict(options)}
        del key["checkpoint_every"]
        self.key: dict[str, Any] = json.loads(json.dumps(key))
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint)

    @property
    def step(self) -> int:
        return len(self.losses)

    def history(self) -> History:
        return History(tuple(self.losses), tuple(self.scores), time.monotonic() - self.began)

    def follow(
        self,
        split: Split,
        still: list[nn.Module],
        recorder: TrajectoryRecorder | None,
        score: Callable[[nn.Module, int], float] | None,
    ) -> None:
        """Take the remaining steps. After each: record, score and save, so that a checkpoint includes its own score."""
        model, options = self.model, self.options
        if recorder is not None:
            recorder.start(model, self.step)
        if score is not None and options.evaluate_every and not self.step:
            self.scores.append((0, float(score(model, 0))))
        left = self.steps - self.step
        batches = split.batches(
            options.batch_size,
            seed=options.seed,
            count=left,
            augment=options.augment,
            workers=self.run.workers,
            skip=self.step,
        )
        for inputs, labels in self.run.progress.track(batches, "fine-tuning", left):
            model.train()
            for module in still:
                module.eval()
            self.losses.append(self._take_step(inputs, labels))
            last = self.step == self.steps
            if recorder is not None:
                (recorder.finish if last else recorder.record)(model, self.step)
            if score is not None and (last or _is_due(self.step, options.evaluate_every)):
                try:
                    self.scores.append((self.step, float(score(model, self.step))))
                except NotFiniteError as error:
                    raise self._diverged(str(error), self.step) from error
            if self.run.is_main and (last or _is_due(self.step, options.checkpoint_every)):
                self._save()
        if self.step < self.steps:
            raise DataError(f"the training split gave {self.step} minibatches of the {self.steps} that were asked for")

    def _take_step(self, inputs: Any, labels: Tensor) -> float:
        device, optimizer, scaler = self.run.accelerator.device, self.optimizer, self.scaler
        # Dropout depends only on the seed and the step, not on earlier draws.
        torch.manual_seed((self.options.seed * 1_000_003 + self.step) % 2**63)
        with enough_for_batchnorm(len(inputs)), self.run.accelerator.autocast():
            output = self.model(inputs.to(device))
            loss = cross_entropy(output, labels.to(device), label_smoothing=self.options.label_smoothing)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self._diverged(f"the loss is {value}", self.step + 1)
        for group in optimizer.param_groups:
            group["lr"] = self.options.learning_rate(self.step, self.steps)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if self.options.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        scaler.step(optimizer)
        scaler.update()
        return value

    def _diverged(self, what: str, step: int) -> NotFiniteError:
        """The error for NaN at a step, with the last saved step and advice."""
        every = self.options.checkpoint_every if self.checkpoint is not None else 0
        last = (step - 1) // every * every if every else 0
        kept = f" (the state of step {last} is kept)" if last else ""
        advice = f"lower lr (now {self.options.lr:g}), or set clip or warmup"
        return NotFiniteError(f"{what} at step {step} of {self.steps}{kept}; {advice}")

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same fine-tuning; ignore a damaged one."""
        say = self.run.progress.say
        try:
            tensors, stored = load_tensors(path)
        except OSError as error:
            say(f"the checkpoint '{path}' is damaged ({error}); restarting the fine-tuning")
            return
        ours, theirs = self.key, stored.get("key") or {}
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name) != ours.get(name):
                raise PortError(
                    f"the checkpoint '{path}' belongs to another fine-tuning "
                    f"({name} was {theirs.get(name)!r} and is {ours.get(name)!r} now); delete it to start again"
                )
        try:
            self._restore(tensors, stored["scaler"])
            facts = stored["facts"]
            self.losses = list(facts["losses"])
            self.scores = [(int(step), float(value)) for step, value in facts["scores"]]
            self.began = time.monotonic() - facts["seconds"]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise PortError(
                f"cannot continue from the checkpoint '{path}': {error}; delete it to start again"
            ) from error
        say(f"continuing the fine-tuning at step {self.step}")

    def _restore(self, tensors: dict[str, Tensor], scaler: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in self._weights().items():
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
        """The names of the parameters in the optimizer's order."""
        return list(self.optimizer.param_groups[0]["param_names"])

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and buffers, tied ones once, including non-persistent buffers."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        tensors = {f"model.{name}": value for name, value in self._weights().items()}
        names = self._optimised()
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{key}.{names[number]}"] = torch.as_tensor(value)
        # Copied because tied weights and views share memory, which safetensors refuses.
        tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
        facts = {"key": self.key, "scaler": self.scaler.state_dict(), "facts": asdict(self.history())}
        try:
            save_tensors(self.checkpoint, tensors, facts)
        except OSError as error:
            raise PortError(f"cannot write the checkpoint '{self.checkpoint}': {error}") from error


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- the trajectory

_INDEX = "trajectory.json"


class TrajectoryRecorder:
    """Writes the weights to `folder` at the start, every `every` steps, and at the end.

    Wrapped models (accelerate, DistributedDataParallel, torch.compile) are supported; among several processes, only
    the first writes.
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        if every < 1:
            raise RetargetError(f"a trajectory is recorded every 1, 2, … steps, not every {every}")
        self.folder = Path(folder)
        self.every = every
        self._steps: list[int] = []

    def start(self, model: nn.Module, step: int = 0) -> None:
        """Start a new trajectory at step 0, or continue the one in the folder from a later step."""
        if not _is_main_process():
            return
        earlier = _read_index(self.folder) if step and (self.folder / _INDEX).exists() else []
        self._steps = [each for each in earlier if each <= step]
        if not self._steps:
            self._write(model, step)

    def record(self, model: nn.Module, step: int) -> None:
        """Write the weights after this step if it is a multiple of `every`."""
        if step % self.every == 0:
            self.finish(model, step)

    def finish(self, model: nn.Module, step: int) -> None:
        """Write the weights after the last step."""
        if _is_main_process() and step not in self._steps:
            self._write(model, step)

    def callback(self) -> Any:
        """A `transformers.TrainerCallback` that records while a `Trainer` trains."""
        try:
            from transformers import TrainerCallback
        except ImportError as error:
            raise RetargetError(
                "a callback needs transformers, which is not installed; pip install 'hf-retarget[transformers]'"
            ) from error
        recorder = self

        class Callback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                recorder.start(given["model"], state.global_step)

            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                recorder.record(given["model"], state.global_step)

            def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                recorder.finish(given["model"], state.global_step)

        return Callback()

    @staticmethod
    def load(folder: str | Path) -> list[Path]:
        """The files of a trajectory in order, without the start, for a `CheckpointTrajectory`."""
        paths = [_path(Path(folder), step) for step in _read_index(Path(folder))[1:]]
        if not paths:
            raise PortError(f"the trajectory in '{folder}' ends where it starts; train for at least one step")
        for path in paths:
            if not path.exists():
                raise PortError(f"'{path}' is listed in {_INDEX} but is not there; record the trajectory again")
        return paths

    def _write(self, model: nn.Module, step: int) -> None:
        weights = extract_model_from_parallel(model, keep_torch_compile=False).state_dict()
        path = _path(self.folder, step)
        steps = sorted([*self._steps, step])
        try:
            # Copied because tied weights share memory, which safetensors refuses.
            save_tensors(path, {name: value.detach().cpu().clone() for name, value in weights.items()}, {"step": step})
            # After the weights, so that all listed files exist.
            write_json(self.folder / _INDEX, {"every": self.every, "steps": steps})
        except OSError as error:
            raise PortError(f"cannot record step {step} in '{path}': {error}") from error
        self._steps = steps


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def _read_index(folder: Path) -> list[int]:
    """The recorded steps in order, the start first."""
    try:
        steps = read_json(folder / _INDEX)["steps"]
        if not all(type(each) is int and each >= 0 for each in steps) or len(set(steps)) < len(steps):
            raise ValueError(f"its steps are {steps!r:.100}, and should be different whole numbers")
        return sorted(steps)
    except FileNotFoundError as error:
        raise PortError(f"there is no trajectory in '{folder}' (no {_INDEX}); was it recorded there?") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PortError(f"cannot read '{folder / _INDEX}': {error}; record the trajectory again") from error


def _is_main_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
