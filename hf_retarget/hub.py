"""Calls to the Hub: retries, verification of downloads by hash, and explained errors. Does not import torch.

The client retries some calls itself (downloads, five times) and others never (whoami, model_info, commits); it waits
as long as the Hub asks for, and forever for an answer. `ask` retries every call, and gives up after
`HF_RETARGET_HUB_PATIENCE` seconds without success.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

from huggingface_hub import errors, get_token, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # the HTTP library's root
from huggingface_hub.utils import _http
from huggingface_hub.utils.sha import git_hash

from hf_retarget.errors import RetargetError
from hf_retarget.files import hash_file

PATIENCE = "HF_RETARGET_HUB_PATIENCE"
"""The environment variable with the number of seconds after which calls to an unavailable Hub give up."""

_SECONDS = 60.0
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
_CONNECT, _ANSWER = 10.0, 30.0  # timeouts in seconds where the client has none
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_NEXT = {
    401: "log in again (hf auth login)",
    404: "is the name right?",
    413: "it takes no files of this size",
    507: "there is no room left for this account",
}
"""What to do about other answers of the Hub; else, to try again later."""
_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class GaveUp(Exception):
    """The Hub was unavailable for too long. Not one of the client's errors, as the client would retry those."""


class UnknownHost(errors.OfflineModeIsEnabled):
    """The host name of the Hub cannot be resolved. The client then uses its cache, without retrying."""


# ---- asking


def ask(call: Callable[[], T]) -> T:
    """Call the client, and retry while the Hub is busy or unreachable.

    The call must be safe to repeat. Raises the client's own error, or `GaveUp`; `explain` describes both.
    """
    clean_token(get_token())  # of the login or HF_TOKEN: the client would quote a malformed one in its errors
    text, waited, wait = os.environ.get(PATIENCE, ""), 0.0, _FIRST_WAIT
    try:
        patience = max(0.0, float(text or _SECONDS))
    except ValueError:
        raise RetargetError(f"{PATIENCE} is '{text}'; give a number of seconds") from None
    with _watching(patience):
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except Exception as error:
                reason = is_trouble(error)
                pause = max(wait, _retry_after(getattr(find_cause(error), "response", None)))
                if reason is None or attempt == _ATTEMPTS:
                    raise
                if waited + pause > patience:
                    raise GaveUp(reason) from error
            _LOGGER.warning("the Hub: %s; trying again in %g s", reason, pause)
            time.sleep(pause)
            waited, wait = waited + pause, min(_LONGEST_WAIT, 2 * wait)
    raise AssertionError("unreachable")


class _Watch:
    """Measures how long the Hub has been unavailable; called for every request, from any thread."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reason = "no connection"
        self._unanswered: set[int] = set()  # threads

    def before(self, request: Any) -> None:
        """Set timeouts where the client has none; give up if the Hub has been unavailable for too long."""
        limits, longest = request.extensions.get("timeout", {}), max(self.patience, _ANSWER)
        ours = {"connect": _CONNECT, "read": longest, "write": longest}
        request.extensions["timeout"] = {**limits, **{k: v for k, v in ours.items() if limits.get(k) is None}}
        now, thread = time.monotonic(), threading.get_ident()
        with self._lock:
            if thread in self._unanswered:  # the previous request failed without an answer
                self._since = self._since or now
                _check_host(request.url.host)
            if self._since is not None and now - self._since >= self.patience:
                raise GaveUp(f"{self._reason} for {self.patience:g} s")
            self._unanswered.add(thread)

    def after(self, response: Any) -> None:
        """Record whether the Hub is available; give up if it asks for a longer wait than allowed."""
        now, wait = time.monotonic(), _retry_after(response)
        with self._lock:
            self._unanswered.discard(threading.get_ident())
            if response.status_code not in _BUSY:
                self._since = None
                return
            self._since = self._since or now
            self._reason = _name_status(response.status_code)
            if now + wait - self._since > self.patience:
                raise GaveUp(f"{self._reason} and asks to wait {wait:.0f} s")


def _check_host(host: str) -> None:
    """Raise `UnknownHost` if the host name cannot be resolved, unless the user has set a patience.

    Without a connection, waiting would not help. Behind a proxy, it is the proxy that resolves names.
    """
    if not os.environ.get(PATIENCE) and not getproxies():
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UnknownHost(f"no connection (the host '{host}' cannot be found)") from error


_WATCHES: list[_Watch] = []  # of the whole process: the client uploads in threads of its own
_installed = threading.Lock()


@contextmanager
def _watching(patience: float) -> Iterator[None]:
    if _installed.acquire(blocking=False):
        make = _http._GLOBAL_CLIENT_FACTORY  # the user's own, if there is one; it has no public name
        set_client_factory(lambda: _add_hooks(make()))
    watch, logger = _Watch(patience), logging.getLogger("huggingface_hub.utils._http")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the client warns twice per attempt; `ask` logs one warning
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.remove(watch)
        logger.setLevel(level)


def _add_hooks(session: Any) -> Any:
    """Make a session of the client report requests and responses to the newest watch."""

    def report(how: Callable[[_Watch, Any], None], message: Any) -> None:
        if _WATCHES:
            how(_WATCHES[-1], message)

    session.event_hooks["request"].append(partial(report, _Watch.before))
    session.event_hooks["response"].append(partial(report, _Watch.after))
    return session


def _name_status(status: int) -> str:
    return "it has had too many requests (429)" if status == 429 else f"it is busy or has a fault ({status})"


def _retry_after(response: Any) -> float:
    text = "" if response is None else response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdecimal() else 0.0


# ---- verifying: the client stores a file under its hash without checking it

_SHA256, _GIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


def named_hash(path: Path) -> str | None:
    """The hash that the Hub gives for a cached file: the sha256 of a large file, git's id of a small one; or None."""
    blob = Path(os.path.realpath(path))
    known = _SHA256.fullmatch(blob.name) or _GIT.fullmatch(blob.name)
    return blob.name if known and blob.parent.name == "blobs" else None


def is_cached(path: Path) -> bool:
    """Whether a file belongs to a snapshot of the client's cache."""
    return path.parent.parent.name == "snapshots"


def is_whole(path: Path) -> bool:
    """Whether a cached file has the hash it is stored under; True if there is no such hash."""
    expected = named_hash(path)
    if expected is None:
        return True
    return expected == (hash_file(path) if _SHA256.fullmatch(expected) else git_hash(path.read_bytes()))


def drop(path: Path) -> None:
    """Remove a damaged file from the cache, so that it is downloaded again."""
    Path(os.path.realpath(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def fetch_whole(fetch: Callable[[], Path], what: str, kind: type[RetargetError] = RetargetError) -> Path:
    """Fetch a file and verify its hash; refetch a damaged one once, then raise `kind`."""
    path = fetch()
    if not is_whole(path):
        drop(path)
        try:
            path = fetch()
        except RetargetError as error:
            raise type(error)(f"the cached copy of {what} was damaged and has been removed; {error}") from error
        if not is_whole(path):
            drop(path)
            raise kind(f"{what} does not have the hash that the Hub gives for it, in two downloads; try again later")
    return path


# ---- explaining: the client's errors have no common base class, and some are those of the HTTP library


def clean_token(token: str | None) -> str | None:
    """Strip white space from a token; the error about a malformed token does not quote it.

    Example:
        >>> clean_token(" hf_abc ")
        'hf_abc'
    """
    if not isinstance(token, str):
        return token  # False: the client sends no token
    stripped = token.strip()
    if not stripped:
        return None
    if wrong := next((place for place, letter in enumerate(stripped, 1) if not "!" <= letter <= "~"), None):
        raise RetargetError(f"character {wrong} of the token for the Hub cannot be part of a token; copy it again")
    return stripped


def is_trouble(error: BaseException) -> str | None:
    """The reason, if an error is temporary; else None."""
    cause = find_cause(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return _name_status(status) if status in _BUSY else None
    if isinstance(cause, HTTPError):  # without a response
        return f"no connection ({one_line(cause)})"
    return "a file has another size than announced" if "Consistency check failed" in str(cause) else None


def find_cause(error: BaseException) -> BaseException:
    """The error of the Hub or the connection that caused an error; the error itself if there is none."""
    seen = error
    while not isinstance(seen, (GaveUp, UnknownHost, HTTPError)) and seen.__cause__ is not None:
        seen = seen.__cause__
    return seen if isinstance(seen, (GaveUp, HTTPError, OSError)) else error


def token_was_refused(error: BaseException) -> bool:
    """Whether the Hub refused the token. (Without a token, it gives the same answer for a private repository.)"""
    response = getattr(find_cause(error), "response", None)
    return response is not None and response.status_code == 401 and "authorization" in response.request.headers


def explain(error: BaseException, repository: str, revision: str | None = None, *, kind: str = "model") -> str | None:
    """What an error of the client means and what to do about it; None for any other error.

    Example:
        >>> explain(GaveUp("it is busy (503)"), "org/name")
        "the Hub could not be reached for 'org/name': it is busy (503); try again later"
    """
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
        return f"'{repository}' is not a valid name on the Hub: {one_line(cause)}"
    if isinstance(cause, errors.OfflineModeIsEnabled) and not isinstance(cause, UnknownHost):
        return f"'{repository}' cannot be looked up on the Hub in offline mode; unset HF_HUB_OFFLINE"
    if isinstance(cause, HfHubHTTPError) and cause.response.status_code == 403:
        return f"the Hub denies access to '{repository}': {_message(cause)}; use a token with the required permission"
    if reason := cause if isinstance(cause, GaveUp | UnknownHost) else is_trouble(cause):
        return f"the Hub could not be reached for '{repository}': {reason}; try again later"
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        advice = _NEXT.get(status, "try again later")
        return f"the Hub answered {status} for '{repository}': {_message(cause)}; {advice}"
    if isinstance(cause, json.JSONDecodeError | errors.FileMetadataError):
        return (
            f"what answers about '{repository}' is not the Hub; if this network asks you to log in, do so in a "
            "browser, and see that HF_ENDPOINT is right"
        )
    return None


def describe_gate(repository: str) -> str:
    """What to do about a gated repository."""
    return f"'{repository}' is gated: accept its terms on the Hub, then log in (hf auth login) or set HF_TOKEN"


@contextmanager
def explained(
    kind: type[RetargetError],
    repository: str,
    revision: str | None = None,
    *,
    words: Callable[[BaseException], str | None] | None = None,
) -> Iterator[None]:
    """Turn the client's errors into a `kind` of ours, in the words of `explain` or of `words`."""
    try:
        yield
    except RetargetError:
        raise
    except Exception as error:  # the client's errors have no common base class, and threads wrap them
        if (found := words(error) if words else explain(error, repository, revision)) is None:
            raise
        raise kind(found) from error


def _message(error: BaseException) -> str:
    return one_line(getattr(error, "server_message", None) or error).rstrip(".")


def one_line(error: object) -> str:
    """The message of an error on one line, shortened."""
    return " ".join(str(error).split())[:300] or type(error).__name__
