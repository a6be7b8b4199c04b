"""The whole state of a fine-tuning in one safetensors file, so that it can go on exactly where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hf_retarget.errors import PortError
from hf_retarget.files import load_tensors, save_tensors


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
    """A file for the state of one fine-tuning. `key` says which one: another fine-tuning may not go on from it.

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
                f"cannot go on from the checkpoint '{self.path}': {error}; delete it to start anew"
            ) from error

    def _compare(self, theirs: dict[str, Any]) -> None:
        ours = json.loads(json.dumps(self.key))  # as it comes back from a file: tuples are lists
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name) != ours.get(name):
                raise PortError(
                    f"the checkpoint '{self.path}' belongs to another fine-tuning "
                    f"({name} was {theirs.get(name)!r} and is {ours.get(name)!r} now); delete it to start anew"
                )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once; also those that a state dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
