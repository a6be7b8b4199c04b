"""Where a model is pushed to, and whether that may work: asked before long work begins, not after it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hf_retarget.errors import PublishError
from hf_retarget.hub import ask, clean_token, explained

_TOKEN = "log in (hf auth login), set HF_TOKEN, or give --token"


@dataclass(frozen=True)
class Destination:
    """A repository of the Hub, and how to push there.

    Example:
        >>> Destination("ada/birds", private=True).revision is None
        True
    """

    repository: str
    """`owner/name`, or `name` for one's own."""
    private: bool = False
    """Make the repository private if it is new; refuse to push to one that is public."""
    revision: str | None = None
    """The branch, made if it is not there; `main` if not given."""
    message: str | None = None
    """Of the commit."""
    create_pr: bool = False
    """Open a pull request instead of committing to the branch."""
    replace_card: bool = False
    """Replace a README.md that is there."""
    token: str | None = field(default=None, repr=False)
    """If not the one of the login or HF_TOKEN."""


def check_destination(destination: Destination) -> Destination:
    """Whether there is a name, a token and a right to write; the destination with the full name of the repository."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is, but not by name

    destination = replace(destination, token=clean_token(destination.token))
    name = destination.repository
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PublishError(f"'{name}' is no name for a repository: {' '.join(str(error).split())}") from error
    if is_offline_mode():
        raise PublishError(f"offline mode is on, so nothing can be pushed to '{name}'; unset HF_HUB_OFFLINE")
    if not (destination.token or get_token()):
        raise PublishError(f"there is no token to push to '{name}' with; {_TOKEN}")
    api = HfApi(token=destination.token)
    with explained(PublishError, name):
        who = ask(api.whoami)
    found = replace(destination, repository=name if "/" in name else f"{who['name']}/{name}")
    _check_rights(found, who)
    try:
        with explained(PublishError, found.repository, found.revision):
            there = ask(lambda: api.model_info(found.repository))
    except PublishError as error:
        if not isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
            raise
        if found.create_pr:
            raise PublishError(
                f"there is no '{found.repository}' to open a pull request on; push without --create-pr, which makes it"
            ) from error
        return found
    if found.private and there.private is False:
        raise PublishError(
            f"'{found.repository}' is there already, and public; make it private on the Hub, or name another"
        )
    return found


def _check_rights(destination: Destination, who: dict[str, Any]) -> None:
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PublishError(
            f"the token of '{who['name']}' may only read; make one that may write "
            f"(https://huggingface.co/settings/tokens), then {_TOKEN}"
        )
    owner = destination.repository.partition("/")[0]
    places = {who["name"]} | {each["name"] for each in who.get("orgs") or [] if each.get("roleInOrg") != "read"}
    if owner not in places and not destination.create_pr:
        raise PublishError(
            f"'{who['name']}' may not write to '{owner}'; push to one of {', '.join(sorted(places))}, "
            "or propose it with --create-pr"
        )
