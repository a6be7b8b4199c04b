"""Where work runs: device, precision and processes, through accelerate."""

from __future__ import annotations

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
    except (ValueError, RuntimeError) as error:
        raise RetargetError(
            f"cannot set up device '{device or 'auto'}' with precision '{precision}': {error}"
        ) from error
    if device not in (None, "auto") and chosen.device.type != device.partition(":")[0]:
        raise RetargetError(
            f"device '{device}' is not there (found '{chosen.device.type}'); leave out --device, or use 'cpu'"
        )
    return chosen
