"""Kills commands, lets each of their calls fail, runs two at once, cuts the power, and counts what is lost.

    python tests/reliability/campaign.py                      # all of it: hours
    python tests/reliability/campaign.py --quick              # a sample, as `make test` runs it
    python tests/reliability/campaign.py fail-streamed power  # some campaigns
    python tests/reliability/campaign.py --every 10           # every tenth call only

Each trial is a command on small models in a forked process (Linux, with a C compiler). Nothing may be lost: after a
kill or an error, `--resume` ends in the same bytes as a run that nobody disturbed, in a folder with nothing else in it
and nothing beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from calls import Recorder, Tree, build, fail_at, kill_before, preload, read_states, write_log  # noqa: E402
from forks import Command, warm_up  # noqa: E402
from loopback_hub import Hub  # noqa: E402

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--batch-size", "8", "--device", "cpu", "--quiet")
PORT = (*("--steps", "3", "--grad-batches", "1", "--bn-batches", "1"), *STEPS, "--control", "naive")
TUNE = (*("--steps", "6", "--checkpoint-every", "2", "--record", "3", "--evaluate-every", "3"), *STEPS)
SHORT = ("--steps", "1", "--method", "fgmt", "--grad-batches", "1", "--bn-batches", "1", *STEPS, "--control", "none")


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
        if problem or self.tried % 10 == 0:
            print(f"{self}  {problem or ''}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return f"| {self.name} | {self.tried} | {self.tried - len(self.wrong)} | {len(self.wrong)} |"


class Trial(Command):
    """A command that hangs if it takes longer than it may here."""

    patience = 60.0

    def wait(self, seconds: float = 0.0) -> int | str:
        """The exit code, a negative signal, or "hangs"."""
        return super().wait(max(seconds, self.patience))


class Place:
    """A folder with small models in it, in which commands run."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "work"
        self.work.mkdir(parents=True)
        self._make_models()
        trio = self._sides("src-base", "src-ft", "new-base")
        lms = self._sides("lm/src_base", "lm/src_ft", "lm/new_base")
        streamed = ("--data", "none", "--device", "cpu", "--quiet")
        several = ("--models", str(root / "lm" / "src_ft"), "--models", str(root / "lm" / "other"))
        self.commands: dict[str, list[str]] = {
            "port": ["port", *trio, *DATA, *PORT, "--out", "out"],
            "short": ["port", *trio, *DATA, *SHORT, "--out", "out"],
            "finetune": ["finetune", str(root / "src-base"), *DATA, *TUNE, "--out", "out"],
            "streamed": ["port", *lms, *streamed, "--out", "out"],
            "port-all": ["port-all", *lms[:2], *lms[4:], *several, *streamed, "--out", "out"],
        }
        self.whole: dict[str, dict[str, str]] = {}

    def _sides(self, *folders: str) -> list[str]:
        names = ("--src-base", "--src-ft", "--new-base")
        return [word for name, folder in zip(names, folders, strict=True) for word in (name, str(self.root / folder))]

    def _make_models(self) -> None:
        import timm
        import torch
        from tiny_lm import save_trio

        from hf_retarget.models import load_checkpoint, save_model

        for seed, side in enumerate(("src-base", "src-ft", "new-base")):
            torch.manual_seed(seed)
            net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
            save_model(self.root / side, net.state_dict(), load_checkpoint(net))
        save_trio(self.root / "lm", max_shard_size="20KB")
        shutil.copytree(self.root / "lm" / "src_ft", self.root / "lm" / "other")

    def clear(self) -> None:
        """An empty working folder."""
        shutil.rmtree(self.work)
        self.work.mkdir()

    def start(self, kind: str, *more: str, prepare: Callable[[], object] = lambda: None) -> Command:
        """Start a command in the working folder."""
        return Trial([*self.commands[kind], *more], self.work, prepare)

    def resume(self, kind: str, *more: str) -> Command:
        """The same command again; `port-all` continues by itself."""
        return self.start(kind, *(() if kind == "port-all" else ("--resume",)), *more)

    def reference(self, kind: str) -> dict[str, str]:
        """What a run that nobody disturbs ends in."""
        if kind not in self.whole:
            self.clear()
            command = self.start(kind)
            assert command.wait() == 0, command.printed
            self.whole[kind] = describe(self.work / "out")
            assert self.find_problem(kind) is None
        return self.whole[kind]

    def old(self) -> dict[str, str]:
        """Put an earlier result where the next one goes."""
        shutil.copytree(self.root / "new-base", self.work / "out")
        return describe(self.work / "out")

    def find_half(self, kind: str, old: dict[str, str] | None = None) -> str | None:
        """What is wrong with the folder after a failure: it may be absent, the old one, or the new one."""
        found, whole = describe(self.work / "out"), self.whole[kind]
        if kind == "port-all":  # the same for each of its folders
            parts = {name.partition("/")[0] for name in found if "/" in name and not name.startswith(".")}
            wrong = [part for part in parts if _below(found, part) not in ({}, _below(whole, part))]
            return f"half of {wrong}" if wrong else None
        if found in ({}, whole, old):
            return None
        return f"no whole model: {sorted(found)}"

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


def _below(files: dict[str, str], part: str) -> dict[str, str]:
    return {name: each for name, each in files.items() if name.startswith(f"{part}/")}


def describe(folder: Path) -> dict[str, str]:
    """All files of a finished folder by their hash, but for times and what pictures and pages show of them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            continue
        content = path.read_bytes()
        if path.name in ("port.json", "finetune.json", "port-all.json"):
            try:
                parts = _timeless(json.loads(content))
                found |= {f"{name}: {key}": json.dumps(each, sort_keys=True) for key, each in parts.items()}
                continue
            except ValueError:
                content = b"no JSON"
        untimely = path.parent.name == "figures" or path.suffix in (".html", ".md")
        found[name] = str(len(content) > 0) if untimely else hashlib.sha256(content).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        gone = ("seconds", "memory", "command", "peak_memory", "status")
        return {name: _timeless(each) for name, each in value.items() if name not in gone}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def list_calls(place: Place, kind: str, *more: str) -> list[str]:
    """What a run that nobody disturbs does to files."""
    log = place.root / "calls"
    command = place.start(kind, *more, prepare=write_log(place.work, log).install)
    assert command.wait() == 0, command.printed
    return log.read_text().splitlines()


def kill_everywhere(place: Place, kind: str, every: int, first: int = 1) -> Tally:
    """SIGKILL before every n-th call that writes, then `--resume`."""
    tally = Tally(f"`{kind}`, SIGKILL before every {every}th call, then `--resume`")
    place.reference(kind)
    place.clear()
    total = len(list_calls(place, kind))
    for number in range(first, total + 1, every):
        place.clear()
        killed = place.start(kind, prepare=kill_before(place.work, number).install)
        code = killed.wait()
        resumed = place.resume(kind)
        problem = None
        if code != -signal.SIGKILL:
            problem = f"not killed: {code}"
        elif resumed.wait() != 0:
            problem = f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
        tally.note(f"call {number}: {found}" if (found := problem or place.find_problem(kind)) else None)
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
    old = place.old()
    done = list_calls(place, kind, "--overwrite")
    begin = next(number for number, what in enumerate(done, 1) if "rename .out.work/finished" in what)
    for number in range(begin, len(done) + 1):
        for words, (flags, code) in FOLLOWING.items():
            place.clear()
            place.old()
            place.start(kind, "--overwrite", prepare=kill_before(place.work, number).install).wait()
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
    for kind in ("port", "finetune", "port-all"):
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
                resumed = place.resume(kind)
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


# ---- calls that fail


def fail_everywhere(place: Place, kind: str, every: int | None) -> Tally:
    """A call fails, once or from then on: one line and exit code 1, or a right result; then `--resume`."""
    tally = Tally(f"`{kind}`: {_which(every)} fails, once or from then on, then the same command with `--resume`")
    place.reference(kind)
    place.clear()
    calls = list_calls(place, kind)
    for number, for_ever in _choose(calls, every):
        place.clear()
        failing = place.start(kind, prepare=fail_at(place.work, number, for_ever=for_ever).install)
        problem = judge_end(failing) or place.find_half(kind)
        resumed = place.resume(kind)
        if resumed.wait() != 0:
            problem = problem or f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
        tally.note(_about(calls[number - 1], number, for_ever, problem or place.find_problem(kind)))
    return tally


def fail_recovery(place: Place, kind: str, every: int | None) -> Tally:
    """`--overwrite` is killed while the folder is exchanged, and in the run after it a call fails; then `--resume`."""
    tally = Tally(
        f"`{kind} --overwrite` killed while the folder is exchanged, then {_which(every)} of `--resume` fails"
    )
    place.reference(kind)
    place.clear()
    old = place.old()
    calls = list_calls(place, kind, "--overwrite")
    begin = next(number for number, what in enumerate(calls, 1) if "rename .out.work/finished" in what)
    flags = ("--resume", "--overwrite")

    def kill(number: int) -> None:
        place.clear()
        place.old()
        place.start(kind, "--overwrite", prepare=kill_before(place.work, number).install).wait()

    points = range(begin, len(calls) + 1)
    for point in points if every is not None else points[len(points) // 2 :: len(points)]:
        kill(point)
        recovering = list_calls(place, kind, *flags)
        for number, for_ever in _choose(recovering, every):
            kill(point)
            failing = place.start(kind, *flags, prepare=fail_at(place.work, number, for_ever=for_ever).install)
            problem = judge_end(failing)
            found = describe(place.work / "out")
            if found not in (old, place.whole[kind], {}):
                problem = problem or f"no whole model: {sorted(found)}"
            resumed = place.start(kind, *flags)
            if resumed.wait() != 0:
                problem = problem or f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
            what = f"killed before {calls[point - 1]}; {recovering[number - 1]}"
            tally.note(_about(what, number, for_ever, problem or place.find_problem(kind)))
    return tally


def judge_end(command: Command) -> str | None:
    """What is wrong with how a command ended whose call failed: it must survive, or end with one line and 1."""
    code, (text, error) = command.wait(), command.printed
    # huggingface_hub's temporary folder, which cannot be removed either when it is forgotten.
    error = re.sub(r"^Exception ignored in.*?(?=^Error: |\Z)", "", error, flags=re.DOTALL | re.MULTILINE)
    # The client tells of errors it survives, in lines of its own.
    told = sum(each.startswith("Error: ") for each in error.splitlines()) or (
        "Look: " in error and " ported, in " in text
    )
    if code not in (0, 1) or "Traceback" in error or (code == 1 and told != 1):
        return f"ends with {code}: {error[-600:]}"
    return None


def _about(what: str, number: int, for_ever: bool, problem: str | None) -> str | None:
    return f"{number} ({what}), {'for ever' if for_ever else 'once'}: {problem}" if problem else None


def _which(every: int | None) -> str:
    return "one call of each kind" if every is None else "each call" if every == 1 else f"every {every}th call"


def _choose(calls: list[str], every: int | None) -> Iterator[tuple[int, bool]]:
    """Which calls fail, and whether all after it do: every n-th in both ways, or the first of each kind in one."""
    if every is not None:
        for number in range(1, len(calls) + 1, every):
            yield from ((number, False), (number, True))
        return
    kinds: dict[str, int] = {}
    for number, what in enumerate(calls, 1):
        kinds.setdefault(what.partition(" ")[0], number)
    for turn, number in enumerate(kinds.values()):
        yield number, turn % 2 == 0


# ---- power cuts


def cut_the_power(place: Place, kind: str, every: int | None, *flags: str) -> Tally:
    """The power goes after every n-th change: the old folder, the new one, or none is left; then `--resume`."""
    words = " ".join((kind, *flags))
    moment = "each step of the exchange" if every is None else _which(every).replace("call", "change")
    tally = Tally(f"`{words}`: power cut after {moment}, then `--resume`")
    whole = place.reference(kind)
    place.clear()
    old = place.old() if flags else {}
    shadow = place.root / "shadow"
    shutil.rmtree(shadow, ignore_errors=True)
    shadow.mkdir()
    command = place.start(kind, *flags, prepare=Recorder(place.work, shadow).install)
    assert command.wait() == 0, command.printed
    states = read_states(shadow)
    seen: list[Tree] = []
    for number, state in enumerate(states, 1):
        last = number == len(states)
        exchange = state["what"] in ("rename .out.work/finished", "rename .out.work/replaced", "rename out")
        if not (last or (exchange if every is None else number % every == 0)):
            continue
        for what in ("least", "most"):
            if (tree := state[what]) in seen:
                continue
            seen.append(tree)
            place.clear()
            build(tree, shadow, place.work)
            problem = place.find_half(kind, old)
            if last and describe(place.work / "out") != whole:
                problem = "it is not there after exit 0"
            resumed = place.resume(kind, *flags)
            if resumed.wait() != 0 or "Traceback" in resumed.printed[1]:
                problem = problem or f"--resume ends with {resumed.code}: {resumed.printed[1][-300:]}"
            problem = problem or place.find_problem(kind)
            tally.note(f"{what} after {number} ({state['what']}): {problem}" if problem else None)
    return tally


# ---- pushes


def fail_push(place: Place, every: int | None) -> Tally:
    """A call of a push fails, also on the network: the repository is whole, empty or absent; then the same again."""
    tally = Tally(f"`push`: {_which(every)} fails, once or from then on, then the same command again")
    source = place.root / "pushed"
    shutil.copytree(place.root / "src-base", source, dirs_exist_ok=True)
    with serve_hub(place.root / "hub") as (endpoint, look):
        prepare = connect(endpoint, place.work)

        def push(name: str, install: Callable[[], object] = lambda: None) -> Command:
            words = ["push", str(source), f"ada/{name}", "--quiet"]
            return Trial(words, place.work, lambda: (prepare(), install()))

        place.clear()
        log = place.root / "calls"
        counted = push("counted", write_log(place.work, log, network=True).install)
        assert counted.wait() == 0, counted.printed
        calls = log.read_text().splitlines()
        wanted = look("ada/counted")
        for number, for_ever in _choose(calls, every):
            place.clear()
            name = f"birds-{number}-{int(for_ever)}"
            failing = push(name, fail_at(place.work, number, for_ever=for_ever, network=True).install)
            problem = judge_end(failing)
            there = look(f"ada/{name}")
            if there not in ([], wanted) or (failing.code == 0 and there != wanted):
                problem = problem or f"exit code {failing.code}, and there are {there}"
            again = push(name)
            if again.wait() != 0 or look(f"ada/{name}") != wanted:
                problem = problem or f"pushed again, it ends with {again.code}: {again.printed[1][-300:]}"
            tally.note(_about(calls[number - 1], number, for_ever, problem))
    return tally


def kill_push(place: Place, every: int) -> Tally:
    """A push is killed before every n-th call, also on the network: the repository is whole, empty or absent."""
    tally = Tally(f"`push`, SIGKILL before {_which(every)}, then the same command again")
    with serve_hub(place.root / "killed") as (endpoint, look):
        prepare = connect(endpoint, place.work)
        words = ["push", str(place.root / "src-base"), "--quiet"]

        def push(name: str, install: Callable[[], object]) -> Command:
            return Trial([*words, f"ada/{name}"], place.work, lambda: (prepare(), install()))

        place.clear()
        log = place.root / "calls"
        counted = push("counted", write_log(place.work, log, network=True).install)
        assert counted.wait() == 0, counted.printed
        calls, wanted = log.read_text().splitlines(), look("ada/counted")
        for number in range(1, len(calls) + 1, every):
            place.clear()
            name = f"killed-{number}"
            killed = push(name, kill_before(place.work, number, network=True).install)
            problem = None if killed.wait() in (-signal.SIGKILL, 0) else f"not killed: {killed.printed}"
            there = look(f"ada/{name}")
            if there not in ([], wanted):
                problem = problem or f"there are {there}"
            again = push(name, lambda: None)
            if again.wait() != 0 or look(f"ada/{name}") != wanted:
                problem = problem or f"pushed again, it ends with {again.code}: {again.printed[1][-300:]}"
            tally.note(f"{calls[number - 1]}: {problem}" if problem else None)
    return tally


@contextmanager
def serve_hub(root: Path) -> Iterator[tuple[str, Callable[[str], list[str]]]]:
    """A loopback Hub in a process of its own, since this one forks; its address, and what is in a repository."""

    def look(name: str) -> list[str]:
        hub = Hub(root)  # one that was open would not see what the other process does
        return hub.repository(name).paths() if hub.has_repository(name) else []

    command = [sys.executable, "-m", "loopback_hub", "--root", str(root)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["PYTHONPATH"] = str(HERE.parent)
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = next(match[1] for line in server.stdout or () if (match := re.search(r"HF_ENDPOINT=(\S+)", line)))
        yield address, look
    finally:
        server.terminate()
        server.wait()


def connect(endpoint: str, work: Path) -> Callable[[], object]:
    """For the child: talk to this Hub as ada, with little patience."""

    def settle() -> None:
        from huggingface_hub import constants

        constants.ENDPOINT = endpoint
        constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH = str(work / "cache"), str(work / "token")
        constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
        os.environ |= {"HF_TOKEN": "hf_ada_write", "HF_RETARGET_HUB_PATIENCE": "1", "NO_PROXY": "127.0.0.1"}
        (work / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"], tempfile.tempdir = str(work / "tmp"), None

    return settle


def list_campaigns(place: Place, *, quick: bool, every: int) -> dict[str, Callable[[], Tally]]:
    """All campaigns by name."""
    chosen = None if quick else every
    found: dict[str, Callable[[], Tally]] = {
        "kill-port": lambda: kill_everywhere(place, "port", 150 if quick else max(9, every)),
        "kill-finetune": lambda: kill_everywhere(place, "finetune", 110 if quick else max(5, every)),
        "kill-streamed": lambda: kill_everywhere(place, "streamed", every),
        "kill-all": lambda: kill_everywhere(place, "port-all", every),
        "kill-push": lambda: kill_push(place, max(5, every)),
        "exchange": lambda: kill_exchange(place),
        "two": lambda: two_at_once(place, (0.5,) if quick else (0.0, 0.5, 1.0, 2.0)),
        "signals": lambda: end_by_signal(place, (0.6,) if quick else (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5)),
    }
    for kind in ("short", "finetune", "streamed", "port-all"):
        found[f"fail-{kind}"] = lambda kind=kind: fail_everywhere(place, kind, chosen)
    found["fail-push"] = lambda: fail_push(place, chosen)
    found["recovery"] = lambda: fail_recovery(place, "streamed", chosen)
    for kind in ("short", "finetune", "streamed", "port-all"):
        for flags in ((), ("--overwrite",)) if kind != "port-all" else ((),):
            name = f"power-{kind}{'-over' if flags else ''}"
            found[name] = lambda kind=kind, flags=flags: cut_the_power(place, kind, chosen, *flags)
    if quick:
        for name in (
            *("kill-port", "kill-streamed", "kill-all", "kill-push", "exchange"),
            "fail-short",
            *(f"power-{each}" for each in ("short", "short-over", "finetune-over", "port-all")),
        ):
            del found[name]
    return found


def main() -> bool:
    """Run the campaigns that were asked for; whether anything was lost."""
    parser = argparse.ArgumentParser(description="Kill, fail, cut, and count what is lost.")
    parser.add_argument("names", nargs="*", help="campaigns, or the beginnings of their names; all if not given")
    parser.add_argument("--quick", action="store_true", help="a sample")
    parser.add_argument("--every", type=int, default=1, help="every n-th call only")
    parser.add_argument("--patience", type=float, default=60, help="seconds until a command counts as hanging")
    chosen = parser.parse_args()
    Trial.patience = chosen.patience
    with tempfile.TemporaryDirectory() as folder:
        if "LD_PRELOAD" not in os.environ:  # this process, too, must start with the library
            command = [sys.executable, *sys.argv]
            return subprocess.run(command, env=preload(Path(folder)), check=False).returncode != 0
        from huggingface_hub import constants

        warm_up()
        os.environ["HF_ASSETS_CACHE"] = constants.HF_ASSETS_CACHE = f"{folder}/assets"
        for module in ("porting.port_all", "porting.finetune", "publish.push", "report.report"):
            importlib.import_module(f"hf_retarget.{module}")
        place = Place(Path(folder).resolve() / "place")
        campaigns = list_campaigns(place, quick=chosen.quick, every=chosen.every)
        names = [name for name in campaigns if not chosen.names or name.startswith(tuple(chosen.names))]
        tallies = []
        print("| campaign | tried | held | lost or wrong |\n|---|---:|---:|---:|", flush=True)
        for name in names:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            began, before = time.monotonic(), used.ru_utime + used.ru_stime
            tallies.append(campaigns[name]())
            print(tallies[-1], flush=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = (
                f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime - before:.0f} s of them computing"
            )
            print(f"{name}: {seconds}", file=sys.stderr, flush=True)
    return any(tally.wrong for tally in tallies)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    sys.exit(main())
