"""How work runs: device, processes, progress, time and versions. Does not import torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from hf_retarget.errors import RetargetError
from hf_retarget.names import PRECISIONS
from hf_retarget.progress import SILENT, Progress, TerminalProgress, is_main_process, is_watched
from hf_retarget.words import nearest

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

# ---- time and memory

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


class Clock:
    """Seconds per stage. Stages may be nested: while an inner one runs, the outer one is paused.

    Example:
        >>> clock = Clock()
        >>> with clock.stage("matching"):
        ...     with clock.stage("gradients"):
        ...         pass
        >>> list(clock.seconds)
        ['matching', 'gradients']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        """Peak memory of the process at the end of each stage, in bytes."""
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block for this stage."""
        self._turn()
        self.seconds.setdefault(name, 0.0)
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()
            if (most := peak_memory()) is not None:
                self.memory[name] = most

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """The seconds added to each stage since `before`, an earlier copy of `seconds`."""
        spent = {name: value - before.get(name, 0.0) for name, value in self.seconds.items()}
        return {name: round(value, 3) for name, value in spent.items() if value > 0}

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


def return_memory() -> None:
    """Return freed memory to the operating system, and from now on, large tensors as soon as they are freed.

    glibc would keep those below 32 MB, which leaves gaps between others: 3 GB of a port of ViT-Large.
    """
    with suppress(AttributeError, OSError, TypeError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 4 << 20)
        libc.malloc_trim(0)


def peak_memory() -> int | None:
    """Peak memory of this process so far, in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)


# ---- a run


class RunArguments(TypedDict, total=False):
    """Options shared by all functions that load models or compute."""

    device: str | None
    precision: str
    workers: int
    arch: str | None
    allow_pickle: bool
    token: str | None
    preprocess: Any
    progress: Progress
    quiet: bool
    command: str


@dataclass(frozen=True, eq=False)
class Run:
    """Where and how work runs, and how model references are read."""

    device: str | None = None
    """cpu, cuda, mps …; detected by default."""
    precision: str = "no"
    workers: int = 0
    """Number of processes that load images."""
    arch: str | None = None
    """The architecture of weight files that do not name one."""
    allow_pickle: bool = False
    token: str | None = field(default=None, repr=False)
    preprocess: Any = None
    """Preprocessing of images that replaces the model's own (see `choose_preprocess`)."""
    progress: Progress = field(default_factory=lambda: TerminalProgress(quiet=not (is_watched() and is_main_process())))
    """By default, shown on a terminal and in a notebook only."""
    quiet: bool = False
    """Show no progress."""
    command: str = ""
    """The command line, recorded in port.json."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        if self.quiet:
            object.__setattr__(self, "progress", SILENT)

    @cached_property
    def accelerator(self) -> Accelerator:
        """The device, and the processes that share the work."""
        return choose_device(self.device, self.precision)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return bool(self.accelerator.is_main_process)

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments for `load_checkpoint`."""
        return {"arch": self.arch, "allow_pickle": self.allow_pickle, "token": self.token}

    @contextmanager
    def stage(self, name: str, doing: str = "") -> Iterator[None]:
        """Count the time of the block, and show `doing` while it runs."""
        with self.clock.stage(name), doing_now(self.progress, doing or name):
            yield


@contextmanager
def doing_now(progress: Progress, what: str) -> Iterator[None]:
    """Show a task of unknown length while the block runs."""
    for _ in progress.track(iter((None,)), what):
        yield


def check_arguments(function: str, given: Mapping[str, Any], *known: type) -> None:
    """Refuse keyword arguments that are in none of the TypedDicts `known`, and suggest the closest.

    Example:
        >>> check_arguments("port", {"devices": "cpu"}, RunArguments)
        Traceback (most recent call last):
        TypeError: port() has no argument 'devices'; did you mean 'device'?
    """
    names = [name for each in known for name in each.__annotations__]
    for name in given:
        if name not in names:
            raise TypeError(f"{function}() has no argument '{name}'{nearest(name, names)}")


def pick(given: Mapping[str, Any], known: type) -> dict[str, Any]:
    """The arguments that a TypedDict or dataclass has."""
    return {name: value for name, value in given.items() if name in known.__annotations__}


# ---- devices and processes


def choose_device(device: str | None = None, precision: str = "no") -> Accelerator:
    """An accelerator for this process, on the device that accelerate detects or on the one given.

    Under torchrun the processes share the work.

    Example:
        >>> choose_device("cpu").device
        device(type='cpu')
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if precision not in PRECISIONS:
        raise RetargetError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    # accelerate has no public way to read or reset its state.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # accelerate allows only one precision per process
    try:
        chosen = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        if _is_left_alone(chosen) and device in (None, "auto"):
            # Without a GPU, accelerate connects processes only if told to use the CPU; otherwise each would do all of
            # the work and write to the same places.
            AcceleratorState._reset_state(reset_partial_state=True)
            chosen = Accelerator(cpu=True, mixed_precision=precision)
    except (ValueError, RuntimeError) as error:
        raise RetargetError(
            f"cannot set up device '{device or 'auto'}' with precision '{precision}': {error}"
        ) from error
    if device not in (None, "auto") and chosen.device.type != device.partition(":")[0]:
        raise RetargetError(
            f"device '{device}' is not available (found '{chosen.device.type}'); leave out --device, or use 'cpu'"
        )
    if _is_left_alone(chosen):
        raise RetargetError(f"several processes cannot share '{device}'; start only one, or use --device cpu")
    if chosen.num_processes > 1:
        atexit.unregister(_part)
        atexit.register(_part)
    return chosen


def in_main_process(work: Callable[[], T]) -> T | None:
    """Run `work` in the main process while the others wait; an error is raised in all of them.

    Example:
        >>> in_main_process(lambda: 3)
        3
    """
    from accelerate import PartialState

    done, failure = None, None
    if PartialState().is_main_process:
        try:
            done = work()
        except Exception as error:
            failure = error
    if retold := from_main_process(failure and _retold(failure)):
        raise failure or retold
    return done


def from_main_process(value: T) -> T:
    """Broadcast a value of the main process to all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]  # type: ignore[no-any-return]


def leave(code: int) -> None:
    """Exit one of several processes immediately: in a regular exit, torch's threads may abort it."""
    _part()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _part() -> None:
    """Close the connections between processes: a process that exits with them open may be aborted."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _retold(error: Exception) -> RetargetError:
    """The error to raise in the other processes: one of ours without its cause, any other as text."""
    if isinstance(error, RetargetError):
        return type(error)(str(error))
    return RetargetError(f"the first process failed: {type(error).__name__}: {error}")


def _is_left_alone(accelerator: Accelerator) -> bool:
    """Whether there are several processes that accelerate has not connected."""
    return bool(accelerator.num_processes == 1) and int(os.environ.get("WORLD_SIZE") or 1) > 1


# ---- versions

_LIBRARIES = ("torch", "timm", "datasets", "accelerate", "safetensors", "numpy", "scipy", "transformers")


def list_versions() -> dict[str, str]:
    """Versions of this package, Python, and the libraries that may affect results.

    Example:
        >>> list(list_versions())[:3]
        ['hf-retarget', 'python', 'torch']
    """
    import hf_retarget

    found = {"hf-retarget": hf_retarget.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):  # transformers is optional
            found[name] = version(name)
    return found


def describe_environment(device: str = "cpu") -> dict[str, Any]:
    """What results depend on, bit for bit, besides the inputs: versions, threads, device and kind of processor."""
    import torch

    processor = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512 …: their kernels round differently
    return {**list_versions(), "threads": torch.get_num_threads(), "device": device, "processor": processor}
