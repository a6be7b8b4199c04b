"""Where work runs: device, precision and processes, through accelerate."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_retarget.errors import RetargetError

PRECISIONS = ("no", "bf16", "fp16")


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
    return chosen


def _is_left_alone(accelerator: Accelerator) -> bool:
    """Whether there are several processes, but this one would not know of the others."""
    return accelerator.num_processes == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1
