"""Files that are there wholly or not at all, and the hashes the Hub knows them by."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> Path:
    """Write a file in pieces; until the last one is in, nothing is at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in (content,) if isinstance(content, bytes) else content:
                file.write(piece)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def git_hash(content: bytes, kind: str = "blob") -> str:
    """The id git gives an object.

    >>> git_hash(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
