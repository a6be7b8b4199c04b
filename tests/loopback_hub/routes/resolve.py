"""A file by its name: small ones here, large ones by way of the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..messages import Answer, Call, Refusal
from ..routing import open_repository
from ..storage import require_download

if TYPE_CHECKING:
    from ..hub import Hub


def resolve(hub: Hub, call: Call, kind: str, id: str, revision: str, path: str) -> Answer:
    """The content, or for LFS a redirect to another origin, where the client must not bring its token."""
    repository = open_repository(hub, call, kind, id)
    require_download(call.who, repository)
    commit = repository.resolve(revision)
    if path not in commit.files:
        raise Refusal(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.oid})
    entry = commit.files[path]
    headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
    if entry.lfs is None:
        return Answer(200, headers | {"ETag": f'"{entry.oid}"'}, file=repository.content_of(entry))
    headers |= {"X-Linked-Etag": f'"{entry.lfs}"', "X-Linked-Size": str(entry.size)}
    headers["Location"] = hub.signed(hub.storage_endpoint, f"/{kind}s/{id}/lfs/{entry.lfs}")
    return Answer(302, headers, b"Found. Redirecting to the storage.")
