"""What goes to the Hub: the files as they are, but for the address in the card, and paths of this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_retarget.errors import PublishError
from hf_retarget.publish.card import address_card
from hf_retarget.publish.contents import CARD
from hf_retarget.publish.destination import Destination
from hf_retarget.publish.paths import shorten_file
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes, read_json

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

TELLING = ("port.json", "finetune.json", "recipe.yaml", "report.html", "plane/plane.json")
"""Files that say where inputs came from."""

_GIT = 40  # hex digits of git's id of a file; a sha256 has 64


def make_operations(files: Mapping[str, Path], destination: Destination) -> dict[str, CommitOperationAdd]:
    """What a commit adds, by path."""
    from huggingface_hub import CommitOperationAdd

    command = _command(files.get("port.json"))

    def content(name: str, path: Path) -> str | bytes:
        if name == CARD:
            try:
                card = read_bytes(path).decode()
            except ValueError as error:
                raise PublishError(f"'{path}' cannot be read: {error}; correct it, and push again") from error
            return address_card(card, destination.repository, destination.revision).encode()
        return _shortened(name, path, command) if name in TELLING else str(path)

    return {name: CommitOperationAdd(name, content(name, path)) for name, path in files.items()}


def is_same(operation: CommitOperationAdd, digest: str | None) -> bool:
    """Whether a file has the hash that the Hub lists: the sha256 of a large file, git's id of a small one.

    Example:
        >>> from huggingface_hub import CommitOperationAdd
        >>> is_same(CommitOperationAdd("empty", b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
        True
    """
    ours = operation.upload_info
    if digest is None or len(digest) != _GIT:
        return digest == ours.sha256.hex()
    with operation.as_file() as file:
        return digest == hashlib.sha1(f"blob {ours.size}\0".encode() + file.read(), usedforsecurity=False).hexdigest()


def _shortened(name: str, path: Path, command: str) -> str | bytes:
    try:
        before = read_bytes(path, MAX_DOCUMENT_BYTES).decode()
    except ValueError:
        return str(path)
    after = shorten_file(name, before, command)
    return str(path) if after == before else after.encode()


def _command(port: Path | None) -> str:
    """The command line that the report shows, too."""
    try:
        return str(read_json(port, MAX_DOCUMENT_BYTES)["command"]) if port else ""
    except (KeyError, TypeError, ValueError):
        return ""
