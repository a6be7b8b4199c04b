"""Things that go wrong on purpose: a status, a cut connection, a slow answer, an answer that is lost."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """What happens to the next calls of a route (names: `python -m loopback_hub --routes`; `*` is any).

    One of: `status` (answered without doing anything), `page` (the same with an HTML page and 200, as networks that ask
    for a login do), `cut_request` (the connection ends after so many bytes of the
    body have been read), `cut_answer` (after so many bytes of the answer's body), `lose_answer` (all is done, then the
    connection ends without a word), `flip` (one byte of the answer's body is another one), `ignore_range` (the
    whole file is sent, whatever part was asked for). `delay` goes with each of them or alone.
    """

    route: str
    method: str = "*"
    containing: str = ""  # only calls whose path has this
    skip: int = 0  # let so many of them pass first
    times: int | None = 1  # None: from now on
    status: int | None = None
    page: bool = False
    message: str = "A fault that was asked for"
    headers: dict[str, str] = field(default_factory=dict)
    cut_request: int | None = None
    cut_answer: int | None = None
    lose_answer: bool = False
    flip: int | None = None  # the byte of the answer's body that arrives as another one
    ignore_range: bool = False
    reset: bool = False  # a cut that is a reset (RST) and not an orderly end (FIN): the client sees another error
    delay: float = 0.0

    def meets(self, route: str, method: str, path: str) -> bool:
        """Whether a call is one of those.

        >>> Fault("resolve", "GET", "config").meets("resolve", "GET", "/ada/vit/resolve/main/config.json")
        True
        """
        return self.route in ("*", route) and self.method in ("*", method) and self.containing in path


class Faults:
    """The faults that are waiting, each with the number of calls it has met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []
        self._met: Counter[int] = Counter()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        """All is well again."""
        with self._lock:
            self._waiting.clear()
            self._met.clear()

    def next_for(self, route: str, method: str, path: str) -> Fault | None:
        """The first fault whose turn it is."""
        with self._lock:
            for number, fault in enumerate(self._waiting):
                met = self._met[number]
                spent = fault.times is not None and met >= fault.skip + fault.times
                if spent or not fault.meets(route, method, path):
                    continue
                self._met[number] += 1
                if met >= fault.skip:
                    return fault
        return None
