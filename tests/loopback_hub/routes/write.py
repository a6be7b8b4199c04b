"""What changes a repository: commits, and before them the question how each file is to come; branches and tags."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from ..lfs_rules import belongs_in_lfs
from ..messages import Answer, Call, Refusal
from ..repository import Commit, Entry, Repository
from ..routing import open_repository
from ..storage import require_write, require_write_token
from .pulls import author_of, new_pull

if TYPE_CHECKING:
    from ..hub import Hub


def preupload(hub: Hub, call: Call, kind: str, id: str, revision: str) -> Answer:
    """For each file: within the commit or through LFS, to be left out or not, and what is there already."""
    repository = _open_for_commit(hub, call, kind, id, revision)
    commit = repository.resolve(revision)
    wanted = call.body.json()
    ignored = [line.strip() for line in wanted.get("gitIgnore", "").splitlines() if line.strip()]

    def plan(file: dict[str, Any]) -> dict[str, Any]:
        path, sample = file["path"], base64.b64decode(file.get("sample", ""))
        there = commit.files.get(path)
        return {
            "path": path,
            "uploadMode": "lfs" if belongs_in_lfs(path, file["size"], sample) else "regular",
            "shouldIgnore": any(fnmatch(path, each) or fnmatch(path, f"*/{each}") for each in ignored),
            "oid": there.digest if there else None,
        }

    return Answer.json({"files": [plan(file) for file in wanted["files"]], "commitOid": commit.oid})


def commit(hub: Hub, call: Call, kind: str, id: str, revision: str) -> Answer:
    """Add a commit to a branch, or open a pull request with it; all or nothing."""
    repository = _open_for_commit(hub, call, kind, id, revision)
    author = require_write_token(call.who).name
    lines = [json.loads(line) for line in call.body.read().splitlines() if line.strip()]
    if not lines or lines[0].get("key") != "header":
        raise Refusal(400, "A commit begins with its header")
    header = lines[0]["value"]
    with repository.lock:
        ref = _branch(repository, revision)
        parent = repository.resolve(ref)
        if header.get("parentCommit") not in (None, parent.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes = dict(change for line in lines[1:] for change in _changes(repository, parent, line))
        number = None
        if call.asks("create_pr"):
            number = new_pull(repository, header["summary"], header.get("description", ""), author, ref)
            ref = f"refs/pr/{number}"
        made = repository.add_commit(
            changes, header["summary"], header.get("description", ""), author=author, ref=ref, parent=parent
        )
    page = hub.page(kind, id)
    answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{page}/commit/{made.oid}", "hookOutput": ""}
    return Answer.json(answer | ({"pullRequestUrl": f"{page}/discussions/{number}"} if number else {}))


def create_branch(hub: Hub, call: Call, kind: str, id: str, name: str) -> Answer:
    """Open a branch, at `main` unless the caller says where."""
    start = call.body.json().get("startingPoint", "main")
    if name.startswith("refs/"):
        raise Refusal(400, f"Invalid reference for a branch: {name}")
    return _create_ref(hub, call, kind, id, f"refs/heads/{name}", start)


def delete_branch(hub: Hub, call: Call, kind: str, id: str, name: str) -> Answer:
    """Close a branch; `main` stays."""
    if name == "main":
        raise Refusal(403, "The branch 'main' cannot be deleted")
    return _delete_ref(hub, call, kind, id, f"refs/heads/{name}")


def create_tag(hub: Hub, call: Call, kind: str, id: str, name: str) -> Answer:
    """Tag a revision (it is in the path; the tag is in the body)."""
    return _create_ref(hub, call, kind, id, f"refs/tags/{call.body.json()['tag']}", name)


def delete_tag(hub: Hub, call: Call, kind: str, id: str, name: str) -> Answer:
    """Remove a tag."""
    return _delete_ref(hub, call, kind, id, f"refs/tags/{name}")


def _create_ref(hub: Hub, call: Call, kind: str, id: str, ref: str, start: str) -> Answer:
    repository = open_repository(hub, call, kind, id)
    require_write(call.who, repository.namespace, "change references")
    with repository.lock:
        if ref in repository.refs:
            raise Refusal(409, f"Reference already exists: {ref}")
        repository.update(refs=repository.refs | {ref: repository.resolve(start).oid})
    return Answer.json({})


def _delete_ref(hub: Hub, call: Call, kind: str, id: str, ref: str) -> Answer:
    repository = open_repository(hub, call, kind, id)
    require_write(call.who, repository.namespace, "change references")
    with repository.lock:
        if ref not in repository.refs:
            raise Refusal(404, f"Invalid rev id: {ref}", "RevisionNotFound")
        repository.update(refs={name: oid for name, oid in repository.refs.items() if name != ref})
    return Answer.json({})


def _open_for_commit(hub: Hub, call: Call, kind: str, id: str, revision: str) -> Repository:
    """Whoever may see the repository may open a pull request, and go on with their own; a commit is for members."""
    repository = open_repository(hub, call, kind, id)
    who = require_write_token(call.who)
    if not call.asks("create_pr") and author_of(repository, revision) != who.name:
        require_write(call.who, repository.namespace, "commit")
    return repository


def _branch(repository: Repository, revision: str) -> str:
    for ref in (f"refs/heads/{revision}", revision):
        if ref in repository.refs:
            return ref
    raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def _changes(repository: Repository, parent: Commit, line: dict[str, Any]) -> Iterator[tuple[str, Entry | None]]:
    """What one line of a commit does: entries to add, None for what goes."""
    key, value = line["key"], line["value"]
    path = value["path"].strip("/")
    if not path or {"..", ".git"} & set(path.split("/")):
        raise Refusal(400, f"Invalid path: {value['path']}")
    if key == "file":
        yield path, repository.store(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        entry = repository.lfs_entry(value["oid"])
        if value.get("size") not in (None, entry.size):
            raise Refusal(400, f"{path} has {entry.size} bytes, the commit says {value['size']}")
        yield path, entry
    elif key in ("deletedFile", "deletedFolder"):
        gone = [
            each for each in parent.files if each == path or (key == "deletedFolder" and each.startswith(f"{path}/"))
        ]
        if not gone:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        yield from ((each, None) for each in gone)
    else:
        raise Refusal(400, f"A commit knows no {key!r}")
