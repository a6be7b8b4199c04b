"""How long each stage of a run takes, and how much memory it needed at most."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by stage. Stages may be nested: while an inner one runs, the outer one stands still.

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
        """The most bytes that the process had had by the end of each stage: where it grows, memory was needed."""
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

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """What was added to each stage since `before`, an earlier copy of `seconds`."""
        spent = {name: value - before.get(name, 0.0) for name, value in self.seconds.items()}
        return {name: round(value, 3) for name, value in spent.items() if value > 0}

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


def peak_memory() -> int | None:
    """The most memory that this process has had so far, in bytes; None where the system does not tell.

    Example:
        >>> (peak_memory() or 1) > 0
        True
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)
