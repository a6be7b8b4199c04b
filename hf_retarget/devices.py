"""Where work runs: device, precision and processes, through accelerate."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list

from hf_retarget.errors import RetargetError

PRECISIONS = ("no", "bf16", "fp16")

T = TypeVar("T")


def choose_device(device: str | None = None, precision: str = "no") -> Accelerator:
    """An accelerator for this process: the device accelerate finds, or the CPU if asked for.

    Under torchrun the processes share the work.

    Example:
        >>> choose_device("cpu").device
        device(type='cpu')
    """
    if precision not in PRECISIONS:
        raise RetargetError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # accelerate keeps the first precision of a process, and refuses another
    try:
        chosen = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        if _is_left_alone(chosen) and device in (None, "auto"):
            # Where there is no GPU, accelerate lets processes work together only if it is told to use the CPU; else
            # each would do all of the work, and write to the same places.
            AcceleratorState._reset_state(reset_partial_state=True)
            chosen = Accelerator(cpu=True, mixed_precision=precision)
    except (ValueError, RuntimeError) as error:
        raise RetargetError(
            f"cannot set up device '{device or 'auto'}' with precision '{precision}': {error}"
        ) from error
    if device not in (None, "auto") and chosen.device.type != device.partition(":")[0]:
        raise RetargetError(
            f"device '{device}' is not there (found '{chosen.device.type}'); leave out --device, or use 'cpu'"
        )
    if _is_left_alone(chosen):
        raise RetargetError(f"several processes cannot share '{device}'; start one, or say --device cpu")
    if chosen.num_processes > 1:
        atexit.unregister(_part)
        atexit.register(_part)
    return chosen


def in_main_process(work: Callable[[], T]) -> T | None:
    """Do something in the first process, while the others wait; if it fails, it fails in all of them.

    Example:
        >>> in_main_process(lambda: 3)
        3
    """
    state, done = PartialState(), None
    failure: Exception | None = None
    if state.is_main_process:
        try:
            done = work()
        except Exception as error:
            failure = error
    if state.num_processes > 1:
        told = [None if failure is None else _retold(failure)]
        broadcast_object_list(told)
        failure = failure or told[0]
    if failure is not None:
        raise failure
    return done


def from_main_process(value: T) -> T:
    """The value that the first process has, in all of them.

    Example:
        >>> from_main_process(3)
        3
    """
    if PartialState().num_processes > 1:
        told = [value]
        broadcast_object_list(told)
        return told[0]
    return value


def leave(code: int) -> None:
    """End this process, one of several, at once: torch's own threads may abort one that ends as usual."""
    _part()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _part() -> None:
    """End the connections between processes: a process that ends with them open may be aborted, and then has failed."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _retold(error: Exception) -> RetargetError:
    """The error for another process: one of ours as it is, without what caused it; any other in words."""
    if isinstance(error, RetargetError):
        return type(error)(str(error))
    return RetargetError(f"the first process failed: {type(error).__name__}: {error}")


def _is_left_alone(accelerator: Accelerator) -> bool:
    """Whether there are several processes, but this one would not know of the others."""
    return accelerator.num_processes == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1
