"""Watches the calls of a process that write below a folder or use the network, and lets them fail: see calls.c."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERRORS = (errno.EIO, errno.ENOSPC)
_REPORT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)


def preload(folder: Path) -> dict[str, str]:
    """Compile the library into a folder; the environment of a process that is to be watched."""
    library = folder / "calls.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


class Calls:
    """Counts the calls of this process from `install` on; `answer(number, what)` returns the error of each, or 0."""

    def __init__(
        self,
        folder: Path,
        answer: Callable[[int, str], int] = lambda number, what: 0,
        after: Callable[[str, Path], None] | None = None,
        *,
        network: bool = False,
    ) -> None:
        self.folder, self.answer, self.after, self.network, self.count = folder, answer, after, network, 0
        self._report = _REPORT(self._tell)  # ctypes does not keep it

    def install(self) -> None:
        """From here on, in this process, until it ends."""
        below = os.fsencode(self.folder)
        ctypes.CDLL(None).watch_calls(below, int(self.network), self._report)

    def _tell(self, after: int, call: bytes, path: bytes) -> int:
        try:
            what, where = call.decode(), os.fsdecode(path)
            if not after:
                self.count += 1
                local = what if what == "network" else os.path.relpath(where, self.folder)
                return self.answer(self.count, f"{what} {where if what == 'network' else local}")
            if self.after is not None and what != "network":
                self.after(what, Path(where))
        except BaseException as error:  # ctypes would only print it
            os.write(2, f"the watch failed: {error!r}\n".encode())
            os._exit(99)
        return 0


def kill_before(folder: Path, number: int, *, network: bool = False) -> Calls:
    """End without a word before a call."""

    def answer(count: int, what: str) -> int:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return Calls(folder, answer, network=network)


def fail_at(folder: Path, number: int, *, for_ever: bool, network: bool = False) -> Calls:
    """Let a call fail, and with `for_ever` all after it; disks alternate between errors and having no room."""

    def answer(count: int, what: str) -> int:
        if count < number or (count > number and not for_ever):
            return 0
        return errno.ECONNRESET if what.startswith("network") else ERRORS[number % len(ERRORS)]

    return Calls(folder, answer, network=network)


def write_log(folder: Path, log: Path, *, network: bool = False) -> Calls:
    """Write each call into a file outside the folder."""
    log.write_text("")

    def answer(count: int, what: str) -> int:
        with log.open("a") as file:
            file.write(what + "\n")
        return 0

    return Calls(folder, answer, network=network)


Tree = dict[str, str]
"""Paths below a folder: "/" for a folder, "" for an empty file, else the name of a file's content."""


class Recorder:
    """After each change below a folder: what a power cut would leave of it there, at the least and at the most.

    At the least, folders have the entries they were last synced with. At the most, all of their changes have reached
    the disk. A file has the content it was last synced with, or none.
    """

    def __init__(self, folder: Path, shadow: Path) -> None:
        self.folder, self.shadow = folder, shadow
        self.live: dict[str, tuple[str, bool]] = {}
        self.numbers: dict[int, int] = {}  # how many files have had an inode
        self.synced: dict[str, str] = {}
        self.entries: dict[str, dict[str, tuple[str, bool]]] = {}

    def install(self) -> None:
        """From here on, in this process; what is there already has been synced."""
        self._look()
        for path, (_, is_folder) in {"": ("", True), **self.live}.items():
            self._sync(self.folder / path, is_folder)
        self._calls = Calls(self.folder, after=self._note)
        self._calls.install()

    def _note(self, what: str, path: Path) -> None:
        if what in ("write", "chmod"):
            return
        self._look()
        if what == "fsync":
            self._sync(path, path.is_dir())
        most = {name: "/" if is_folder else self.synced.get(key, "") for name, (key, is_folder) in self.live.items()}
        state = {"what": f"{what} {os.path.relpath(path, self.folder)}", "least": self._least("", ""), "most": most}
        with (self.shadow / "states").open("a") as file:
            file.write(json.dumps(state) + "\n")

    def _look(self) -> None:
        known = {key for key, _ in self.live.values()}
        live = {}
        for where, folders, files in os.walk(self.folder):
            for name in (*folders, *files):
                path = os.path.join(where, name)
                inode = os.lstat(path).st_ino
                if f"{inode}.{self.numbers.get(inode, 0)}" not in known | {key for key, _ in live.values()}:
                    self.numbers[inode] = self.numbers.get(inode, 0) + 1
                live[os.path.relpath(path, self.folder)] = (f"{inode}.{self.numbers[inode]}", name in folders)
        self.live = live

    def _sync(self, path: Path, is_folder: bool) -> None:
        local = os.path.relpath(path, self.folder)
        key = "" if local == "." else self.live[local][0]
        if is_folder:
            inner = {os.path.relpath(self.folder / each, path): found for each, found in self.live.items()}
            self.entries[key] = {
                name: found for name, found in inner.items() if "/" not in name and name not in (".", "..")
            }
        else:
            content = path.read_bytes()
            self.synced[key] = name = hashlib.sha256(content).hexdigest() if content else ""
            if name and not (self.shadow / name).exists():
                (self.shadow / name).write_bytes(content)

    def _least(self, key: str, path: str) -> Tree:
        tree: Tree = {}
        for name, (inner, is_folder) in self.entries.get(key, {}).items():
            place = f"{path}/{name}" if path else name
            tree[place] = "/" if is_folder else self.synced.get(inner, "")
            tree |= self._least(inner, place) if is_folder else {}
        return tree


def read_states(shadow: Path) -> list[dict[str, Any]]:
    """What a recorder has noted: what happened, and the two trees after it."""
    return [json.loads(line) for line in (shadow / "states").read_text().splitlines()]


def build(tree: Tree, shadow: Path, folder: Path) -> None:
    """Make a tree in an empty folder."""
    for name, content in tree.items():
        if content == "/":
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((shadow / content).read_bytes() if content else b"")
