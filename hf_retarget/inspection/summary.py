"""A summary of a permutation graph, as values, JSON and text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hf_retarget.inspection.roles import Repeat, Role, repeated_blocks, roles
from hf_retarget.untrusted import plain

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph
    from hf_retarget.graph.verify import Verification

_FORMAT = "hf-retarget/inspect/1"
_STYLES = {"stream": "blue", "inner": "yellow", "segment": "green", "head": "magenta"}
"""Terminal styles of the families of roles."""
_NUMBERS = frozenset({"size", "times", "axes", "parameters"})
_UNLIMITED = 100_000  # columns: text that is not for a terminal is never wrapped


@dataclass(frozen=True)
class GroupSummary:
    """One group: its role, size, axes, and the number of parameters it permutes."""

    name: str
    role: Role
    size: int
    blocks: tuple[int, ...]
    outer: tuple[str | None, ...]
    axes: tuple[str, ...]
    parameters: int

    @property
    def size_text(self) -> str:
        """The size for display: ``192``, or ``3 × 64`` for three heads of 64."""
        return " × ".join(map(str, (*self.blocks, self.size)))

    @property
    def outer_text(self) -> str:
        """The groups that permute the blocks; 'pinned' if their order is fixed."""
        return ", ".join("pinned" if name is None else name for name in self.outer)


@dataclass(frozen=True)
class PinnedSummary:
    """All axes pinned for one reason, and the location of the first of them."""

    reason: str
    axes: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Summary:
    """A summary of one permutation graph."""

    model: str
    fingerprint: str
    tensors: int
    parameters: int
    share_on_one_free_axis: float
    share_on_two_free_axes: float
    groups: tuple[GroupSummary, ...]
    pinned: tuple[PinnedSummary, ...]
    unknown_operators: tuple[str, ...]
    tied: Mapping[str, str]
    repeats: tuple[Repeat, ...]

    @property
    def per_block(self) -> int:
        """Number of groups with one permutation per head or convolution group."""
        return sum(group.role.is_per_block for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        document = {"format": _FORMAT} | asdict(self)
        del document["repeats"]
        return document


def summarise(graph: PermutationGraph, model: str) -> Summary:
    """Summarise a graph; `model` is the name to display."""
    role_of = roles(graph)
    permutes: Counter[str] = Counter()
    for name in graph.parameters:
        for block in graph.layouts[name].blocks:
            elements = math.prod(factor.size for factor in block.factors)
            for group in {factor.group for factor in block.factors if factor.group is not None}:
                permutes[group] += elements
    groups = (
        GroupSummary(
            each.name,
            role_of[each.name],
            each.size,
            each.blocks,
            each.outer,
            tuple(map(str, each.axes)),
            permutes[each.name],
        )
        for each in graph.groups
    )
    pinned = []
    for reason in dict.fromkeys(each.reason for each in graph.pinned):
        alike = [each for each in graph.pinned if each.reason == reason]
        pinned.append(PinnedSummary(reason, tuple(dict.fromkeys(str(each.axis) for each in alike)), alike[0].where))
    return Summary(
        model=model,
        fingerprint=graph.fingerprint,
        tensors=len(graph.layouts),
        parameters=sum(math.prod(graph.layouts[name].shape) for name in graph.parameters),
        share_on_one_free_axis=graph.share(1),
        share_on_two_free_axes=graph.share(2),
        groups=tuple(groups),
        pinned=tuple(sorted(pinned, key=lambda each: -len(each.axes))),
        unknown_operators=tuple(dict.fromkeys(map(str, graph.unknown_operators))),
        tied=dict(graph.tied),
        repeats=repeated_blocks(graph),
    )


# ---- as text


def print_summary(summary: Summary, file: IO[str], everything: bool = False, check: Verification | None = None) -> None:
    """Print figures, groups and pinned axes to `file`.

    On a terminal, repeated blocks are folded into the first of them unless `everything`.
    """
    terminal = file.isatty()
    console = Console(file=file, force_terminal=terminal, width=None if terminal else _UNLIMITED, highlight=False)
    repeats = summary.repeats if terminal and not everything else ()
    with console.capture() as captured:
        console.print(_list_figures(summary, check))
        for unknown in summary.unknown_operators:
            console.print(_text(unknown, "yellow"))
        if summary.groups:
            console.print()
            console.print(_list_groups(summary, repeats, console))
        for each in repeats:
            count = f"the same {len(each.groups[0])} groups in each of {len(each.blocks)} blocks"
            console.print(_text(f"{each}: {count}; --all lists them.", "dim"))
        if summary.pinned:
            console.print()
            rows = [
                {
                    "pinned": each.reason,
                    "axes": str(len(each.axes)),
                    "example": each.axes[0],
                    "where": each.where or "-",
                }
                for each in summary.pinned
            ]
            console.print(_make_table(rows, [""] * len(rows), console, optional=1))
    # Remove the padding of cells at the end of lines.
    file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _list_figures(summary: Summary, check: Verification | None) -> Table:
    figures = {
        "model": summary.model,
        "parameters": f"{summary.parameters:,}",
        "groups": f"{len(summary.groups)}, of which {summary.per_block} per head or convolution group",
        "on a free axis": f"{summary.share_on_one_free_axis:.2%} of the parameters",
        "on two free axes": f"{summary.share_on_two_free_axes:.2%} of the parameters",
        "unknown operators": str(len(summary.unknown_operators) or "none"),
    }
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in figures.items():
        table.add_row(Text(name, style="bold"), _text(value))
    if check is not None:
        table.add_row(Text("check", style="bold"), _text(check.verdict, "green" if check.passed else "red"))
    return table


def _list_groups(summary: Summary, repeats: Sequence[Repeat], console: Console) -> Table:
    times = {name: len(each.blocks) for each in repeats for name in each.groups[0]}
    hidden = {name for each in repeats for name in each.hidden}
    rows = [
        {
            "group": group.name,
            "role": group.role.value,
            "size": group.size_text,
            **({"times": f"× {times[group.name]}" if group.name in times else ""} if times else {}),
            "axes": str(len(group.axes)),
            "parameters": f"{group.parameters:,}",
            "outer": group.outer_text or "-",
            "example axes": ", ".join((*group.axes[:2], *["…"] * (len(group.axes) > 2))),
        }
        for group in summary.groups
        if group.name not in hidden
    ]
    styles = [_STYLES[group.role.family] for group in summary.groups if group.name not in hidden]
    return _make_table(rows, styles, console, optional=2)


def _make_table(rows: Sequence[Mapping[str, str]], styles: Sequence[str], console: Console, optional: int) -> Table:
    # On narrow terminals, the last columns are dropped so that names stay whole.
    lines, gap = (box.SIMPLE_HEAD, 1) if console.is_terminal else (None, 2)
    for dropped in range(optional + 1):
        table = Table(box=lines, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        shown = list(rows[0])[: len(rows[0]) - dropped]
        for column in shown:
            number = column in _NUMBERS
            table.add_column(column.upper(), justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row, style in zip(rows, styles, strict=True):
            table.add_row(*(_text(row[column], style) for column in shown))
        if Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum <= console.width:
            break
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style)  # not a string, in which rich would interpret markup
