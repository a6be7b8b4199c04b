"""A permutation graph as text: a table on a terminal, plain aligned columns everywhere else."""

from __future__ import annotations

from io import StringIO
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console, OverflowMethod
from rich.table import Table
from rich.text import Text

from hf_retarget.inspect.summary import GroupSummary, Summary

if TYPE_CHECKING:
    from hf_retarget.graph.check import CheckResult

_ROLE_STYLES = {"residual stream": "blue", "inner": "yellow", "concatenated": "green"}
_WIDE = 120  # columns: narrower terminals show no examples
_UNLIMITED = 100_000  # columns: text for grep and files is never wrapped


def print_summary(summary: Summary, file: IO[str], everything: bool = False, check: CheckResult | None = None) -> None:
    """Print figures, groups and pinned axes to `file`.

    On a terminal, blocks that repeat are folded into the first of them unless `everything`.

    Example:
        >>> print_summary(summarise(graph, "test_vit"), sys.stdout)      # doctest: +SKIP
    """
    terminal = bool(getattr(file, "isatty", lambda: False)())
    console = (
        Console(file=file, highlight=False) if terminal else Console(file=StringIO(), width=_UNLIMITED, highlight=False)
    )
    with console.capture() as captured:
        _print(summary, console, everything or not terminal, check)
    # Cells are padded to their column; at the end of a line that is only noise.
    file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _print(summary: Summary, console: Console, everything: bool, check: CheckResult | None) -> None:
    console.print(_figures(summary, check))
    for unknown in summary.unknown_operators:
        console.print(Text(unknown, style="yellow"))
    if summary.groups:
        console.print()
        console.print(_groups(summary, console, everything))
        if not everything:
            for run in summary.runs:
                each = len(run.groups[0])
                text = f"{run}: the same {each} groups in each of {len(run.blocks)} blocks; --all lists them."
                console.print(Text(text, style="dim"))
    if summary.pinned:
        console.print()
        console.print(_pinned(summary, console))


def _table(console: Console, *columns: str) -> Table:
    style = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(box=style, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        number = column in ("axes", "parameters", "size", "times")
        # Names are whole or they are useless; only examples may be cut short.
        overflow: OverflowMethod = "ellipsis" if column == "example axes" else "fold"
        table.add_column(column.upper(), justify="right" if number else "left", overflow=overflow, no_wrap=True)
    return table


def _figures(summary: Summary, check: CheckResult | None) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    rows = [
        ("model", summary.model),
        ("parameters", f"{summary.parameters:,}"),
        ("groups", f"{len(summary.groups)}, of which {summary.per_block} per head or convolution group"),
        ("on a free axis", f"{summary.share_one:.2%} of the parameters"),
        ("on two free axes", f"{summary.share_two:.2%} of the parameters"),
        ("unknown operators", str(len(summary.unknown_operators) or "none")),
    ]
    if check is not None:
        rows.append(("check", check.verdict))
    for name, value in rows:
        style = "" if name != "check" else "green" if check is not None and check.passed else "red"
        table.add_row(Text(name, style="bold"), Text(value, style=style))
    return table


def _groups(summary: Summary, console: Console, everything: bool) -> Table:
    times = {}
    if not everything:
        times = {name: len(run.blocks) for run in summary.runs for name in run.groups[0]}
    hidden = frozenset() if everything else frozenset(name for run in summary.runs for name in run.hidden)
    columns = ["group", "role", "size", "times", "axes", "parameters", "outer", "example axes"]
    if not times:
        columns.remove("times")
    if console.width < _WIDE:
        columns = columns[:-2]
    table = _table(console, *columns)
    for group in summary.groups:
        if group.name not in hidden:
            cells = _cells(group, times.get(group.name, 1))
            style = _ROLE_STYLES.get(group.role.value, "magenta")
            table.add_row(*(Text(cells[column]) for column in columns), style=style if console.is_terminal else "")
    return table


def _cells(group: GroupSummary, times: int) -> dict[str, str]:
    return {
        "group": group.name,
        "role": group.role.value,
        "size": group.size_text,
        "times": f"× {times}" if times > 1 else "",
        "axes": str(len(group.axes)),
        "parameters": f"{group.parameters:,}",
        "outer": group.outer_text or "-",
        "example axes": ", ".join(group.axes[:2]) + (", …" if len(group.axes) > 2 else ""),
    }


def _pinned(summary: Summary, console: Console) -> Table:
    table = _table(console, "pinned", "axes", "example", "where")
    for pinned in summary.pinned:
        table.add_row(*map(Text, (pinned.reason, str(pinned.count), pinned.axes[0], pinned.where or "-")))
    return table
