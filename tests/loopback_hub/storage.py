"""All repositories under one folder, and who may do what with them."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from .accounts import Identity
from .messages import Refusal
from .repository import Repository

KINDS = ("model", "dataset")


class Storage:
    """Repositories by kind and id: `root/models/ada/vit`, `root/datasets/ada/digits`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], Repository] = {}

    def folder(self, kind: str, id: str) -> Path:
        return self.root / f"{kind}s" / id

    def create(self, kind: str, id: str, *, private: bool = False, author: str) -> Repository:
        """Make a repository; refuse if it is there, or if the name is not one."""
        if kind not in KINDS or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", id, re.ASCII) or ".." in id:
            raise Refusal(400, f"Invalid {kind} name: {id}")
        with self._lock:
            if self.find(kind, id):
                raise Refusal(409, f"You already created this {kind} repo: {id}")
            repository = Repository.create(self.folder(kind, id), kind, id, private, author)
            self._open[kind, id] = repository
            return repository

    def find(self, kind: str, id: str) -> Repository | None:
        """A repository, if there is one of this name."""
        with self._lock:
            if (kind, id) not in self._open and (self.folder(kind, id) / "repository.json").exists():
                self._open[kind, id] = Repository(self.folder(kind, id), kind, id)
            return self._open.get((kind, id))

    def delete(self, repository: Repository) -> None:
        """Remove a repository with all it holds."""
        with self._lock:
            self._open.pop((repository.kind, repository.id))
            shutil.rmtree(repository.folder)

    def all(self, kind: str) -> Iterator[Repository]:
        """All repositories of a kind, by name."""
        for file in sorted((self.root / f"{kind}s").glob("*/*/repository.json")):
            if found := self.find(kind, "/".join(file.parent.parts[-2:])):
                yield found


def may_see(who: Identity | None, repository: Repository) -> bool:
    """Whether its name, its files' names and its settings are for them."""
    return not repository.facts["private"] or (who is not None and who.belongs_to(repository.namespace))


def require_seen(who: Identity | None, repository: Repository | None, id: str) -> Repository:
    """The repository, or the refusal that does not tell a private one from one that is not there."""
    if repository is not None and may_see(who, repository):
        return repository
    if who is None:
        raise Refusal(401, "Invalid username or password.", "RepoNotFound")
    raise Refusal(404, f"Repository not found: {id}", "RepoNotFound")


def require_download(who: Identity | None, repository: Repository) -> None:
    """Refuse the content of a gated repository to those who were not let in."""
    if not repository.facts["gated"]:
        return
    if who is None:
        hint = "You must have access to it and be authenticated to access it. Please log in."
        raise Refusal(401, f"Access to {repository.kind} {repository.id} is restricted. {hint}", "GatedRepo")
    if not who.belongs_to(repository.namespace) and who.name not in repository.facts["granted"]:
        hint = f"and you are not in the authorized list. Ask for access at /{repository.id}."
        raise Refusal(403, f"Access to {repository.kind} {repository.id} is restricted {hint}", "GatedRepo")


def require_write_token(who: Identity | None) -> Identity:
    """Somebody who came with a token that may write somewhere."""
    if who is None:
        raise Refusal(401, "Invalid username or password.")
    if who.role != "write":
        raise Refusal(403, "Forbidden: this token may only read, you must use a write token")
    return who


def require_write(who: Identity | None, namespace: str, what: str) -> Identity:
    """Somebody who may write in this namespace, with this token."""
    who = require_write_token(who)
    if not who.belongs_to(namespace):
        raise Refusal(403, f"You don't have the rights to {what} under the namespace {namespace!r}")
    return who
