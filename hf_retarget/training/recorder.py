"""Records the weights along a fine-tuning, so that a port can follow its actual trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from hf_retarget.errors import PortError, RetargetError
from hf_retarget.files import save_tensors, write_json
from hf_retarget.untrusted import read_json

INDEX = "trajectory.json"


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
        earlier = _read_index(self.folder) if step and (self.folder / INDEX).exists() else []
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
                raise PortError(f"'{path}' is listed in {INDEX} but is not there; record the trajectory again")
        return paths

    def _write(self, model: nn.Module, step: int) -> None:
        weights = extract_model_from_parallel(model, keep_torch_compile=False).state_dict()
        path = _path(self.folder, step)
        steps = sorted([*self._steps, step])
        try:
            # Copied because tied weights share memory, which safetensors refuses.
            save_tensors(path, {name: value.detach().cpu().clone() for name, value in weights.items()}, {"step": step})
            # After the weights, so that all listed files exist.
            write_json(self.folder / INDEX, {"every": self.every, "steps": steps})
        except OSError as error:
            raise PortError(f"cannot record step {step} in '{path}': {error}") from error
        self._steps = steps


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def _read_index(folder: Path) -> list[int]:
    """The recorded steps in order, the start first."""
    try:
        steps = read_json(folder / INDEX)["steps"]
        if not all(type(each) is int and each >= 0 for each in steps) or len(set(steps)) < len(steps):
            raise ValueError(f"its steps are {steps!r:.100}, and should be different whole numbers")
        return sorted(steps)
    except FileNotFoundError as error:
        raise PortError(f"there is no trajectory in '{folder}' (no {INDEX}); was it recorded there?") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PortError(f"cannot read '{folder / INDEX}': {error}; record the trajectory again") from error


def _is_main_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
