"""From a method and a path to the function that answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

from .messages import Answer, Call, Refusal
from .repository import Repository
from .storage import require_seen

if TYPE_CHECKING:
    from .hub import Hub

# What may stand for a name in a pattern. A revision or a path comes quoted, `refs%2Fpr%2F1`, so that it is one part.
PARTS = {
    "kind": "(models|datasets)",
    "id": "([^/]+/[^/]+?)",
    "prefix": "((?:datasets/)?)",
    "digest": "([0-9a-f]{64})",
    "number": r"(\d+)",
    "path": "(.+)",
}


@dataclass(frozen=True)
class Route:
    """A row of the table: the name by which faults and the log know it, when it applies, who answers."""

    name: str
    methods: str
    pattern: str
    answer: Callable[..., Answer]

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\{(\w+)\}", lambda found: PARTS.get(found[1], "([^/]+)"), self.pattern))

    def match(self, method: str, path: str) -> dict[str, str] | None:
        """The parts of the path by name, with the repository's kind in the singular; None if this is not the route.

        >>> Route("refs", "GET", "/api/{kind}/{id}/refs", Answer).match("GET", "/api/models/ada/vit/refs")
        {'kind': 'model', 'id': 'ada/vit'}
        """
        found = self._expression.fullmatch(path) if method in self.methods.split() else None
        if found is None:
            return None
        names = re.findall(r"\{(\w+)\}", self.pattern)
        parts = {name: unquote(value) for name, value in zip(names, found.groups(), strict=True)}
        if "prefix" in parts:
            parts["kind"] = parts.pop("prefix").rstrip("/") or "models"
        if "kind" in parts:
            parts["kind"] = parts["kind"].removesuffix("s")
        return parts


def find_route(routes: Iterable[Route], method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The first route that fits; one that refuses if none does."""
    for route in routes:
        if (parts := route.match(method, path)) is not None:
            return route, parts
    return Route("none", method, "", _refuse), {}


def _refuse(hub: Hub, call: Call) -> Answer:
    about_repository = "/resolve/" in call.path or re.match("/api/(models|datasets)/", call.path)
    raise Refusal(404, f"No such page: {call.method} {call.path}", "RepoNotFound" if about_repository else None)


def open_repository(hub: Hub, call: Call, kind: str, id: str) -> Repository:
    """The repository a call is about, if the caller may know of it."""
    return require_seen(call.who, hub.storage.find(kind, id), id)
