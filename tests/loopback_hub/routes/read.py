"""What is in a repository: facts, files, references, history."""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..cards import metadata_of, tags_of
from ..files import git_hash
from ..lfs_rules import pointer
from ..messages import Answer, Call, Refusal
from ..repository import Commit, Entry, Repository
from ..routing import open_repository
from ..storage import may_see, require_download

if TYPE_CHECKING:
    from ..hub import Hub


def info(hub: Hub, call: Call, kind: str, id: str, revision: str = "main") -> Answer:
    """Everything about one repository at one revision; `?blobs=true` adds the files' sizes and hashes."""
    repository = open_repository(hub, call, kind, id)
    facts = describe(repository, repository.resolve(revision), blobs=call.asks("blobs"))
    return Answer.json(_narrow(facts, call))


def list_repositories(hub: Hub, call: Call, kind: str) -> Answer:
    """Repositories by author, by a part of their name, and by tags (`base_model:finetune:ada/vit`)."""
    author, search = (call.query.get(name, [""])[0] for name in ("author", "search"))
    found = []
    for repository in hub.storage.all(kind):
        if not may_see(call.who, repository) or author not in ("", repository.namespace):
            continue
        facts = describe(repository, repository.resolve("main"))
        if search.lower() in repository.id.lower() and set(call.query.get("filter", [])) <= set(facts["tags"]):
            full = call.asks("full") or "expand" in call.query
            found.append(_narrow(facts if full else {k: v for k, v in facts.items() if k != "siblings"}, call))
    limit = int(call.query.get("limit", ["1000"])[0])
    return Answer.json(found[:limit])


def describe(repository: Repository, commit: Commit, *, blobs: bool = False) -> dict[str, Any]:
    """The facts the client makes a ModelInfo or a DatasetInfo of."""
    card = _card(repository, commit)
    facts: dict[str, Any] = {
        "_id": git_hash(repository.id.encode())[:24],
        "id": repository.id,
        "author": repository.namespace,
        "sha": commit.oid,
        "createdAt": repository.facts["created"],
        "lastModified": commit.date,
        "private": repository.facts["private"],
        "gated": repository.facts["gated"],
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": tags_of(card),
        "cardData": card,
        "usedStorage": sum(entry.size for entry in commit.files.values()),
        "siblings": [_sibling(path, entry, blobs) for path, entry in sorted(commit.files.items())],
    }
    if repository.kind == "model":
        facts |= {name: card[name] for name in ("library_name", "pipeline_tag") if name in card}
        if "model.safetensors" in commit.files:
            facts["safetensors"] = _count(repository.content_of(commit.files["model.safetensors"]))
    return facts


def tree(hub: Hub, call: Call, kind: str, id: str, revision: str, path: str = "") -> Answer:
    """The files and folders under a path, a page at a time."""
    repository = open_repository(hub, call, kind, id)
    commit = repository.resolve(revision)
    inside = f"{path.strip('/')}/" if path else ""
    under = {each: entry for each, entry in commit.files.items() if each.startswith(inside)}
    if inside and not under:
        raise Refusal(404, f"{path} does not exist on {revision!r}", "EntryNotFound", {"X-Repo-Commit": commit.oid})
    folders = {"/".join(each.split("/")[:depth]) for each in under for depth in range(1, each.count("/") + 1)}
    names = sorted(set(under) | {each for each in folders if each.startswith(inside)})
    if not call.asks("recursive"):
        names = [each for each in names if "/" not in each[len(inside) :]]
    start = int(call.query.get("cursor", ["0"])[0])
    page = names[start : start + hub.page_size]
    headers = {}
    if start + len(page) < len(names):
        query = {"recursive": call.asks("recursive"), "expand": call.asks("expand"), "cursor": start + len(page)}
        headers["Link"] = f'<{hub.endpoint}{call.path}?{urlencode(query).lower()}>; rel="next"'
    return Answer.json([_listed(repository, commit, each, call.asks("expand")) for each in page], headers=headers)


def paths_info(hub: Hub, call: Call, kind: str, id: str, revision: str) -> Answer:
    """Some files and folders by name; those that are not there are left out."""
    repository = open_repository(hub, call, kind, id)
    commit = repository.resolve(revision)
    form: dict[str, Any] = call.body.json() if "json" in call.headers.get("Content-Type", "") else call.body.form()
    expand = str(form.get("expand", ["false"])).lower().strip("[']") == "true"
    wanted = [each.strip("/") for each in form.get("paths", [])]
    there = [each for each in wanted if each in commit.files or _holds(commit, each)]
    return Answer.json([_listed(repository, commit, each, expand) for each in there])


def refs(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """Branches, tags and pull requests."""
    repository = open_repository(hub, call, kind, id)

    def of(prefix: str) -> list[dict[str, str]]:
        return [
            {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid}
            for ref, oid in sorted(repository.refs.items())
            if ref.startswith(prefix)
        ]

    found = {"branches": of("refs/heads/"), "tags": of("refs/tags/"), "converts": of("refs/convert/")}
    return Answer.json(found | ({"pullRequests": of("refs/pr/")} if call.asks("include_prs") else {}))


def commits(hub: Hub, call: Call, kind: str, id: str, revision: str) -> Answer:
    """The history of a revision, newest first."""
    history = open_repository(hub, call, kind, id).history(revision)
    return Answer.json(
        [
            {"id": each.oid, "title": each.title, "message": each.message, "date": each.date}
            | {"authors": [{"user": each.author}]}
            for each in history
        ]
    )


def check_access(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """Whether the caller may download."""
    require_download(call.who, open_repository(hub, call, kind, id))
    return Answer.json({})


def _narrow(facts: dict[str, Any], call: Call) -> dict[str, Any]:
    wanted = call.query.get("expand", []) + call.query.get("expand[]", [])
    return {name: value for name, value in facts.items() if not wanted or name in ("_id", "id", *wanted)}


def _card(repository: Repository, commit: Commit) -> dict[str, Any]:
    if "README.md" not in commit.files:
        return {}
    try:
        return metadata_of(repository.content_of(commit.files["README.md"]).read_text("utf-8", "replace"))
    except ValueError:
        return {}


def _sibling(path: str, entry: Entry, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    lfs = {"lfs": _lfs_facts(entry, "sha256")} if entry.lfs else {}
    return {"rfilename": path, "size": entry.size, "blobId": entry.oid} | lfs


def _lfs_facts(entry: Entry, name: str) -> dict[str, Any]:
    return {name: entry.lfs, "size": entry.size, "pointerSize": len(pointer(entry.lfs or "", entry.size))}


def _holds(commit: Commit, folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in commit.files)


def _listed(repository: Repository, commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    if path in commit.files:
        entry = commit.files[path]
        facts: dict[str, Any] = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
        facts |= {"lfs": _lfs_facts(entry, "oid")} if entry.lfs else {}
    else:
        inside = json.dumps([(p, e.oid) for p, e in sorted(commit.files.items()) if p.startswith(f"{path}/")])
        facts = {"type": "directory", "oid": git_hash(inside.encode(), "tree"), "size": 0, "path": path}
    if expand:
        last = _last_change(repository, commit, path)
        facts["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
    return facts


def _last_change(repository: Repository, commit: Commit, path: str) -> Commit:
    def state(each: Commit) -> dict[str, Entry]:
        return {p: e for p, e in each.files.items() if p == path or p.startswith(f"{path}/")}

    last = commit
    for each in repository.history(commit.oid):
        if state(each) != state(commit):
            break
        last = each
    return last


def _count(weights: Path) -> dict[str, Any] | None:
    """The numbers in a safetensors file by type, from its header."""
    with weights.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(file.read(length)) if length < weights.stat().st_size else {}
        except ValueError:
            header = {}
    count = Counter[str]()
    for name, tensor in header.items():
        if name != "__metadata__":
            count[tensor["dtype"]] += prod(tensor["shape"])
    return {"parameters": dict(count), "total": sum(count.values())} if count else None
