"""Watches the requests of the client, in whichever thread, and ends them when trouble has lasted too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""What the Hub answers when it may do better in a while."""

_CONNECT, _ANSWER = 10.0, 30.0  # seconds that the client would wait forever for


class GaveUp(Exception):
    """The Hub was in trouble for longer than the patience. Not one of the client's errors, or it would try again."""


class _Watch:
    """For how long nothing but trouble has come; called by every request, in whichever thread."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reason = "no connection"
        self._unanswered: set[int] = set()  # threads

    def before(self, request: Any) -> None:
        """Set time limits where the client has none; stop if nothing but trouble has come for too long."""
        limits, longest = request.extensions.get("timeout", {}), max(self.patience, _ANSWER)
        ours = {"connect": _CONNECT, "read": longest, "write": longest}
        request.extensions["timeout"] = {**limits, **{k: v for k, v in ours.items() if limits.get(k) is None}}
        now, thread = time.monotonic(), threading.get_ident()
        with self._lock:
            if thread in self._unanswered:  # the one before got no answer at all; when it ended, nobody has told
                self._since = self._since or now
            if self._since is not None and now - self._since >= self.patience:
                raise GaveUp(f"{self._reason} for {self.patience:g} s")
            self._unanswered.add(thread)

    def after(self, response: Any) -> None:
        """Note whether it was trouble; stop if the Hub asks for more patience than there is."""
        now, wait = time.monotonic(), retry_after(response)
        with self._lock:
            self._unanswered.discard(threading.get_ident())
            if response.status_code not in BUSY:
                self._since = None
                return
            self._since = self._since or now
            self._reason = name_status(response.status_code)
            if now + wait - self._since > self.patience:
                raise GaveUp(f"{self._reason} and asks to wait {wait:.0f} s")


_WATCHES: list[_Watch] = []  # of the whole process: uploads run in threads of the client's
_installed = threading.Lock()


@contextmanager
def watching(patience: float) -> Iterator[None]:
    """Watch the client of this process while the block runs."""
    _install()
    watch = _Watch(patience)
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.remove(watch)


def _install() -> None:
    """Let the client's sessions call the watch. Without one they are as they would be."""
    if not _installed.acquire(blocking=False):
        return
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make = _http._GLOBAL_CLIENT_FACTORY  # the user's own, if there is one; there is no public way to ask for it

    def make_watched() -> Any:
        session = make()
        hooks = session.event_hooks
        session.event_hooks = {"request": [*hooks["request"], _before], "response": [*hooks["response"], _after]}
        return session

    set_client_factory(make_watched)


def _before(request: Any) -> None:
    if _WATCHES:
        _WATCHES[-1].before(request)


def _after(response: Any) -> None:
    if _WATCHES:
        _WATCHES[-1].after(response)


def name_status(status: int) -> str:
    """What is the matter with a Hub that answers so.

    Example:
        >>> name_status(503)
        'it is busy or has a fault (503)'
    """
    return "it has had too many requests (429)" if status == 429 else f"it is busy or has a fault ({status})"


def retry_after(response: Any) -> float:
    """The seconds that an answer asks to wait for; 0 if it does not."""
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdigit() else 0.0
