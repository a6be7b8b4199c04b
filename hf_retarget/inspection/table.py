"""A permutation graph as text: a table on a terminal, plain aligned columns everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hf_retarget.inspection.summary import Summary
from hf_retarget.untrusted import plain

if TYPE_CHECKING:
    from hf_retarget.graph.verify import Verification

_FAMILY_STYLES = {"stream": "blue", "inner": "yellow", "segment": "green", "head": "magenta"}
_NUMBERS = frozenset({"size", "times", "axes", "parameters"})
_UNLIMITED = 100_000  # columns: text for grep and files is never wrapped


def print_summary(summary: Summary, file: IO[str], everything: bool = False, check: Verification | None = None) -> None:
    """Print figures, groups and pinned axes to `file`.

    On a terminal, repeated blocks are folded into the first of them unless `everything`.
    """
    terminal = file.isatty()
    width = None if terminal else _UNLIMITED
    console = Console(file=file, force_terminal=terminal, width=width, highlight=False)
    with console.capture() as captured:
        _print(summary, console, everything or not terminal, check)
    # Cells are padded to the width of their column; the blanks at the end of a line are noise.
    file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _print(summary: Summary, console: Console, everything: bool, check: Verification | None) -> None:
    repeats = () if everything else summary.repeats
    console.print(_figures(summary, check))
    for unknown in summary.unknown_operators:
        console.print(_text(unknown, "yellow"))
    if summary.groups:
        console.print()
        console.print(
            _groups(summary, console, {name: len(each.blocks) for each in repeats for name in each.groups[0]})
        )
    for each in repeats:
        same = f"{each}: the same {len(each.groups[0])} groups in each of {len(each.blocks)} blocks; --all lists them."
        console.print(_text(same, "dim"))
    if summary.pinned:
        rows = [
            {"pinned": each.reason, "axes": str(len(each.axes)), "example": each.axes[0], "where": each.where or "-"}
            for each in summary.pinned
        ]
        console.print()
        console.print(_table(console, ("pinned", "axes", "example", "where"), rows, optional=1))


def _figures(summary: Summary, check: Verification | None) -> Table:
    rows = [
        ("model", summary.model, ""),
        ("parameters", f"{summary.parameters:,}", ""),
        ("groups", f"{len(summary.groups)}, of which {summary.per_block} per head or convolution group", ""),
        ("on a free axis", f"{summary.share_on_one_free_axis:.2%} of the parameters", ""),
        ("on two free axes", f"{summary.share_on_two_free_axes:.2%} of the parameters", ""),
        ("unknown operators", str(len(summary.unknown_operators) or "none"), ""),
    ]
    if check is not None:
        rows.append(("check", check.verdict, "green" if check.passed else "red"))
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value, style in rows:
        table.add_row(Text(name, style="bold"), _text(value, style))
    return table


def _groups(summary: Summary, console: Console, times: Mapping[str, int]) -> Table:
    # `times`: the groups that represent those of further blocks, and how many blocks there are.
    hidden = {name for each in summary.repeats if times for name in each.hidden}
    rows = [
        {
            "group": group.name,
            "role": group.role.value,
            "size": group.size_text,
            "times": f"× {times[group.name]}" if group.name in times else "",
            "axes": str(len(group.axes)),
            "parameters": f"{group.parameters:,}",
            "outer": group.outer_text or "-",
            "example axes": ", ".join((*group.axes[:2], *["…"] * (len(group.axes) > 2))),
            "style": _FAMILY_STYLES[group.role.family],
        }
        for group in summary.groups
        if group.name not in hidden
    ]
    columns = ["group", "role", "size", *["times"] * bool(times), "axes", "parameters", "outer", "example axes"]
    return _table(console, columns, rows, optional=2)


def _table(console: Console, columns: Sequence[str], rows: Sequence[Mapping[str, str]], optional: int) -> Table:
    # The last columns are optional: a terminal that is too narrow does without them, so that names stay whole.
    lines = box.SIMPLE_HEAD if console.is_terminal else None
    for dropped in range(optional + 1):
        table = Table(box=lines, pad_edge=False, padding=(0, 2 - console.is_terminal, 0, 0), header_style="bold")
        shown = columns[: len(columns) - dropped]
        for column in shown:
            number = column in _NUMBERS
            table.add_column(column.upper(), justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row in rows:
            table.add_row(*(_text(row[column], row.get("style", "")) for column in shown))
        if Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum <= console.width:
            break
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style)  # not a string, in which rich would look for markup
