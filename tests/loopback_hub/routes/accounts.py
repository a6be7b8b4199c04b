"""Who am I; making, changing and deleting repositories; checking a README."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..cards import problems_of
from ..messages import Answer, Call, Refusal
from ..routing import open_repository
from ..storage import require_seen, require_write, require_write_token

if TYPE_CHECKING:
    from ..hub import Hub


def whoami(hub: Hub, call: Call) -> Answer:
    """The user a token belongs to."""
    if call.who is None:
        raise Refusal(401, "Invalid username or password.")
    return Answer.json(call.who.describe())


def validate_yaml(hub: Hub, call: Call) -> Answer:
    """Whether the metadata of a README is acceptable; asked before a commit with a README."""
    errors, warnings = problems_of(call.body.json()["content"])
    found = {
        "errors": [{"message": each} for each in errors],
        "warnings": [{"message": each} for each in warnings],
    }
    return Answer.json(found, 400 if errors else 200)


def create_repository(hub: Hub, call: Call) -> Answer:
    """Make a repository; if it is there, a 409 that says where."""
    wanted = call.body.json()
    kind, id = _named(wanted, call)
    who = require_write(call.who, id.split("/")[0], f"create a {kind}")
    url = hub.page(kind, id)
    try:
        hub.storage.create(kind, id, private=_is_private(wanted) or False, author=who.name)
    except Refusal as refusal:
        if refusal.status != 409:
            raise
        return Answer.json({"error": str(refusal), "url": url}, 409)
    return Answer.json({"url": url, "name": id, "id": id})


def delete_repository(hub: Hub, call: Call) -> Answer:
    """Remove a repository."""
    kind, id = _named(call.body.json(), call)
    repository = require_seen(call.who, hub.storage.find(kind, id), id)
    require_write(call.who, repository.namespace, f"delete a {kind}")
    hub.storage.delete(repository)
    return Answer.json({})


def change_settings(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """Make a repository private or public, gated or open."""
    repository = open_repository(hub, call, kind, id)
    require_write(call.who, repository.namespace, f"change a {kind}")
    wanted = call.body.json()
    private = _is_private(wanted)
    repository.update(
        private=repository.facts["private"] if private is None else private,
        gated=wanted.get("gated", repository.facts["gated"]),
    )
    return Answer.json({"private": repository.facts["private"], "gated": repository.facts["gated"]})


def _named(wanted: dict[str, Any], call: Call) -> tuple[str, str]:
    namespace = wanted.get("organization") or require_write_token(call.who).name
    return wanted.get("type") or "model", f"{namespace}/{wanted['name']}"


def _is_private(wanted: dict[str, Any]) -> bool | None:
    if "visibility" in wanted:
        return bool(wanted["visibility"] == "private")
    return wanted.get("private")
