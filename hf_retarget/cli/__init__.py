"""The command line: parse, call, print. Results go to stdout, progress and errors to stderr.

Heavy imports such as torch and timm wait until a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from hf_retarget import __version__
from hf_retarget.cli.check import check
from hf_retarget.cli.compare import compare
from hf_retarget.cli.convert import convert
from hf_retarget.cli.demo import demo
from hf_retarget.cli.evaluate import evaluate
from hf_retarget.cli.finetune import finetune
from hf_retarget.cli.inspect import inspect
from hf_retarget.cli.options import DEBUG, Terminated, resumable
from hf_retarget.cli.outdated import outdated
from hf_retarget.cli.plane import plane
from hf_retarget.cli.port import port
from hf_retarget.cli.port_all import port_all
from hf_retarget.cli.push import push
from hf_retarget.cli.recipes import recipes
from hf_retarget.errors import RetargetError
from hf_retarget.untrusted import plain

__all__ = ["main"]


class _Commands(click.Group):
    """Turns known errors into one readable line and exit code 1."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run; with several processes, exit without torch's cleanup, which may abort them."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # escape what its encoding lacks
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*arguments, **options)
        except SystemExit as end:
            if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "torch" in sys.modules:
                from hf_retarget.run import leave

                leave(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; show the traceback of a known error only with ``--debug``."""
        try:
            with _ending_on_sigterm(), resumable(advice=""):
                return super().invoke(ctx)
        except (RetargetError, OSError) as error:
            if ctx.meta.get(DEBUG) or isinstance(error, BrokenPipeError):
                raise
            line = " ".join(each.strip() for each in str(error).splitlines())  # libraries write long messages
            raise click.ClickException(plain(line)) from error
        except (MemoryError, RuntimeError) as error:
            lacking = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            if ctx.meta.get(DEBUG) or not lacking:
                raise
            advice = "use smaller batches (--batch-size, --micro-batch) or images, or a machine with more"
            raise click.ClickException(f"there is not enough memory; {advice}") from error


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command like SIGINT; a second one is ignored, since it could only interrupt the cleanup."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: hf-retarget demo"
)
@click.version_option(__version__, message="%(version)s")
def main() -> None:
    """Move a fine-tuning to a new base model of the same architecture, without repeating it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # `datasets` would report what is loaded to a third party


commands = (port, port_all, outdated, check, finetune, evaluate, compare, plane, inspect, convert, push, recipes, demo)
for command in commands:
    main.add_command(command)
