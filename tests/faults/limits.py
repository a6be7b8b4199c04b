"""Limits of memory and time for a part of a test that runs in its own process."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def limited(seconds: float = 60, memory: int = 2 << 30) -> Iterator[None]:
    """Let the block take only so many seconds of the processor and so many bytes more than there are now.

    Example:
        >>> with limited(memory=1 << 30):
        ...     bytes(2 << 30)
        Traceback (most recent call last):
        MemoryError
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
