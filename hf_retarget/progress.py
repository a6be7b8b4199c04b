"""Progress on stderr: bars on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from hf_retarget.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, Task


T = TypeVar("T")

_BEST = "★"  # marks the best row so far
_CELL = 10  # minimum width in characters


class Progress(Protocol):
    """Shows progress. Calls to `track` may be nested: the inner one is part of an item of the outer one."""

    def track(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """Yield the items while showing `doing` and how many are done."""
        yield from items

    def say(self, line: str) -> None:
        """Show a permanent line."""

    def row(self, cells: Mapping[str, str], line: str) -> None:
        """Show a row of a growing table (heading → text), or `line` if there is no terminal."""


class _Silent(Progress):
    def say(self, line: str) -> None:
        pass

    def row(self, cells: Mapping[str, str], line: str) -> None:
        pass


SILENT: Progress = _Silent()
"""Progress that shows nothing."""


@contextmanager
def status(doing: str) -> Iterator[None]:
    """Show `doing` and the elapsed time while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description} …", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(doing, total=None)
        yield


def watch(quiet: bool = False) -> AbstractContextManager[Progress]:
    """Show progress while the block runs; among several processes, only the first does.

    Example:
        >>> with watch(quiet=True) as progress:
        ...     sum(progress.track([1, 2, 3], "adding"))
        6
    """
    return TerminalProgress(quiet=quiet or not is_main_process())


def is_watched() -> bool:
    """Whether stderr is a terminal or this is a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def is_main_process() -> bool:
    """Whether this process prints: the only one, or the first one of torchrun."""
    return os.environ.get("RANK", "0") == "0"


class TerminalProgress:
    """Transient bars, nested ones below each other, and permanent lines.

    Without a terminal there are only the lines; if `quiet`, nothing. In a notebook the bars are tqdm's: those of rich
    would remove the lines when they are cleared.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._headings: tuple[str, ...] = ()
        self._bars: Bars | None = None
        self._in_notebook = not quiet and console is None and _in_notebook()
        if not quiet and (console.is_terminal if console else sys.stderr.isatty()):
            self._bars = _make_bars(console)

    def __enter__(self) -> TerminalProgress:
        """Start the bars."""
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()

    def track(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """Yield the items while showing `doing` and how many are done."""
        if self._in_notebook:
            from tqdm.auto import tqdm

            yield from tqdm(items, plain(doing), total, leave=False)
            return
        if self._bars is None:
            yield from items
            return
        if total is None and isinstance(items, Sized):
            total = len(items)
        is_outermost = not self._bars.live.is_started  # used without `with`, as from Python
        if is_outermost:
            self._bars.start()
        task = self._bars.add_task("  " * len(self._bars.tasks) + plain(doing), total=total)
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)
            if is_outermost:
                self._bars.stop()

    def row(self, cells: Mapping[str, str], line: str) -> None:
        """Show a row of a table above the bars."""
        if self._bars is None:
            self.say(line)
            return
        from rich.text import Text

        headings = tuple(cells)
        rows = [(tuple(cells.values()), "bold" if any(_BEST in each for each in cells.values()) else "")]
        if headings != self._headings:
            self._headings = headings
            rows.insert(0, (tuple(heading.upper() for heading in headings), "dim"))
        for texts, style in rows:
            padded = [plain(text).rjust(max(len(head), _CELL)) for head, text in zip(headings, texts, strict=True)]
            self._bars.console.print(Text("  ".join(padded), style=style), soft_wrap=True)

    def say(self, line: str) -> None:
        """Show a permanent line above the bars."""
        self._headings = ()  # an interrupted table repeats its heading
        if self._bars is not None:
            self._bars.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            click.echo(plain(line), err=True)


def _make_bars(console: Console | None) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _text_column(_describe_rate),
        TimeElapsedColumn(),
        _text_column(_describe_remaining),
        console=console or Console(stderr=True),
        transient=True,
    )


def _text_column(write: Callable[[Task], str]) -> ProgressColumn:
    """A column whose text is a function of the task."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Written(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(write(task), style="dim")

    return Written()


def _describe_rate(task: Task) -> str:
    if not task.speed:
        return ""
    return f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each"


def _describe_remaining(task: Task) -> str:
    if task.time_remaining is None or task.finished:
        return ""
    return f"{timedelta(seconds=int(task.time_remaining))} left"
