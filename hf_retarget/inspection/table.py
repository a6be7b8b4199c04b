"""A permutation graph as text: a table on a terminal, plain aligned columns everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hf_retarget.inspection.roles import Role
from hf_retarget.inspection.summary import GroupSummary, Summary

if TYPE_CHECKING:
    from hf_retarget.graph.verify import Verification

_ROLE_STYLES = {Role.STREAM: "blue", Role.INNER: "yellow", Role.SEGMENT: "green"}
_NUMBERS = frozenset({"size", "times", "axes", "parameters"})
_UNLIMITED = 100_000  # columns: text for grep and files is never wrapped


def print_summary(summary: Summary, file: IO[str], everything: bool = False, check: Verification | None = None) -> None:
    """Print figures, groups and pinned axes to `file`.

    On a terminal, blocks that repeat are folded into the first of them unless `everything`.
    """
    terminal = bool(getattr(file, "isatty", lambda: False)())
    console = (
        Console(file=file, highlight=False) if terminal else Console(file=StringIO(), width=_UNLIMITED, highlight=False)
    )
    with console.capture() as captured:
        _print(summary, console, everything or not terminal, check)
    # Cells are padded to their column; at the end of a line that is only noise.
    file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _print(summary: Summary, console: Console, everything: bool, check: Verification | None) -> None:
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


def _table(console: Console, rows: Sequence[Mapping[str, Text]], columns: Sequence[str], optional: int) -> Table:
    # The last columns are optional: on a terminal that is too narrow they go, and the names stay whole.
    box_style = box.SIMPLE_HEAD if console.is_terminal else None
    for dropped in range(optional + 1):
        table = Table(box=box_style, pad_edge=False, padding=(0, 2 - console.is_terminal, 0, 0), header_style="bold")
        shown = columns[: len(columns) - dropped]
        for column in shown:
            number = column in _NUMBERS
            table.add_column(column.upper(), justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row in rows:
            table.add_row(*(row[column] for column in shown))
        if Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum <= console.width:
            break
    return table


def _figures(summary: Summary, check: Verification | None) -> Table:
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
    runs = () if everything else summary.runs
    times = {name: len(run.blocks) for run in runs for name in run.groups[0]}
    hidden = {name for run in runs for name in run.hidden}
    rows = [_cells(group, times.get(group.name, 1)) for group in summary.groups if group.name not in hidden]
    columns = ["group", "role", "size", "times", "axes", "parameters", "outer", "example axes"]
    if not times:
        columns.remove("times")
    return _table(console, rows, columns, optional=2)


def _cells(group: GroupSummary, times: int) -> dict[str, Text]:
    cells = {
        "group": group.name,
        "role": group.role.value,
        "size": group.size_text,
        "times": f"× {times}" if times > 1 else "",
        "axes": str(len(group.axes)),
        "parameters": f"{group.parameters:,}",
        "outer": group.outer_text or "-",
        "example axes": ", ".join(group.axes[:2]) + (", …" if len(group.axes) > 2 else ""),
    }
    style = _ROLE_STYLES.get(group.role, "magenta")
    return {column: Text(text, style=style) for column, text in cells.items()}


def _pinned(summary: Summary, console: Console) -> Table:
    rows = [
        {
            "pinned": Text(pinned.reason),
            "axes": Text(str(pinned.count)),
            "example": Text(pinned.axes[0]),
            "where": Text(pinned.where or "-"),
        }
        for pinned in summary.pinned
    ]
    return _table(console, rows, ("pinned", "axes", "example", "where"), optional=1)
