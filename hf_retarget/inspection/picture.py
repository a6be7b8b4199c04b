"""Pictures (SVG) and pages (HTML) of a permutation graph: modules are rows, groups are lanes, as in a git graph."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from hf_retarget.inspection.roles import Flow, PinnedSide, Role, flows, join, repeated_blocks, roles
from hf_retarget.inspection.summary import summarise
from hf_retarget.report.page import render

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph
    from hf_retarget.graph.verify import Verification

_MANY_ROWS = 150
_SHADES = 4  # of each family of roles in the palette
# Tensors shown with their module; others, such as `pos_embed`, get their own row.
_ORDINARY = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
_INDEX = re.compile(r"(?:^|(?<=\.))[A-Za-z_]*\d+\.")
_LETTER, _SMALL_LETTER = 7.25, 6.4  # upper bounds of the widths of letters in the monospaced fonts
_LEFT = 18  # x position of pinned inputs
_GAINS = (0.1, 0.25, 0.5)
_INTRODUCTION = (
    "Each line is a group: neurons that may be permuted together without changing what the model computes.",
    "Rows are the modules of the model, from its input at the top to its output at the bottom.",
)
_LEGEND = {  # role: style of its lines, and their meaning
    Role.STREAM: ("stream", "residual stream: one order, shared by all modules that write or read it"),
    Role.INNER: ("inner", "inner group: neurons between two layers, in any order"),
    Role.SEGMENT: (
        "segment",
        "concatenated group: read by later layers side by side with others, in any order",
    ),
    Role.PER_HEAD: (
        "bundle",
        "attention heads: heads may be permuted (bracket), and the neurons within each head (strands)",
    ),
    Role.PER_CONV_GROUP: (
        "bundle",
        "grouped convolution: groups may be permuted (bracket), and the channels within each group (strands)",
    ),
}
_LEAD = "a weight reads the group at the ring and writes the group at the dot; small dots: norms, biases, tables"
_REASONS = {
    "input": "the model's input comes in this order",
    "output": "the model's output must keep its order",
    "spatial": "positions in space, time or a kernel",
    "constant": "a constant outside the state dict fixes the order",
    "unknown operator": "an operator without a rule, which may depend on the order",
    "misaligned": "two axes with parts that do not align",
    "order": "an operator whose result depends on the order",
    "unused": "no operator uses it",
}


# ---- the picture and the page


def draw_picture(graph: PermutationGraph, model: str, everything: bool = False) -> str:
    """Draw the picture as a standalone SVG, with title and legend."""
    return render("graph.svg", alone=True, **_values(graph, model, everything)) + "\n"


def draw_fit(graph: PermutationGraph, model: str, gains: Mapping[str, float], notes: Mapping[str, str]) -> str:
    """Draw the picture for embedding in a page, with groups coloured by their gains, and a note on each.

    Gains lie between 0 and 1; groups without a gain are gray.
    """
    values = _values(graph, model, notes=notes)
    values["paint"] = {group.name: gain_colour(gains.get(group.name)) for group in graph.groups}
    return render("graph.svg", alone=False, **values)


def draw_page(graph: PermutationGraph, model: str, everything: bool = False, check: Verification | None = None) -> str:
    """Render a page with figures, picture, groups and pinned axes."""
    values = _values(graph, model, everything)
    title = f"{model}: permutation graph"
    return render("graph.html", alone=False, title=title, check=check, meanings=_REASONS, **values)


def gain_colour(gain: float | None) -> str:
    """The name of the colour of a gain between 0 and 1, in four steps; `gain0` for none.

    Example:
        >>> gain_colour(None), gain_colour(0.05), gain_colour(0.9)
        ('gain0', 'gain1', 'gain4')
    """
    return f"gain{0 if gain is None else 1 + sum(gain >= limit for limit in _GAINS)}"


def _legend(plan: Sketch) -> list[tuple[str, str]]:
    """The kinds of lines and marks in the picture, with their meanings."""
    present = {lane.role for lane in plan.lanes}
    pinned = {pin.reason for row in plan.rows for pin in row.flow.pins}
    entries = [entry for role, entry in _LEGEND.items() if role in present] + [("lead", _LEAD)]
    if pinned:
        red = "; red: for another reason, such as an operator without a rule" if pinned - {"input", "output"} else ""
        entries.append(("pin", f"pinned: the order matters and stays fixed (input, output{red})"))
    return entries


def _values(
    graph: PermutationGraph, model: str, everything: bool = False, notes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values for the templates, with all coordinates."""
    plan, summary = sketch(graph, everything), summarise(graph, model)
    numbers = {group.name: number for number, group in enumerate(summary.groups)}
    paint = {group.name: f"{group.role.family}0" for group in summary.groups}
    tips = {lane.group.name: f"{lane.group}: {lane.role.value}, {len(lane.group.axes)} axes" for lane in plan.lanes}
    tips |= {name: f"{tips[name]}\n{note}" for name, note in (notes or {}).items() if name in tips}
    at = _columns(plan)
    return {
        "plan": plan,
        "summary": summary,
        "at": at,
        "introduction": _INTRODUCTION,
        "legend": _legend(plan),
        "bands": _bands(plan),
        "leads": _leads(plan, at["pinned"]),
        "marks": {lane.group.name: _marks(lane, plan) for lane in plan.lanes},
        "chips": _chips(plan, at["chip"], tips),
        "numbers": numbers,
        "moves": {row.name: " ".join(str(numbers[name]) for name in row.flow.groups) for row in plan.rows},
        "paint": paint | {lane.group.name: lane.colour for lane in plan.lanes},
        "tips": tips,
    }


def _columns(plan: Sketch) -> dict[str, int]:
    # The x positions of columns, from left to right, and the total size.
    shown = [(row, _LETTER if row.major else _SMALL_LETTER) for row in plan.rows if not row.folded]
    pinned = max((lane.x for lane in plan.lanes), default=50) + 28
    name = pinned + 26
    size = name + 18 + round(max((len(row.name) * letter for row, letter in shown), default=60))
    chip = size + 18 + round(max((len(row.size) * letter for row, letter in shown), default=40))
    height = sum(row.height for row in plan.rows) + 18
    return {"pinned": pinned, "name": name, "size": size, "chip": chip, "width": max(chip + 330, 860), "height": height}


def _bands(plan: Sketch) -> list[tuple[int, int]]:
    # Every other block has a tinted background: (upper edge, height).
    blocks = [list(rows) for block, rows in groupby(plan.rows, key=lambda row: row.block) if block]
    return [(rows[0].y - rows[0].height // 2, sum(row.height for row in rows)) for rows in blocks[::2]]


def _leads(plan: Sketch, pinned: int) -> list[tuple[Any, ...]]:
    # Connections from what a module reads to what it writes: (row, left end, right end, nearest target, direction of
    # the arrow (1: from the left, -1: from the right), pins at the ends).
    place: dict[str | PinnedSide, int] = {lane.group.name: lane.x for lane in plan.lanes}
    leads = []
    for row in (each for each in plan.rows if each.flow.leads):
        reads = [place.get(each, _LEFT) for each in row.flow.reads]
        writes = [place.get(each, pinned) for each in row.flow.writes]
        source, sink = min(product(reads, writes), key=lambda pair: (pair[0] == pair[1], abs(pair[0] - pair[1])))
        direction = (sink > source) - (sink < source)
        pins = []
        for x, side in ((_LEFT, row.flow.reads), (pinned, row.flow.writes)):
            if here := [each for each in side if isinstance(each, PinnedSide)]:
                kind = "pin" if all(pin.reason in ("input", "output") for pin in here) else "pin warn"
                pins.append((x, "; ".join(f"pinned ({pin.reason}): {pin.size}" for pin in here), kind))
        leads.append((row, min(reads + writes), max(reads + writes), sink, direction, pins))
    return leads


def _marks(lane: Lane, plan: Sketch) -> list[tuple[Row, str, float, float]]:
    # Marks where modules read, write or touch a group: (row, verb, radii of an ellipse).
    marks = []
    for row in plan.rows[lane.first : lane.last + 1]:
        reads, writes = lane.group.name in row.flow.reads, lane.group.name in row.flow.writes
        if reads or writes:
            verb = "reads and writes" if reads and writes else "reads" if reads else "writes"
            radii = {"stream": (6.2, 6.2), "strands": (6.0, 3.4)}.get(lane.shape, (4.8, 4.8))
            marks.append((row, verb, *radii))
        elif lane.group.name in row.flow.touches:
            marks.append((row, "touches", *((5.2, 1.6) if lane.shape == "strands" else (3.4, 3.4))))
    return marks


def _chips(plan: Sketch, left: int, tips: Mapping[str, str]) -> list[tuple[int, int, int, str, str, str | None]]:
    # Labels of groups where they begin, and of pinned sides: (x, y, width, words, tip, group).
    chips = []
    lanes = sorted(plan.lanes, key=lambda lane: lane.column)
    for number, row in enumerate(plan.rows):
        named = [(lane.words, tips[lane.group.name], lane.group.name) for lane in lanes if lane.first == number]
        pinned = [
            (f"pinned: {pin.reason} {pin.size}", f"the order of these {pin.size} stays", None) for pin in row.flow.pins
        ]
        x = left
        for words, tip, group in (*named, *pinned):
            width = round(len(words) * _SMALL_LETTER) + 12
            chips.append((x, row.y, width, words, tip, group))
            x += width + 5
    return chips


# ---- layout of rows and lanes


@dataclass(frozen=True)
class Row:
    """One module, with its tensors and what they read and write; with `folded`, several blocks."""

    name: str
    tensors: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    flow: Flow = field(default_factory=Flow)
    folded: tuple[str, ...] = ()
    block: str = ""
    y: int = 0
    """The y position of its centre."""

    @property
    def major(self) -> bool:
        """Whether it is a weight or stands for several blocks, rather than a norm or a table."""
        return self.flow.leads or bool(self.folded)

    @property
    def height(self) -> int:
        """The height of the row."""
        return 24 if self.major else 16

    @property
    def size(self) -> str:
        """The shape of its largest tensor, ``64×3×7×7``."""
        return "×".join(map(str, self.shape))

    @property
    def tip(self) -> str:
        """The row in words."""
        does = {"reads": self.flow.reads, "writes": self.flow.writes, "touches": self.flow.touches}
        lines = (f"{verb} {', '.join(map(str, each))}" for verb, each in does.items() if each)
        return "\n".join([", ".join(self.tensors), *lines])


@dataclass(frozen=True)
class Lane:
    """One group, drawn as a vertical line from the first row it touches to the last."""

    group: Group
    role: Role
    column: int
    first: int
    last: int
    shade: int
    """Distinguishes neighbours with the same role."""

    @property
    def x(self) -> int:
        """The x position; other lanes leave space for thick streams on their left."""
        return 20 * self.column + (50 if self.role is Role.STREAM else 58)

    @property
    def colour(self) -> str:
        """The name of its colour in the palette."""
        return f"{self.role.family}{self.shade % _SHADES}"

    @property
    def shape(self) -> str:
        """The style: a thick ``stream``, a ``bracket`` for blocks, ``strands`` for their inside, or a ``line``."""
        if self.role.is_outer:
            return "bracket"
        return "strands" if self.role.is_per_block else "stream" if self.role is Role.STREAM else "line"

    @property
    def words(self) -> str:
        """A short label: ``residual stream 192``, ``3 heads``, ``64 in each of 3 heads``."""
        if self.role.is_outer:
            return f"{self.group.size} {self.role.value}"
        if self.role.is_per_block:
            block = "heads" if self.role is Role.PER_HEAD else "groups"
            return f"{self.group.size} in each of {' × '.join(map(str, self.group.blocks))} {block}"
        return f"{self.role.value} {self.group.size}"


@dataclass(frozen=True)
class Sketch:
    """Rows and lanes, ready to be drawn."""

    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    bundles: tuple[tuple[Lane, ...], ...]
    """Adjacent lanes of which one permutes the blocks of the others: heads or convolution groups."""


def sketch(graph: PermutationGraph, everything: bool = False) -> Sketch:
    """Lay out a graph; in long models, repeated blocks are folded unless `everything`."""
    rows = _list_rows(graph)
    if len(rows) > _MANY_ROWS and not everything:
        rows = _fold(rows, graph)
    units = _place_lanes(graph, rows)
    bundles = tuple(unit for unit in units if unit[0].shape in ("bracket", "strands"))
    blocks = blocks_of([row.name for row in rows], {row.name for row in rows if row.flow.leads})
    bottom = 0
    for number, (row, block) in enumerate(zip(rows, blocks, strict=True)):
        rows[number] = replace(row, block=block, y=bottom + row.height // 2)
        bottom += row.height
    return Sketch(tuple(rows), tuple(lane for unit in units for lane in unit), bundles)


def blocks_of(paths: Sequence[str], weights: Set[str]) -> list[str]:
    """The block of each path: the innermost indexed module that holds at least two weights.

    Example:
        >>> blocks_of(["stem", "s1.b1.conv1", "s1.b1.conv2"], {"s1.b1.conv1", "s1.b1.conv2"})
        ['', 's1.b1.', 's1.b1.']
    """

    def prefixes(path: str) -> list[str]:
        return [path[: match.end()] for match in _INDEX.finditer(path)]

    holds = Counter(prefix for path in weights for prefix in prefixes(path))
    return [next((prefix for prefix in reversed(prefixes(path)) if holds[prefix] > 1), "") for path in paths]


def _list_rows(graph: PermutationGraph) -> list[Row]:
    members: dict[str, list[str]] = {}
    for tensor in graph.layouts:
        module, _, leaf = tensor.rpartition(".")
        members.setdefault(module if leaf in _ORDINARY and module else tensor, []).append(tensor)
    flow_of = flows(graph)
    rows = []
    for name, tensors in members.items():
        flow = join([flow_of[tensor] for tensor in tensors])
        # Buffers that no group touches, such as index tables, are not shown.
        if flow.groups or flow.leads or any(tensor in graph.parameters for tensor in tensors):
            largest = max((graph.layouts[tensor].shape for tensor in tensors), key=math.prod)
            rows.append(Row(name, tuple(tensors), largest, flow))
    return rows


def _fold(rows: Sequence[Row], graph: PermutationGraph) -> list[Row]:
    # Only the middle is folded; the first and the last block are shown.
    middle = {f"{block}.": repeat for repeat in repeated_blocks(graph, shortest=4) for block in repeat.blocks[1:-1]}
    folded: list[Row] = []
    for repeat, alike in groupby(
        rows, lambda row: next((middle[each] for each in middle if row.name.startswith(each)), None)
    ):
        if repeat is None:
            folded += alike
        else:
            first, *blocks, _ = repeat.blocks
            folded.append(Row(f"{blocks[0]} … {blocks[-1]}", folded=(first, *blocks)))
    return folded


def _place_lanes(graph: PermutationGraph, rows: Sequence[Row]) -> list[tuple[Lane, ...]]:
    """Place lanes in columns without overlaps; lanes that must be adjacent are in one tuple."""
    touched: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        for name in row.flow.groups:
            touched.setdefault(name, []).append(number)
    role_of, groups = roles(graph), [group for group in graph.groups if group.name in touched]
    units = {group.name: [group] for group in groups if not role_of[group.name].is_per_block}
    for group in groups:
        if role_of[group.name].is_per_block:
            outer = next((name for name in group.outer if name in units and role_of[name].is_outer), group.name)
            units.setdefault(outer, []).append(group)

    def extent(unit: Sequence[Group]) -> tuple[int, int]:
        return min(touched[group.name][0] for group in unit), max(touched[group.name][-1] for group in unit)

    def order(unit: Sequence[Group]) -> tuple[bool, int, int]:
        # Streams get the leftmost columns; the others follow by first row.
        first, last = extent(unit)
        return role_of[unit[0].name] is not Role.STREAM, first, -last

    placed: list[tuple[Lane, ...]] = []
    taken: set[tuple[int, int]] = set()  # columns and rows
    for unit in sorted(units.values(), key=order):
        role, (first, last), column = role_of[unit[0].name], extent(unit), 0
        if role is not Role.STREAM:
            streams = (lane for (lane, *_) in placed if lane.role is Role.STREAM)
            beside = [lane.column + 1 for lane in streams if lane.first <= last and lane.last >= first]
            column = max(beside, default=0)
        # A free row at both ends separates lanes in the same column.
        while not taken.isdisjoint(product(range(column, column + len(unit)), range(first - 1, last + 2))):
            column += 1
        taken.update(product(range(column, column + len(unit)), range(first, last + 1)))
        alike = sum(lane.role is role for other in placed for lane in other)
        lanes = []
        for place, group in enumerate(unit):
            rows_of, shade = touched[group.name], place if len(unit) > 1 else alike
            lanes.append(Lane(group, role_of[group.name], column + place, rows_of[0], rows_of[-1], shade))
        placed.append(tuple(lanes))
    return placed
