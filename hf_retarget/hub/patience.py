"""Ask the Hub again while it is in trouble, until the patience is over.

The client repeats some calls itself (files and parts of files, five times) and others not at all (who am I, what is
there, commits, a download that is reset); it waits as long as the Hub asks it to, and for an answer forever. Within
`ask`, every call is repeated, and trouble ends when the patience does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hf_retarget.errors import RetargetError
from hf_retarget.hub.watch import GaveUp, retry_after, watching
from hf_retarget.hub.words import clean_token, find_cause, is_trouble

__all__ = ["PATIENCE", "GaveUp", "ask", "read_patience"]

PATIENCE = "HF_RETARGET_HUB_PATIENCE"
"""The environment variable with the seconds that the Hub may be busy or unreachable before a call gives up."""

_SECONDS = 60.0
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


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
    """
    from huggingface_hub import get_token

    clean_token(get_token())  # of the login or HF_TOKEN: the client would put it into its error messages
    patience, waited, wait = read_patience(), 0.0, _FIRST_WAIT
    with watching(patience), _client_says_nothing():
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except Exception as error:
                reason = is_trouble(error)
                pause = max(wait, _asked_to_wait(find_cause(error)))
                if reason is None or attempt == _ATTEMPTS:
                    raise
                if waited + pause > patience:
                    raise GaveUp(reason) from error
            _LOGGER.warning("the Hub: %s; trying again in %g s", reason, pause)
            time.sleep(pause)
            waited, wait = waited + pause, min(_LONGEST_WAIT, 2 * wait)
    raise AssertionError("unreachable")


@contextmanager
def _client_says_nothing() -> Iterator[None]:
    """The client warns of each of its own attempts, twice; what a person needs is said here, once."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _asked_to_wait(error: BaseException) -> float:
    response = getattr(error, "response", None)
    return retry_after(response) if response is not None else 0.0
