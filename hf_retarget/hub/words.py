"""What the errors of the client mean, and what to do next. They share no root: some are of the HTTP library itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_retarget.errors import RetargetError
from hf_retarget.hub.watch import BUSY, GaveUp, name_status


def clean_token(token: str | None) -> str | None:
    """A token without the line feed that copying adds; one that cannot be is an error, which does not show it.

    Example:
        >>> clean_token(" hf_abc ")
        'hf_abc'
    """
    if not isinstance(token, str):
        return token  # False: the client takes none at all
    stripped = token.strip()
    if not stripped:
        return None
    if wrong := next((place for place, letter in enumerate(stripped, 1) if not "!" <= letter <= "~"), None):
        raise RetargetError(
            f"character {wrong} of the token for the Hub is one that no token has; copy the token again"
        )
    return stripped


def is_trouble(error: BaseException) -> str | None:
    """What is wrong, if it may be better in a while; None if it will not.

    Example:
        >>> is_trouble(ValueError("no")) is None
        True
    """
    from huggingface_hub.errors import HfHubHTTPError

    cause = find_cause(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return name_status(status) if status in BUSY else None
    if isinstance(cause, _http_error()):  # one without an answer
        return f"no connection ({_one_line(cause)})"
    return None


def find_cause(error: BaseException) -> BaseException:
    """The error itself, out of those that only say that there was one.

    Example:
        >>> find_cause(ValueError("no"))
        ValueError('no')
    """
    seen = error
    while not isinstance(seen, (GaveUp, _http_error())) and seen.__cause__ is not None:
        seen = seen.__cause__
    return seen if isinstance(seen, (GaveUp, _http_error(), OSError)) else error


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
    """Turn the client's errors into one of ours."""
    try:
        yield
    except RetargetError:
        raise
    except Exception as error:  # the client's errors have no root in common, and threads wrap them in others
        words = explain(error, repository, revision, kind=what)
        if words is None:
            raise
        raise kind(words) from error


def _said(error: BaseException) -> str:
    return _one_line(getattr(error, "server_message", None) or error).rstrip(".")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _http_error() -> type[Exception]:
    """The root of the HTTP library's errors, whichever library the client uses."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # not by name

    return HTTPError
