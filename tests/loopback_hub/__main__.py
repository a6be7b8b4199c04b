"""A loopback Hub for a developer: `PYTHONPATH=tests python -m loopback_hub --root FOLDER --port 8765`."""

from __future__ import annotations

import argparse
import sys
import threading

from .faults import Fault
from .hub import MEGABYTE, Hub
from .routes import HUB_ROUTES, STORAGE_ROUTES


def parse_fault(text: str) -> Fault:
    """A fault from the command line: `ROUTE=STATUS|cut|lost|SECONDSs[xTIMES]`.

    >>> parse_fault("commit=503x2").times, parse_fault("resolve=1.5s").delay, parse_fault("commit=lost").lose_answer
    (2, 1.5, True)
    """
    route, _, what = text.partition("=")
    what, _, times = what.partition("x")
    count = int(times or 1)
    if what == "cut":
        return Fault(route, cut_answer=0, times=count)
    if what == "lost":
        return Fault(route, lose_answer=True, times=count)
    if what.endswith("s"):
        return Fault(route, delay=float(what[:-1]), times=count)
    return Fault(route, status=int(what), times=count)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the developer wants."""
    parser = argparse.ArgumentParser("python -m loopback_hub", description="A Hugging Face Hub on 127.0.0.1.")
    parser.add_argument("--root", default="loopback-hub", help="where repositories and users are kept")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--user", action="append", metavar="NAME[:ORG,ORG]", help="open an account (default: ada)")
    parser.add_argument("--part-size", type=int, default=16, metavar="MB", help="for uploads in parts")
    parser.add_argument("--multipart-from", type=int, default=64, metavar="MB", help="in parts above this size")
    parser.add_argument("--fault", action="append", default=[], type=parse_fault, metavar="ROUTE=WHAT[xTIMES]")
    parser.add_argument("--routes", action="store_true", help="list the routes that --fault knows, and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Serve until interrupted; every request is a line on standard error."""
    options = parse_arguments(arguments)
    if options.routes:
        for route in HUB_ROUTES + STORAGE_ROUTES:
            sys.stdout.write(f"{route.name:14} {route.methods:9} {route.pattern}\n")
        return
    sizes = {"part_size": options.part_size * MEGABYTE, "multipart_from": options.multipart_from * MEGABYTE}
    with Hub(options.root, options.port, **sizes) as hub:
        for text in options.user or ["ada"]:
            name, _, organisations = text.partition(":")
            user = hub.add_user(name, *filter(None, organisations.split(",")))
            sys.stdout.write(f"# {user.name}: HF_TOKEN={user.token} writes, HF_TOKEN={user.read_token} only reads\n")
        for fault in options.fault:
            hub.inject(fault)
        hub.log.listeners.append(lambda record: sys.stderr.write(record.line() + "\n"))
        sys.stdout.write(f"export HF_ENDPOINT={hub.endpoint} HF_HUB_DISABLE_XET=1 NO_PROXY=127.0.0.1\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.stderr.write("Stopped.\n")


if __name__ == "__main__":
    main()
