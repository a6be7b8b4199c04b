"""What is going on and for how long: bars and lines on stderr, for a person who watches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from hf_retarget.cli.show import echo
from hf_retarget.untrusted import plain

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, Task

    from hf_retarget.run import Progress

T = TypeVar("T")

BEST = "★"
"""What marks a row that is better than all before."""

_CELL = 10  # letters, at least


@contextmanager
def status(doing: str) -> Iterator[None]:
    """Show `doing` and the elapsed time while the block runs; say nothing where nobody watches.

    Example:
        >>> with status("tracing test_vit"):
        ...     pass
    """
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
    """Somebody for long work to tell what it does, while the block runs; of several processes only the first tells.

    Example:
        >>> with watch(quiet=True) as progress:
        ...     sum(progress.track([1, 2, 3], "adding"))
        6
    """
    return TerminalProgress(quiet=quiet or not is_main_process())


def is_main_process() -> bool:
    """Whether this process is the one that prints: the only one, or the first that torchrun started.

    Example:
        >>> is_main_process()
        True
    """
    return os.environ.get("RANK", "0") == "0"


class TerminalProgress:
    """Bars on a terminal, one below the other if they are nested, which vanish when the work is done; and lines that
    stay. Where stderr is no terminal there are only the lines, and if `quiet`, nothing.

    Example:
        >>> with TerminalProgress() as progress:
        ...     steps = list(progress.track(range(3), "matching"))
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._headings: tuple[str, ...] = ()
        self._bars: Bars | None = None
        if not quiet and (console.is_terminal if console else sys.stderr.isatty()):
            self._bars = _make_bars(console)

    def __enter__(self) -> TerminalProgress:
        """Begin to show."""
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bars away, however the block ended."""
        if self._bars is not None:
            self._bars.stop()

    def track(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """Yield the items, and show `doing` and how far it has come."""
        if self._bars is None:
            yield from items
            return
        if total is None and isinstance(items, Sized):
            total = len(items)
        task = self._bars.add_task("  " * len(self._bars.tasks) + plain(doing), total=total)
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)

    def row(self, cells: Mapping[str, str], line: str) -> None:
        """Show one row of a table that grows above the bars."""
        if self._bars is None:
            self.say(line)
            return
        headings = tuple(cells)
        widths = [max(len(heading), _CELL) for heading in headings]
        if headings != self._headings:
            self._headings = headings
            self._print_row([heading.upper() for heading in headings], widths, "dim")
        self._print_row(list(cells.values()), widths, "bold" if any(BEST in each for each in cells.values()) else "")

    def _print_row(self, texts: list[str], widths: list[int], style: str) -> None:
        from rich.text import Text

        line = "  ".join(plain(text).rjust(width) for text, width in zip(texts, widths, strict=True))
        if self._bars is not None:
            self._bars.console.print(Text(line, style=style), soft_wrap=True)

    def say(self, line: str) -> None:
        """Show one line that stays, above the bars."""
        self._headings = ()  # a table that is interrupted begins anew
        if self._bars is not None:
            self._bars.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            echo(line, err=True)


def _make_bars(console: Console | None) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _text_column(describe_rate),
        TimeElapsedColumn(),
        _text_column(_remaining),
        console=console or Console(stderr=True),
        transient=True,
    )


def _text_column(write: Callable[[Task], str]) -> ProgressColumn:
    """A column that a function from a task to text fills in."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Written(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(write(task), style="dim")

    return Written()


def describe_rate(task: Task) -> str:
    """How fast it goes: so many a second, or so many seconds each.

    Example:
        >>> from types import SimpleNamespace
        >>> describe_rate(SimpleNamespace(speed=12.34)), describe_rate(SimpleNamespace(speed=0.2))
        ('12.3/s', '5.0 s each')
    """
    if not task.speed:
        return ""
    return f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each"


def _remaining(task: Task) -> str:
    if task.time_remaining is None or task.finished:
        return ""
    minutes, seconds = divmod(int(task.time_remaining), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"
