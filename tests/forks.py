"""Runs commands in forked processes: torch is imported once, and nothing is shared afterwards.

    python forks.py

runs commands under watch: one case a line on stdin, one result a line on stdout. A case is {"arguments": [...],
"folder": cwd, "ports": [...]}. A result has the exit code, what was printed, and what the command tried although it
must not: connections (but to the ports that are allowed), processes, unpickling. A command may take only so much
memory, and so much of the processor's time: others may be working on this machine.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_WITHIN = 60.0  # seconds for one command
_MEMORY = 3 << 30  # bytes that it may ask for, where that is limited


@dataclass
class Command:
    """A command that runs in a child process; `prepare` is called there before it begins."""

    arguments: list[str]
    folder: Path
    prepare: Callable[[], object] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self.code: int | str | None = None
        self.process = os.fork()
        if self.process == 0:
            self._become()

    def wait(self, seconds: float = _WITHIN) -> int | str:
        """The exit code, a negative signal, or "hangs"."""
        until = time.monotonic() + seconds
        while self.code is None:
            found, status = os.waitpid(self.process, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                self.send(signal.SIGKILL)
                os.waitpid(self.process, 0)
                self.code = "hangs"
            else:
                time.sleep(0.005)
        return self.code

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process, number)

    @property
    def printed(self) -> tuple[str, str]:
        """What is on stdout and on stderr so far."""
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]

    def _become(self) -> None:
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            for number, file in enumerate(self.files, 1):
                os.dup2(file.fileno(), number)
            tempfile.tempdir = None  # read TMPDIR again
            os.chdir(self.folder)
            sys.argv = ["hf-retarget", *self.arguments]
            from hf_retarget.cli import main

            self.prepare()
            try:
                main(self.arguments)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def forbid(log: int, ports: set[int]) -> None:
    """From here on, note and refuse whatever a file of a stranger might want."""

    def refuse(event: str, what: object) -> None:
        os.write(log, f"{event}: {what!r}\n".encode())
        raise PermissionError(f"{event} is forbidden here: {what!r}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            address = arguments[1]
            if not (isinstance(address, tuple) and address[0] == "127.0.0.1" and address[1] in ports):
                refuse(event, address)
        elif event == "socket.getaddrinfo":
            # `datasets` asks a service of the Hub that has an address of its own.
            if arguments[0] not in ("127.0.0.1", "localhost", "datasets-server.127.0.0.1", None):
                refuse(event, arguments[0])
        elif event in _PROCESSES or event == "pickle.find_class":
            refuse(event, arguments[:2])

    sys.addaudithook(hook)


class Forks:
    """The client's side: a process that is started when it is first needed, and forks for each command."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    @cached_property
    def process(self) -> subprocess.Popen[str]:
        """The process that has imported everything."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, __file__], env=self.environment, text=True, **pipes)

    def run(self, arguments: Iterable[object], folder: Path, ports: Iterable[int], **more: Any) -> dict[str, Any]:
        """Run a command; with `dies`, it is killed after a file of this name was put in place so many times."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        case = {"arguments": list(map(str, arguments)), "folder": str(folder), "ports": list(ports), **more}
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        if "process" in vars(self):
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def warm_up() -> None:
    """Import all that commands import when they run. OMP_NUM_THREADS must be 1: threads do not survive a fork."""
    assert os.environ["OMP_NUM_THREADS"] == "1"  # not torch.set_num_threads(1): it makes a pool that breaks in a child
    import datasets  # noqa: F401
    import matplotlib.font_manager  # noqa: F401  asks a program for the fonts, once
    import timm  # noqa: F401
    import torch
    import torch.export  # noqa: F401
    import transformers  # noqa: F401

    import hf_retarget

    for module in pkgutil.walk_packages(hf_retarget.__path__, "hf_retarget."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def limit() -> None:
    """From here on, memory is refused that is far beyond what small models need, and too much time ends in SIGXCPU."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_WITHIN), int(_WITHIN)))


def die(name: str, times: int) -> None:
    """From here on, be killed after a file of this name was put in place so many times."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "os.rename" and str(arguments[1]).endswith(name):
            seen += 1
            if seen > times:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run_watched(
    case: dict[str, Any], ports: set[int], prepare: Callable[[], object] = lambda: None, seconds: float = _WITHIN
) -> dict[str, Any]:
    """Run one command under watch."""
    with tempfile.TemporaryFile() as log:
        command = Command(case["arguments"], Path(case["folder"]), lambda: (prepare(), forbid(log.fileno(), ports)))
        code = command.wait(seconds)
        log.seek(0)
        out, err = command.printed
        return {"code": code, "out": out, "err": err, "forbidden": log.read().decode().splitlines()}


def _children() -> float:
    """Seconds of the processor that commands have taken."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _prepare(dies: list[Any] | None) -> None:
    limit()
    if dies:
        die(*dies)


def serve() -> None:
    """Run the commands that arrive on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints while it is imported
    warm_up()
    gc.freeze()  # else the first collection in a child copies all that was imported
    for line in sys.stdin:
        case = json.loads(line)
        before = _children()
        result = run_watched(case, set(case["ports"]), partial(_prepare, case.get("dies")), 5 * _WITHIN)
        answers.write(json.dumps({**result, "seconds": _children() - before}) + "\n")
        answers.flush()
    os._exit(0)  # what was imported complains when it is torn down


if __name__ == "__main__":
    serve()
