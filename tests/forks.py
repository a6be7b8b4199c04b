"""Runs many commands in forked processes, each watched: torch is imported once, and nothing is shared afterwards.

    python forks.py cases.json results.json

A case is {"arguments": [...], "folder": cwd, "environment": {...}, "seconds": limit}. A result has the exit code, what
was printed, and what the command tried although it must not: connections (but to the ports that are allowed),
processes, unpickling.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_WITHIN = 60.0  # seconds for one command


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


def run_forked(case: dict[str, Any], ports: set[int]) -> dict[str, Any]:
    """Run one command in a child process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _become(case, out.fileno(), err.fileno(), log.fileno(), ports)
        began, limit = time.monotonic(), case.get("seconds", _WITHIN)
        status = None
        while status is None:
            found, code = os.waitpid(child, os.WNOHANG)
            if found:
                status = os.waitstatus_to_exitcode(code)
            elif time.monotonic() - began > limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                status = "hangs"
            else:
                time.sleep(0.01)
        texts = []
        for file in (out, err, log):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": status, "out": texts[0], "err": texts[1], "forbidden": texts[2].splitlines()}


def _become(case: dict[str, Any], out: int, err: int, log: int, ports: set[int]) -> None:
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(case.get("environment", {}))
        tempfile.tempdir = None  # read TMPDIR again
        os.chdir(case["folder"])
        sys.argv = ["hf-retarget", *case["arguments"]]
        from hf_retarget.cli import main

        forbid(log, ports)
        try:
            main(case["arguments"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_up() -> None:
    """Import all that commands import when they run."""
    import datasets  # noqa: F401
    import timm  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import hf_retarget.cli
    import hf_retarget.pipeline.plane
    import hf_retarget.pipeline.port_all
    import hf_retarget.pipeline.score
    import hf_retarget.pipeline.train  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork


if __name__ == "__main__":
    cases, results = Path(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads(cases.read_text())
    warm_up()
    results.write_text(json.dumps([run_forked(case, set(plan["ports"])) for case in plan["cases"]]))
