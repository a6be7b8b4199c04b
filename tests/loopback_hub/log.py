"""What was asked of the Hub, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PATIENCE = 5.0  # seconds to wait for an answer that is on its way; a client may have stopped reading it


@dataclass(frozen=True)
class Record:
    """One call and what became of it. Tokens are not kept; who they belong to is."""

    method: str
    path: str
    route: str
    status: int  # 0: the connection was cut and nothing was answered
    user: str | None = None
    authorised: bool = False  # whether a token came along at all
    received: int = 0
    sent: int = 0
    range: str | None = None
    fault: bool = False
    agent: str = ""

    def line(self) -> str:
        """For the terminal: `200 GET /api/models/ada/vit (ada)`."""
        return f"{self.status or 'cut'} {self.method} {self.path}" + (f" ({self.user})" if self.user else "")


class RequestLog:
    """All calls since the start, or since it was cleared."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._answering = 0
        self._records: list[Record] = []
        self.listeners: list[Callable[[Record], object]] = []

    def __iter__(self) -> Iterator[Record]:
        """The calls answered so far. One whose answer is on its way is waited for: its client may have it already."""
        with self._lock:
            self._settle()
            return iter(self._records.copy())

    def __len__(self) -> int:
        with self._lock:
            self._settle()
            return len(self._records)

    def _settle(self) -> None:
        self._lock.wait_for(lambda: not self._answering, timeout=PATIENCE)

    def answering(self) -> None:
        """Say that a client may see an answer from now on, before the call is written down with `add`."""
        with self._lock:
            self._answering += 1

    def add(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            self._answering -= 1
            self._lock.notify_all()
        for listener in self.listeners:
            listener(record)

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._settle()
            self._records.clear()

    def of(self, route: str, method: str | None = None) -> list[Record]:
        """The calls of one route.

        >>> log = RequestLog(); log.answering(); log.add(Record("GET", "/api/whoami-v2", "whoami", 200))
        >>> len(log.of("whoami"))
        1
        """
        return [each for each in self if each.route == route and method in (None, each.method)]
