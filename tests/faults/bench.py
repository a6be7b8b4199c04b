"""Where rows are run: honest models, data and a finished port, an empty folder for each row, a process that forks.

A row is one bad input, the command that meets it and what must happen. Whatever the row, there may be no traceback, no
crash, nothing above a minute or three gigabytes, no connection, no file changed or added beside what the row names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forks import Forks
from loopback_hub import Hub

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
SHORT = ("--steps", "1", "--batch-size", "8", "--grad-batches", "1", "--bn-batches", "1", "--control", "none", "-q")
SIDES = ("--src-base", "--src-ft", "--new-base")

Make = Callable[["Bench", Path], tuple[object, ...]]


@dataclass(frozen=True)
class Row:
    """One bad input: `make` puts it into an empty folder and returns the command to run there.

    `says` are words that the message must have, so that it shows what was understood. With the code 0, they are on
    stdout or stderr, and `leaves` names what is made; `may_change` names what a command may use up.
    A `finding` is what the command was asked for: it is on stdout, and no error.
    """

    area: str
    name: str
    make: Make
    says: tuple[str, ...] = ()
    code: int = 1
    leaves: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    finding: bool = False

    @property
    def id(self) -> str:
        """For the names of tests and folders."""
        return f"{self.area}-{self.name}".replace("/", "_").replace(" ", "-")


class Bench:
    """Honest files, a Hub, and the process that runs commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for place in ("home", "tmp", "rows", "honest"):
            (root / place).mkdir(parents=True)
        self.hub = Hub(root / "hub").start()
        self.hub.add_user("ada")
        environment = self.hub.client(token="hf_ada_write", HF_RETARGET_HUB_PATIENCE="5").environment
        environment |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "HF_HOME": str(root / "cache")}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(root / "cache" / "inductor")  # else below TMPDIR
        environment["MPLCONFIGDIR"] = str(root / "cache" / "matplotlib")
        self.forks = Forks(environment)

    def close(self) -> None:
        """End the processes."""
        self.forks.close()
        self.hub.stop()

    # ---- honest files

    def _save(self, name: str, seed: int, *, moved: Path | None = None, **options: Any) -> Path:
        import timm
        import torch

        from hf_retarget.models import load_checkpoint, save_model

        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", **{"num_classes": 10, "in_chans": 1, **options})
        if moved is not None:  # a fine-tuning, or an update
            weights = load_checkpoint(moved).weights
            net.load_state_dict({key: weights[key] for key in net.state_dict()})
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
        return save_model(self.root / "honest" / name, net.state_dict(), load_checkpoint(net))

    @cached_property
    def model(self) -> Path:
        """The old base: a small ResNet for grey images of ten classes."""
        return self._save("model", 0)

    @cached_property
    def tuned(self) -> Path:
        """A fine-tuning of it."""
        return self._save("tuned", 1, moved=self.model)

    @cached_property
    def new(self) -> Path:
        """An update of it."""
        return self._save("new", 2, moved=self.model)

    @cached_property
    def ported(self) -> Path:
        """A finished port, with a permutation and its graph."""
        folder = self.root / "honest"
        done = self.run(("port", *self.trio(), *DATA, *SHORT, "--method", "fgmt", "--out", "ported"), folder)
        assert done["code"] == 0, done["err"]
        return folder / "ported"

    def trio(self, **instead: Path | str) -> tuple[object, ...]:
        """The options that name three models, honest ones but for `base`, `tuned` or `new`."""
        found = {"base": self.model, "tuned": self.tuned, "new": self.new, **instead}
        return tuple(each for pair in zip(SIDES, found.values(), strict=True) for each in pair)

    # ---- running

    def run(self, arguments: tuple[object, ...], folder: Path, **more: Any) -> dict[str, Any]:
        """Run a command in a forked process: exit code, stdout, stderr, and what it tried although it must not.

        With `dies`, it is killed after a file of this name was put in place so many times.
        """
        return self.forks.run(arguments, folder, [server.port for server in self.hub._servers], **more)

    def find_problem(self, row: Row) -> str | None:
        """Run a row; what is wrong with what happened, if anything."""
        folder = self.root / "rows" / hashlib.sha256(row.id.encode()).hexdigest()[:12]
        folder.mkdir()
        try:
            arguments = row.make(self, folder)
            before = self._describe(folder)
            done = self.run(arguments, folder)
            after = self._describe(folder)
            self.last = done
            return _judge(row, done) or _compare(row, before, after)
        finally:
            shutil.rmtree(folder)

    def _describe(self, folder: Path) -> dict[str, Any]:
        """All files of the row, and of the places where a command might leave something."""
        found: dict[str, Any] = {}
        for place in (folder, self.root / "home", self.root / "tmp"):
            for parent, folders, files in os.walk(place):
                for name in (*folders, *files):
                    path = Path(parent, name)
                    about = path.lstat()
                    found[str(path.relative_to(place))] = (about.st_mode, about.st_size, about.st_mtime_ns)
        for name, about in found.items():
            if about[0] & 0o040000:
                found[name] = about[0]  # a folder's size and time change with what is in it
        return found


def _judge(row: Row, done: dict[str, Any]) -> str | None:
    lines = done["err"].splitlines()
    told = f"{row.id}: exit code {done['code']}\n{done['out'][-1500:]}\n{done['err'][-3000:]}"
    if done["code"] in ("hangs", -signal.SIGXCPU):
        return f"hangs: {told}"
    if "Traceback (most recent call last)" in done["err"] + done["out"]:
        return f"traceback: {told}"
    if done["forbidden"]:
        return f"tried {done['forbidden']}: {told}"
    if done["code"] != row.code:
        return f"should have ended with {row.code}: {told}"
    if row.code == 0 or row.finding:
        said = done["out"] + done["err"]
    else:
        said = lines[-1] if lines else ""
        if not said.startswith("Error: ") and row.says:
            return f"the last line is no error: {told}"
    missing = [word for word in row.says if word not in said]
    return f"does not say {missing}: {told}" if missing else None


def _compare(row: Row, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    others = [name for name in changed if Path(name).parts[0] not in (*row.leaves, *row.may_change)]
    if others:
        return f"{row.id}: written, changed or removed: {others}"
    absent = [name for name in row.leaves if name not in after]
    if absent:
        return f"{row.id}: {absent} not made"
    stray = [name for name in changed if (name in after and name.endswith(".tmp")) or Path(name).name.startswith(".")]
    stray = [name for name in stray if Path(name).parts[0] not in row.may_change]
    return f"{row.id}: left {stray}" if stray else None


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file; what `change` returns is the new content, unless it is nothing."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))
