"""Kills commands at every point, runs two at once, cuts the power, and counts what is lost.

    python tests/reliability/campaign.py            # all of it, some twenty minutes
    python tests/reliability/campaign.py --quick    # a sample, as `make test` runs it

Each trial is a command on small models in a forked process. Nothing may be lost: after a kill, `--resume` ends in the
same bytes as a run that nobody disturbed, in a folder with nothing else in it and nothing beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from forks import Command, warm_up

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--batch-size", "8", "--device", "cpu", "--quiet")
PORT = (*("--steps", "3", "--grad-batches", "1", "--bn-batches", "1"), *STEPS, "--control", "naive")
TUNE = (*("--steps", "6", "--checkpoint-every", "2", "--record", "3", "--evaluate-every", "3"), *STEPS)


@dataclass
class Tally:
    """How many trials there were, and what went wrong."""

    name: str
    tried: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, problem: str | None) -> None:
        """Count a trial."""
        self.tried += 1
        if problem:
            self.wrong.append(problem)

    def __str__(self) -> str:
        return f"| {self.name} | {self.tried} | {self.tried - len(self.wrong)} | {len(self.wrong)} |"


class Place:
    """A folder with three small models in it, in which commands run."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "work"
        self.work.mkdir(parents=True)
        self._make_models()
        trio = [each for side in ("src-base", "src-ft", "new-base") for each in (f"--{side}", str(root / side))]
        self.commands: dict[str, list[str]] = {
            "port": ["port", *trio, *DATA, *PORT, "--out", "out"],
            "finetune": ["finetune", str(root / "src-base"), *DATA, *TUNE, "--out", "out"],
        }
        self.whole: dict[str, dict[str, str]] = {}

    def _make_models(self) -> None:
        import timm
        import torch

        from hf_retarget.models import load_checkpoint, save_model

        for seed, side in enumerate(("src-base", "src-ft", "new-base")):
            torch.manual_seed(seed)
            net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
            save_model(self.root / side, net.state_dict(), load_checkpoint(net))

    def clear(self) -> None:
        """An empty working folder."""
        shutil.rmtree(self.work)
        self.work.mkdir()

    def start(self, kind: str, *more: str, prepare: Callable[[], object] = lambda: None) -> Command:
        """Start a command in the working folder."""
        return Command([*self.commands[kind], *more], self.work, prepare)

    def reference(self, kind: str) -> dict[str, str]:
        """What a run that nobody disturbs ends in."""
        if kind not in self.whole:
            self.clear()
            command = self.start(kind)
            assert command.wait() == 0, command.printed
            self.whole[kind] = describe(self.work / "out")
            assert self.find_problem(kind) is None
        return self.whole[kind]

    def find_problem(self, kind: str) -> str | None:
        """What is wrong with the finished folder, or beside it."""
        beside = sorted(path.name for path in self.work.iterdir())
        if beside != ["out"]:
            return f"there are {beside}"
        found, wanted = describe(self.work / "out"), self.whole.get(kind)
        if wanted is not None and found != wanted:
            names = sorted({*found, *wanted})
            return f"differs: {[name for name in names if found.get(name) != wanted.get(name)]}"
        return None


def describe(folder: Path) -> dict[str, str]:
    """All files of a finished folder by their hash, but for times and what pictures and pages show of them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            continue
        content = path.read_bytes()
        if name in ("port.json", "finetune.json"):
            content = json.dumps(_timeless(json.loads(content)), sort_keys=True).encode()
        untimely = name.startswith("figures/") or name in ("report.html", "README.md")
        found[name] = "" if untimely else hashlib.sha256(content).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        gone = ("seconds", "memory", "command", "peak_memory")
        return {name: _timeless(each) for name, each in value.items() if name not in gone}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


class Operations:
    """Calls `act` with a number and a description before each operation on files below a folder."""

    def __init__(self, folder: Path, act: Callable[[int, str], None]) -> None:
        self.folder, self.act, self.count = str(folder), act, 0

    def install(self) -> None:
        """From here on, in this process."""
        sys.addaudithook(self._hook)
        sync = os.fsync

        def fsync(handle: int) -> None:
            self._about("fsync", os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        os.fsync = fsync

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._about("open", os.fsdecode(path))
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod"):
            self._about(event, os.fsdecode(arguments[0]))

    def _about(self, what: str, path: str) -> None:
        if os.path.abspath(path).startswith(self.folder):
            self.count += 1
            self.act(self.count, f"{what} {os.path.relpath(path, self.folder)}")


def kill_before(place: Place, number: int) -> Callable[[], None]:
    """For the child: end without a word before operation `number`."""

    def act(count: int, what: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return Operations(place.work, act).install


def list_operations(place: Place, kind: str, *more: str) -> list[str]:
    """What a run that nobody disturbs does to files."""
    log = place.root / "operations"
    log.write_text("")

    def act(count: int, what: str) -> None:
        with log.open("a") as file:  # outside the folder that is watched
            file.write(what + "\n")

    command = place.start(kind, *more, prepare=Operations(place.work, act).install)
    assert command.wait() == 0, command.printed
    return log.read_text().splitlines()


def kill_everywhere(place: Place, kind: str, every: int, first: int = 1) -> Tally:
    """SIGKILL before every n-th operation on files, then `--resume`."""
    tally = Tally(f"`{kind}`, SIGKILL before every {every}th file operation, then `--resume`")
    place.reference(kind)
    place.clear()
    total = len(list_operations(place, kind))
    for number in range(first, total + 1, every):
        place.clear()
        killed = place.start(kind, prepare=kill_before(place, number))
        code = killed.wait()
        resumed = place.start(kind, "--resume")
        problem = None
        if code != -signal.SIGKILL:
            problem = f"not killed: {code}"
        elif resumed.wait() != 0:
            problem = f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
        tally.note(f"operation {number}: {found}" if (found := problem or place.find_problem(kind)) else None)
    return tally


FOLLOWING = {
    "--resume --overwrite": (("--resume", "--overwrite"), 0),
    "--overwrite": (("--overwrite",), 0),
    "--resume": (("--resume",), None),
    "": ((), None),
}


def kill_exchange(place: Place, kind: str = "port") -> Tally:
    """`--overwrite` killed at each point while the folder is exchanged, and four commands after each."""
    tally = Tally(f"`{kind} --overwrite` killed while the folder is exchanged × 4 commands after it")
    whole = place.reference(kind)
    place.clear()
    old = _old_model(place)
    done = list_operations(place, kind, "--overwrite")
    begin = next(number for number, what in enumerate(done, 1) if ".out.work/.finished" in what)
    for number in range(begin, len(done) + 1):
        for words, (flags, code) in FOLLOWING.items():
            place.clear()
            _old_model(place)
            place.start(kind, "--overwrite", prepare=kill_before(place, number)).wait()
            after = place.start(kind, *flags)
            found, now = after.wait(), describe(place.work / "out") if (place.work / "out").is_dir() else {}
            problem = None
            if now not in (whole, old):
                problem = f"no whole model: {sorted(now)}"
            elif found not in (0, 1) or "Traceback" in after.printed[1]:
                problem = f"ends with {found}: {after.printed[1][-300:]}"
            elif code == 0 and (found != 0 or now != whole or place.find_problem(kind)):
                problem = f"ends with {found}, {place.find_problem(kind)}: {after.printed[1][-300:]}"
            tally.note(f"{done[number - 1]}, then '{words}': {problem}" if problem else None)
    return tally


def _old_model(place: Place) -> dict[str, str]:
    shutil.copytree(place.root / "new-base", place.work / "out")
    return describe(place.work / "out")


def two_at_once(place: Place, offsets: Iterable[float]) -> Tally:
    """Two runs into one folder: one ends well, the other at once, with the name of the first."""
    tally = Tally("two runs into one folder at once (`port`, `finetune`; with and without `--overwrite`)")
    for kind in ("port", "finetune"):
        for flags in ((), ("--overwrite",)):
            for offset in offsets:
                place.clear()
                slow = ("--steps", "40") if kind == "port" else ("--steps", "150")
                first = place.start(kind, *slow, *flags)
                time.sleep(offset)
                second = place.start(kind, *slow, *flags)
                codes = sorted(map(str, (first.wait(120), second.wait(120))))
                errors = first.printed[1] + second.printed[1]
                problem = None
                if codes != ["0", "1"]:
                    problem = f"exit codes {codes}: {errors[-300:]}"
                elif "another run is working on" not in errors or "process" not in errors:
                    problem = f"does not say who: {errors[-300:]}"
                elif not (place.work / "out" / "model.safetensors").is_file():
                    problem = "there is no model"
                elif sorted(path.name for path in place.work.iterdir()) != ["out"]:
                    problem = f"there are {sorted(path.name for path in place.work.iterdir())}"
                tally.note(f"{kind} {flags}, {offset} s apart: {problem}" if problem else None)
    return tally


def end_by_signal(place: Place, moments: Iterable[float]) -> Tally:
    """SIGTERM and SIGINT at some moments: 143 and 130, nothing left in the temporary folder, and `--resume` goes on."""
    tally = Tally("SIGTERM and SIGINT at some moments, then `--resume`")
    temporary = place.root / "tmp"
    for kind in ("port", "finetune"):
        place.reference(kind)
        for number, wanted in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            for moment in moments:
                place.clear()
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                set_temporary = lambda: os.environ.update(TMPDIR=str(temporary))  # noqa: E731
                ended = place.start(kind, prepare=set_temporary)
                time.sleep(moment)
                if ended.code is None:
                    ended.send(number)
                code = ended.wait()
                resumed = place.start(kind, "--resume")
                problem = None
                if code not in (wanted, 0):
                    problem = f"exit code {code}: {ended.printed[1][-300:]}"
                elif any(temporary.iterdir()):
                    problem = f"left {list(temporary.iterdir())}"
                elif resumed.wait() != 0:
                    problem = f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
                problem = problem or place.find_problem(kind)
                tally.note(f"{kind}, {number.name} after {moment} s: {problem}" if problem else None)
    return tally


class Disk:
    """What would be on a disk after a power cut: only what was synced. Records every sync of a process."""

    def __init__(self, folder: Path, shadow: Path) -> None:
        self.folder, self.shadow = str(folder), shadow
        shadow.mkdir(exist_ok=True)

    def install(self) -> None:
        """Record syncs in this process: the content of a file, the entries of a folder, each by its inode."""
        sync = os.fsync

        def fsync(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            sync(handle)
            if path.startswith(self.folder):
                inode = os.fstat(handle).st_ino
                if os.path.isdir(path):
                    entries = {each.name: [each.inode(), each.is_dir()] for each in os.scandir(path)}
                    (self.shadow / f"{inode}.json").write_text(json.dumps(entries))
                else:
                    shutil.copyfile(path, self.shadow / f"{inode}.bin")

        os.fsync = fsync

    def replay(self, target: Path) -> None:
        """Build the folder as it is after a power cut."""
        self._folder(os.stat(self.folder).st_ino, target)

    def _folder(self, inode: int, target: Path) -> None:
        target.mkdir()
        entries = self.shadow / f"{inode}.json"
        for name, (number, is_folder) in (json.loads(entries.read_text()) if entries.exists() else {}).items():
            if is_folder:
                self._folder(number, target / name)
            else:
                content = self.shadow / f"{number}.bin"
                (target / name).write_bytes(content.read_bytes() if content.exists() else b"")


def cut_the_power(place: Place) -> Tally:
    """The power goes at the moment of exit 0: what was said to be saved is there, also over an old model."""
    tally = Tally("power cut at the moment of exit 0 (replayed from recorded syncs)")
    for kind in ("port", "finetune"):
        place.reference(kind)
        for flags in ((), ("--overwrite",)):
            place.clear()
            if flags:
                _old_model(place)
            shadow, after = place.root / "shadow", place.root / "after"
            for each in (shadow, after):
                shutil.rmtree(each, ignore_errors=True)
            disk = Disk(place.work, shadow)
            command = place.start(kind, *flags, prepare=disk.install)
            code = command.wait()
            disk.replay(after)
            found = describe(after / "out") if (after / "out").is_dir() else {}
            problem = None if (code, found) == (0, place.whole[kind]) else f"{code}, {sorted(found)}"
            tally.note(f"{kind} {flags}: {problem}" if problem else None)
    return tally


def run(place: Place, *, quick: bool) -> list[Tally]:
    """All campaigns."""
    return [
        kill_everywhere(place, "port", 90 if quick else 9),
        kill_everywhere(place, "finetune", 60 if quick else 5),
        *(() if quick else (kill_exchange(place),)),
        two_at_once(place, (0.5,) if quick else (0.0, 0.5, 1.0, 2.0)),
        end_by_signal(place, (0.6,) if quick else (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5)),
        cut_the_power(place),
    ]


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        tallies = run(Place(Path(folder).resolve() / "place"), quick="--quick" in sys.argv)
    print("| campaign | tried | held | lost or wrong |\n|---|---:|---:|---:|", *tallies, sep="\n")
    for problem in [problem for tally in tallies for problem in tally.wrong]:
        print("-", problem)
    sys.exit(any(tally.wrong for tally in tallies))
