"""One repository on disk: content by its hash, commits as lists of files, references, pull requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .files import git_hash, sha256_of, write_atomically
from .lfs_rules import belongs_in_lfs, pointer
from .messages import Refusal

MAIN = "refs/heads/main"


@dataclass(frozen=True)
class Entry:
    """A file in a commit: its git id, its size, and its sha256 if its content is in LFS."""

    oid: str
    size: int
    lfs: str | None = None

    @property
    def digest(self) -> str:
        """What the client compares with its own file: sha256 for LFS, git's id otherwise."""
        return self.lfs or self.oid


@dataclass(frozen=True)
class Commit:
    """A state of the repository and how it came about."""

    oid: str
    parent: str | None
    title: str
    message: str
    author: str
    date: str
    files: Mapping[str, Entry]


def now() -> str:
    """The time as the Hub writes it: `2026-01-31T12:00:00.000000Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Repository:
    """Files, history and settings of one model or dataset; every change is on disk before it is seen."""

    def __init__(self, folder: Path, kind: str, id: str) -> None:
        self.folder, self.kind, self.id = folder, kind, id
        self.lock = threading.RLock()
        self.facts: dict[str, Any] = json.loads((folder / "repository.json").read_text())

    @classmethod
    def create(cls, folder: Path, kind: str, id: str, private: bool, author: str) -> Repository:
        """Make a repository with one commit, as the Hub does: it holds `.gitattributes` and nothing else."""
        facts = {"private": private, "gated": False, "granted": [], "created": now(), "refs": {}, "pulls": []}
        write_atomically(folder / "repository.json", json.dumps(facts).encode())
        repository = cls(folder, kind, id)
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repository.add_commit({".gitattributes": repository.store(attributes)}, "initial commit", author=author)
        return repository

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    @property
    def refs(self) -> dict[str, str]:
        """Full names (`refs/heads/main`, `refs/tags/v1`, `refs/pr/1`) and the commits they stand for."""
        return dict(self.facts["refs"])

    def update(self, **facts: Any) -> None:
        """Change settings or references, all at once."""
        with self.lock:
            changed = self.facts | facts
            write_atomically(self.folder / "repository.json", json.dumps(changed).encode())
            self.facts = changed

    # Content

    def store(self, content: bytes) -> Entry:
        """Keep the content of a small file."""
        entry = Entry(git_hash(content), len(content))
        write_atomically(self.folder / "blobs" / entry.oid, content)
        return entry

    def lfs_file(self, digest: str) -> Path:
        """Where an LFS object is, or will be."""
        return self.folder / "lfs" / digest

    def lfs_entry(self, digest: str) -> Entry:
        """An LFS object that has been uploaded, as a file of a commit."""
        if not self.lfs_file(digest).exists():
            raise Refusal(400, f"LFS pointer points to an object that does not exist: {digest}. Upload it first.")
        size = self.lfs_file(digest).stat().st_size
        return Entry(git_hash(pointer(digest, size)), size, digest)

    def content_of(self, entry: Entry) -> Path:
        """The file that holds an entry's content."""
        return self.lfs_file(entry.lfs) if entry.lfs else self.folder / "blobs" / entry.oid

    # History

    def resolve(self, revision: str) -> Commit:
        """The commit a branch, a tag, a pull request or a hash stands for."""
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        oid = next((self.refs[name] for name in names if name in self.refs), revision)
        file = self.folder / "commits" / f"{oid}.json"
        if "/" in oid or not file.exists():
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        facts = json.loads(file.read_text())
        return Commit(**facts | {"files": {path: Entry(**each) for path, each in facts["files"].items()}})

    def history(self, revision: str = "main") -> Iterator[Commit]:
        """The commits that led to this one, newest first."""
        oid: str | None = revision
        while oid:
            commit = self.resolve(oid)
            yield commit
            oid = commit.parent

    def add_commit(
        self,
        changes: Mapping[str, Entry | None],
        title: str,
        message: str = "",
        *,
        author: str,
        ref: str = MAIN,
        parent: Commit | None = None,
    ) -> Commit:
        """Put a commit on a reference: new entries, and None for what goes. Nobody sees a half of it."""
        with self.lock:
            files = {path: asdict(entry) for path, entry in parent.files.items()} if parent else {}
            for path, entry in changes.items():
                files.pop(path, None)
                files.update({path: asdict(entry)} if entry else {})
            facts: dict[str, Any] = {"parent": parent and parent.oid, "title": title, "message": message}
            facts |= {"author": author, "date": now(), "files": files}
            facts["oid"] = git_hash(json.dumps(facts, sort_keys=True).encode(), "commit")
            write_atomically(self.folder / "commits" / f"{facts['oid']}.json", json.dumps(facts).encode())
            self.update(refs=self.refs | {ref: facts["oid"]})
            return self.resolve(facts["oid"])

    # For tests: without going through a client

    def write(
        self, files: Mapping[str, bytes | Path | None], title: str = "Write files", *, branch: str = "main"
    ) -> Commit:
        """Commit files, by hand: content, a file to copy, or None to delete; a new branch starts at `main`."""
        ref = f"refs/heads/{branch}"
        parent = self.resolve(ref if ref in self.refs else MAIN)
        changes = {path: None if content is None else self._take(path, content) for path, content in files.items()}
        return self.add_commit(changes, title, author=self.namespace, ref=ref, parent=parent)

    def _take(self, path: str, content: bytes | Path) -> Entry:
        content = content.read_bytes() if isinstance(content, Path) else content
        if not belongs_in_lfs(path, len(content), content[:512]):
            return self.store(content)
        file = write_atomically(self.folder / "taken", content)
        digest = sha256_of(file)
        self.lfs_file(digest).parent.mkdir(exist_ok=True)
        file.rename(self.lfs_file(digest))
        return self.lfs_entry(digest)

    def read(self, path: str, revision: str = "main") -> bytes:
        """The content of a file."""
        return self.content_of(self.resolve(revision).files[path]).read_bytes()

    def paths(self, revision: str = "main") -> list[str]:
        """The files of a commit, without `.gitattributes`, sorted."""
        return sorted(path for path in self.resolve(revision).files if path != ".gitattributes")

    def grant(self, *names: str) -> None:
        """Let users into a gated repository."""
        self.update(granted=sorted({*self.facts["granted"], *names}))
