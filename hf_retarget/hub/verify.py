"""Bytes of the Hub against the hash that the Hub names for them, on download and from the cache.

The client stores a file under its hash (sha256 of large files, git's id of small ones) and never looks again. Here
every file is read once before it is used; one that does not match is dropped, fetched once more, and then refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from hf_retarget.errors import RetargetError
from hf_retarget.files import hash_file

_SHA256, _GIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


def named_hash(path: Path) -> str | None:
    """The hash that the Hub names for a file in the client's cache; None where the cache does not tell.

    Example:
        >>> named_hash(Path("tuned/model.safetensors")) is None
        True
    """
    blob = Path(os.path.realpath(path))
    known = _SHA256.fullmatch(blob.name) or _GIT.fullmatch(blob.name)
    return blob.name if known and blob.parent.name == "blobs" else None


def is_cached(path: Path) -> bool:
    """Whether a file belongs to a snapshot of the client's cache."""
    return path.parent.parent.name == "snapshots"


def is_whole(path: Path) -> bool:
    """Whether a file in the cache has the hash it is stored under; one without such a name counts as whole."""
    expected = named_hash(path)
    if expected is None:
        return True
    return expected == (hash_file(path) if _SHA256.fullmatch(expected) else hash_git(path))


def hash_git(path: Path) -> str:
    """What git calls a file: the sha1 of its length and content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def drop(path: Path) -> None:
    """Remove a damaged file from the cache, so that it is fetched again."""
    Path(os.path.realpath(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def fetch_whole(fetch: Callable[[], Path], what: str) -> Path:
    """Fetch a file that is what the Hub says it is: once more if the first one is damaged."""
    path = fetch()
    if is_whole(path):
        return path
    drop(path)
    try:
        path = fetch()
    except RetargetError as error:
        raise type(error)(f"the cached copy of {what} was damaged and is removed; {error}") from error
    if is_whole(path):
        return path
    drop(path)
    raise RetargetError(f"{what} does not have the hash that the Hub names for it, in two downloads; try again later")
