"""A machine with private files on it, on which commands are watched while they read files of strangers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from forks import Forks
from loopback_hub import Hub

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28")
SHORT = ("--steps", "1", "--batch-size", "8", "--grad-batches", "1", "--bn-batches", "1", "--control", "none")


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    code: int | str
    out: str
    err: str
    forbidden: list[str]

    def assert_refused(self, *words: str) -> None:
        """It said in one line what was wrong, and tried nothing."""
        assert self.forbidden == []
        assert self.code == 1, f"{self.code}: {self.out}\n{self.err}"
        assert "Traceback" not in self.err
        last = self.err.splitlines()[-1]
        assert last.startswith("Error: ")
        for word in words:
            assert word in last, last


@dataclass
class Machine:
    """Folders that commands must leave as they are, and a Hub."""

    root: Path
    hub: Hub

    @property
    def work(self) -> Path:
        return self.root / "work"

    @cached_property
    def forks(self) -> Forks:
        """Where commands run, with the same environment each."""
        return Forks({**self.environment, "PYTHONPATH": str(Path(__file__).parents[1])})

    @cached_property
    def environment(self) -> dict[str, str]:
        places = {"HOME": self.root / "home", "TMPDIR": self.root / "tmp", "HF_HOME": self.root / "cache"}
        places["MPLCONFIGDIR"] = Path(matplotlib.get_cachedir())  # finding all fonts takes its time
        client = self.hub.client(token="hf_ada_write", HF_RETARGET_HUB_PATIENCE="2")
        return {**client.environment, **{name: str(path) for name, path in places.items()}}

    def tree(self) -> dict[str, bytes | str | None]:
        """Everything but the Hub's own cache, with its content."""
        found: dict[str, bytes | str | None] = {}
        for place in ("home", "tmp", "work", "elsewhere"):
            for path in sorted((self.root / place).rglob("*")):
                link = os.readlink(path) if path.is_symlink() else None
                found[str(path)] = link or (path.read_bytes() if path.is_file() else None)
        return found

    def run(self, *commands: tuple[object, ...]) -> list[Done]:
        """Run commands one after the other, each in a process of its own; none may change a file."""
        before = self.tree()
        ports = [server.port for server in self.hub._servers]
        done = [self.forks.run(each, self.work, ports) for each in commands]
        after = self.tree()
        changed = {name for name in {*before, *after} if before.get(name, b"") != after.get(name, b"")}
        assert not changed, f"written, changed or removed: {sorted(changed)}"
        return [Done(each["code"], each["out"], each["err"], each["forbidden"]) for each in done]


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
