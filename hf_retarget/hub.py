"""Calls to the Hub: how long they are tried again, and what a refusal means. All parts that talk to it do so here.

The client repeats some calls itself (files and parts of files, five times) and others not at all (who am I, what is
there, commits, a download that is reset); it waits as long as the Hub asks it to, and for an answer forever. Within
`ask`, every call is repeated, and trouble ends when the patience does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hf_retarget.errors import RetargetError

PATIENCE = "HF_RETARGET_HUB_PATIENCE"
"""The environment variable with the seconds that the Hub may be busy or unreachable before a call gives up."""

_SECONDS = 60.0
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
_CONNECT, _ANSWER = 10.0, 30.0  # seconds that the client would wait forever for
_BUSY = (408, 425, 429, 500, 502, 503, 504)

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class GaveUp(Exception):
    """The Hub was in trouble for longer than the patience. Not one of the client's errors, or it would try again."""


def read_patience() -> float:
    """The seconds of patience: from the environment, or a minute.

    Example:
        >>> os.environ["HF_RETARGET_HUB_PATIENCE"] = "5"
        >>> read_patience()
        5.0
        >>> del os.environ["HF_RETARGET_HUB_PATIENCE"]
    """
    text = os.environ.get(PATIENCE, "")
    try:
        return max(0.0, float(text)) if text else _SECONDS
    except ValueError:
        raise RetargetError(f"{PATIENCE} is '{text}'; give a number of seconds") from None


def ask(call: Callable[[], T]) -> T:
    """Make a call with the client of the Hub; again while the Hub is busy or unreachable, until the patience is over.

    The call must be one that may be repeated. What is raised in the end is the client's own error, or `GaveUp`;
    `explain` words it.

    Example:
        >>> ask(lambda: HfApi().model_info("timm/resnet18.a1_in1k").sha)      # doctest: +SKIP
        '491b427b…'
    """
    patience, waited, wait = read_patience(), 0.0, _FIRST_WAIT
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _watching(patience):
                return call()
        except Exception as error:
            reason = is_trouble(error)
            pause = max(wait, _asked_to_wait(find_cause(error)))
            if reason is None or attempt == _ATTEMPTS:
                raise
            if waited + pause > patience:
                if isinstance(find_cause(error), GaveUp):
                    raise
                raise GaveUp(reason) from error
        _LOGGER.warning("the Hub: %s; trying again in %g s", reason, pause)
        time.sleep(pause)
        waited, wait = waited + pause, min(_LONGEST_WAIT, 2 * wait)
    raise AssertionError("unreachable")


def is_trouble(error: BaseException) -> str | None:
    """What is wrong, if it may be better in a while; None if it will not.

    Example:
        >>> is_trouble(ValueError("no")) is None
        True
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    cause = find_cause(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return _name_status(status) if status in _BUSY else None
    if isinstance(cause, httpx2.TransportError):
        return f"no connection ({_one_line(cause)})"
    return None


def find_cause(error: BaseException) -> BaseException:
    """The error itself, out of those that only say that there was one.

    Example:
        >>> find_cause(ValueError("no"))
        ValueError('no')
    """
    import httpx2

    seen = error
    while True:
        if isinstance(seen, (GaveUp, httpx2.HTTPError)) or seen.__cause__ is None:
            break
        seen = seen.__cause__
    return seen if isinstance(seen, (GaveUp, httpx2.HTTPError, OSError)) else error


def token_was_refused(error: BaseException) -> bool:
    """Whether the Hub does not know the token that came along; without one, it says the same of what is private.

    Example:
        >>> token_was_refused(ValueError("no"))
        False
    """
    response = getattr(find_cause(error), "response", None)
    return response is not None and response.status_code == 401 and "authorization" in response.request.headers


def explain(error: BaseException, repository: str, revision: str | None = None, *, kind: str = "model") -> str | None:
    """What an error of the client means, and what to do next; None if it is none of the Hub's.

    Example:
        >>> explain(GaveUp("it is busy (503)"), "org/name")
        "the Hub could not be asked for 'org/name': it is busy (503); try again later"
    """
    import httpx2
    from huggingface_hub import errors

    cause = find_cause(error)
    if isinstance(cause, errors.GatedRepoError):
        return describe_gate(repository)
    if token_was_refused(cause):
        return (
            "the Hub does not accept the token; log in again (hf auth login), or set HF_TOKEN or --token to a valid one"
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f"there is no {kind} '{repository}' on the Hub, or it is private; "
            "check the name, or log in (hf auth login) or set HF_TOKEN"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"'{repository}' has no revision '{revision}'; name a branch, a tag or a commit"
    if isinstance(cause, errors.HFValidationError):
        return f"'{repository}' is no name the Hub could have: {_one_line(cause)}"
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"offline mode is on, so the Hub cannot be asked for '{repository}'; unset HF_HUB_OFFLINE"
    if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 403:
        return f"the Hub forbids it for '{repository}': {_said(cause)}; use a token with the right to do it"
    if isinstance(cause, GaveUp):
        return f"the Hub could not be asked for '{repository}': {cause}; try again later"
    if reason := is_trouble(cause):
        return f"the Hub could not be asked for '{repository}': {reason}; try again later"
    if isinstance(cause, errors.HfHubHTTPError):
        return f"the Hub answered {cause.response.status_code} for '{repository}': {_said(cause)}; is the name right?"
    if isinstance(cause, httpx2.HTTPError):
        return f"the Hub could not be asked for '{repository}': {_one_line(cause)}; is HF_ENDPOINT right?"
    return None


def describe_gate(repository: str) -> str:
    """What to do about a gated repository.

    Example:
        >>> describe_gate("org/name").partition(",")[0]
        "'org/name' is gated: accept its terms on the Hub"
    """
    return f"'{repository}' is gated: accept its terms on the Hub, then log in (hf auth login) or set HF_TOKEN"


@contextmanager
def explained(
    kind: type[RetargetError], repository: str, revision: str | None = None, *, what: str = "model"
) -> Iterator[None]:
    """Turn the client's errors into one of ours.

    Example:
        >>> with explained(ModelError, "org/name"):                           # doctest: +SKIP
        ...     ask(lambda: HfApi().model_info("org/name"))
    """
    try:
        yield
    except RetargetError:
        raise
    except Exception as error:  # the client's errors have no root in common, and threads wrap them in others
        words = explain(error, repository, revision, kind=what)
        if words is None:
            raise
        raise kind(words) from error


# ---- watching the client


class _Watch:
    """For how long nothing but trouble has come; called by every request, in whichever thread."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reason = "no connection"
        self._waiting: dict[int, float] = {}

    def before(self, request: Any) -> None:
        limits = request.extensions.get("timeout", {})
        ours = {"connect": _CONNECT, "read": max(self.patience, _ANSWER), "write": max(self.patience, _ANSWER)}
        request.extensions["timeout"] = {**limits, **{k: v for k, v in ours.items() if limits.get(k) is None}}
        with self._lock:
            unanswered = self._waiting.get(threading.get_ident())
            if unanswered is not None:  # the one before got no answer at all
                self._since = self._since or unanswered
            if self._since is not None and time.monotonic() - self._since >= self.patience:
                raise GaveUp(f"{self._reason} for {self.patience:g} s")
            self._waiting[threading.get_ident()] = time.monotonic()

    def after(self, response: Any) -> None:
        with self._lock:
            started = self._waiting.pop(threading.get_ident(), time.monotonic())
            if response.status_code not in _BUSY:
                self._since = None
                return
            self._since = self._since or started
            self._reason = _name_status(response.status_code)
            end = time.monotonic() + _retry_after(response)
            if end - self._since > self.patience:
                raise GaveUp(f"{self._reason} and asks to wait {_retry_after(response):.0f} s")


_WATCHES: list[_Watch] = []  # of the whole process: uploads run in threads of the client's
_installed = threading.Lock()


@contextmanager
def _watching(patience: float) -> Iterator[None]:
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
        session.event_hooks = {
            "request": [*hooks["request"], _before],
            "response": [*hooks["response"], _after],
        }
        return session

    set_client_factory(make_watched)


def _before(request: Any) -> None:
    if _WATCHES:
        _WATCHES[-1].before(request)


def _after(response: Any) -> None:
    if _WATCHES:
        _WATCHES[-1].after(response)


# ---- words


def _name_status(status: int) -> str:
    if status == 429:
        return "it has had too many requests (429)"
    return f"it is busy or has a fault ({status})"


def _asked_to_wait(error: BaseException) -> float:
    response = getattr(error, "response", None)
    return _retry_after(response) if response is not None else 0.0


def _retry_after(response: Any) -> float:
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdigit() else 0.0


def _said(error: BaseException) -> str:
    return _one_line(getattr(error, "server_message", None) or error).rstrip(".")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
