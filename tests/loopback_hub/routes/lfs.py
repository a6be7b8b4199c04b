"""Large files: where to send them, whole or in parts, and where to get them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import sha256_of, write_atomically
from ..messages import PIECE, Answer, Call, Refusal
from ..repository import Repository
from ..routing import open_repository
from ..storage import require_write_token

if TYPE_CHECKING:
    from ..hub import Hub

LFS_JSON = {"Content-Type": "application/vnd.git-lfs+json"}


def batch(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """For each object: nothing if it is there, else an address to put it, or one for each of its parts."""
    repository = open_repository(hub, call, kind, id)
    wanted = call.body.json()
    # Whoever may open a pull request must be able to upload for it: the right to commit is asked for at the commit.
    require_write_token(call.who)
    parts = "multipart" in wanted.get("transfers", ["basic"])
    objects = [_plan(hub, repository, each["oid"], each["size"], parts) for each in wanted["objects"]]
    transfer = "multipart" if any("chunk_size" in _header(each) for each in objects) else "basic"
    return Answer.json({"transfer": transfer, "objects": objects}, headers=LFS_JSON)


def upload(hub: Hub, call: Call, kind: str, id: str, digest: str) -> Answer:
    """Take an object in one piece; it is kept only if it is what it was said to be."""
    repository = _open_signed(hub, call, kind, id)
    arrived = write_atomically(_folder(repository, digest) / "whole", call.body)
    _accept(repository, digest, arrived)
    return Answer(200, {"ETag": f'"{digest}"'})


def upload_part(hub: Hub, call: Call, kind: str, id: str, digest: str, number: str) -> Answer:
    """Take one part of an object."""
    repository = _open_signed(hub, call, kind, id)
    part = write_atomically(_folder(repository, digest) / f"part-{int(number):05}", call.body)
    return Answer(200, {"ETag": _etag(part)})


def complete(hub: Hub, call: Call, kind: str, id: str, digest: str) -> Answer:
    """Put the parts together; the client names each with the tag it was given."""
    repository = _open_signed(hub, call, kind, id)
    folder, wanted = _folder(repository, digest), call.body.json()
    if repository.lfs_file(digest).exists():
        return Answer.json({}, headers=LFS_JSON)  # a repeated completion: the first one's answer was lost
    parts = [folder / f"part-{each['partNumber']:05}" for each in wanted["parts"]]
    for part, said in zip(parts, wanted["parts"], strict=True):
        if not part.exists() or _etag(part) != said["etag"]:
            raise Refusal(400, f"InvalidPart: {part.name} is not here, or is another")
    _accept(repository, digest, write_atomically(folder / "whole", _pieces(parts)))
    return Answer.json({}, headers=LFS_JSON)


def verify(hub: Hub, call: Call, kind: str, id: str) -> Answer:
    """Whether an object has arrived with the size it should have."""
    repository = open_repository(hub, call, kind, id)
    require_write_token(call.who)
    said = call.body.json()
    file = repository.lfs_file(Path(said["oid"]).name)
    if not file.exists() or file.stat().st_size != said["size"]:
        raise Refusal(404, f"The object {said['oid']} is not here in full")
    return Answer.json({}, headers=LFS_JSON)


def download(hub: Hub, call: Call, kind: str, id: str, digest: str) -> Answer:
    """Give an object, or a range of it, to whoever has a signed address."""
    repository = _open_signed(hub, call, kind, id)
    return Answer(200, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, file=repository.lfs_file(digest))


def _plan(hub: Hub, repository: Repository, digest: str, size: int, parts: bool) -> dict[str, Any]:
    if repository.lfs_file(digest).exists():
        return {"oid": digest, "size": size}
    path = f"/{repository.kind}s/{repository.id}/lfs/{digest}"
    if parts and size > hub.multipart_from:
        header = {"chunk_size": str(hub.part_size)} | {
            f"{number:05}": hub.signed(hub.storage_endpoint, f"{path}/parts/{number}")
            for number in range(1, ceil(size / hub.part_size) + 1)
        }
        completion = f"/api/complete_multipart/{repository.kind}s/{repository.id}/{digest}"
        target: dict[str, Any] = {"href": hub.signed(hub.endpoint, completion), "header": header}
    else:
        target = {"href": hub.signed(hub.storage_endpoint, path)}
    check = {"href": f"{hub.page(repository.kind, repository.id)}.git/info/lfs/objects/verify"}
    return {"oid": digest, "size": size, "authenticated": True, "actions": {"upload": target, "verify": check}}


def _header(planned: dict[str, Any]) -> dict[str, str]:
    header: dict[str, str] = planned.get("actions", {}).get("upload", {}).get("header", {})
    return header


def _open_signed(hub: Hub, call: Call, kind: str, id: str) -> Repository:
    """These addresses need no token, only the signature they were given out with, as a bucket's do."""
    repository = hub.storage.find(kind, id)
    if repository is None or call.query.get("signature") != [hub.signature(call.path)]:
        raise Refusal(403, "SignatureDoesNotMatch: this address was not given out by the Hub")
    return repository


def _folder(repository: Repository, digest: str) -> Path:
    return repository.folder / "uploads" / digest


def _etag(part: Path) -> str:
    return f'"{hashlib.md5(part.read_bytes()).hexdigest()}"'


def _pieces(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece


def _accept(repository: Repository, digest: str, arrived: Path) -> None:
    if sha256_of(arrived) != digest:
        arrived.unlink()
        raise Refusal(400, f"BadDigest: what arrived is not {digest}")
    repository.lfs_file(digest).parent.mkdir(exist_ok=True)
    arrived.rename(repository.lfs_file(digest))
    shutil.rmtree(arrived.parent, ignore_errors=True)
