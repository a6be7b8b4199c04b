"""Pull requests: opened with a commit or before it, listed, merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..messages import Answer, Call, Refusal
from ..repository import MAIN, Repository, now
from ..routing import open_repository
from ..storage import require_write, require_write_token

if TYPE_CHECKING:
    from ..hub import Hub


def new_pull(repository: Repository, title: str, description: str, author: str, base: str) -> int:
    """Note a pull request; its branch `refs/pr/N` is made by whoever calls this."""
    pulls = repository.facts["pulls"]
    facts = {"title": title, "description": description, "author": author, "created": now(), "base": base}
    repository.update(pulls=[*pulls, facts | {"status": "open", "merged": None}])
    return len(pulls) + 1


def author_of(repository: Repository, revision: str) -> str | None:
    """Who opened the pull request `refs/pr/N`; None for any other revision."""
    number = revision.removeprefix("refs/pr/")
    return str(_pull(repository, int(number))["author"]) if number != revision and number.isdigit() else None


def list_pulls(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """All pull requests, newest first, in one page; by author and status if asked."""
    repository = open_repository(hub, call, kind, id)
    found = [_describe(repository, number) for number in range(len(repository.facts["pulls"]), 0, -1)]
    status, author = (call.query.get(name, ["all"])[0] for name in ("status", "author"))
    found = [each for each in found if status in ("all", each["status"]) and author in ("all", each["author"]["name"])]
    found = [] if call.query.get("p", ["0"])[0] != "0" or call.query.get("type") == ["discussion"] else found
    return Answer.json({"discussions": found, "count": len(found), "start": 0})


def open_pull(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """Open a pull request without a commit; those follow on `refs/pr/N`."""
    repository = open_repository(hub, call, kind, id)
    who, wanted = require_write_token(call.who), call.body.json()
    if not wanted.get("pullRequest"):
        raise Refusal(501, "This Hub has pull requests but no other discussions")
    with repository.lock:
        number = new_pull(repository, wanted["title"], wanted.get("description", ""), who.name, MAIN)
        repository.update(refs=repository.refs | {f"refs/pr/{number}": repository.refs[MAIN]})
    return Answer.json(_describe(repository, number))


def pull_details(hub: Hub, call: Call, kind: str, id: str, number: str) -> Answer:
    """A pull request with its commits."""
    repository = open_repository(hub, call, kind, id)
    return Answer.json(_describe(repository, int(number)))


def merge(hub: Hub, call: Call, kind: str, id: str, number: str) -> Answer:
    """Put the files of a pull request on its base."""
    repository = open_repository(hub, call, kind, id)
    who = require_write(call.who, repository.namespace, "merge")
    with repository.lock:
        pull = _pull(repository, int(number))
        if pull["status"] != "open":
            raise Refusal(409, f"Pull request {number} is {pull['status']}")
        head, base = repository.resolve(f"refs/pr/{number}"), repository.resolve(pull["base"])
        if base.oid not in [each.oid for each in repository.history(head.oid)]:
            raise Refusal(409, "The base has moved on; this Hub merges only what follows it directly")
        gone = dict.fromkeys(path for path in base.files if path not in head.files)
        made = repository.add_commit(
            {**head.files, **gone}, f"{pull['title']} (#{number})", author=who.name, ref=pull["base"], parent=base
        )
        pulls = [dict(each) for each in repository.facts["pulls"]]
        pulls[int(number) - 1] |= {"status": "merged", "merged": made.oid}
        repository.update(pulls=pulls)
    return Answer.json({})


def _pull(repository: Repository, number: int) -> dict[str, Any]:
    if not 0 < number <= len(repository.facts["pulls"]):
        raise Refusal(404, f"There is no pull request {number}")
    pull: dict[str, Any] = repository.facts["pulls"][number - 1]
    return pull


def _describe(repository: Repository, number: int) -> dict[str, Any]:
    pull = _pull(repository, number)
    author, base = {"name": pull["author"]}, repository.resolve(pull["base"]).oid
    events: list[dict[str, Any]] = []
    for commit in repository.history(f"refs/pr/{number}"):
        if commit.oid == base or commit.date < pull["created"]:
            break
        data = {"subject": commit.title, "oid": commit.oid}
        events.append(
            {"id": commit.oid[:24], "type": "commit", "createdAt": commit.date, "author": author, "data": data}
        )
    return {
        "num": number,
        "title": pull["title"],
        "author": author,
        "createdAt": pull["created"],
        "status": pull["status"],
        "isPullRequest": True,
        "repo": {"name": repository.id, "type": repository.kind},
        "changes": {"base": pull["base"], "mergeCommitId": pull["merged"]},
        "filesWithConflicts": [],
        "events": events[::-1],
        "diff": "",
    }
