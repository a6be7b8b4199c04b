"""A permutation graph as a picture (SVG) and as a page (HTML), from templates of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hf_retarget.inspection.lanes import Lane, Row, Sketch, sketch
from hf_retarget.inspection.roles import Role
from hf_retarget.inspection.summary import summarise
from hf_retarget.report.page import render

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph
    from hf_retarget.graph.verify import Verification

_LETTER, _SMALL_LETTER = 7.25, 6.4  # the widths of a letter of the monospaced face, on the safe side
_GAINS = (0.1, 0.25, 0.5)
_INTRODUCTION = (
    "Each line is a group: neurons that may be reordered together without changing what the model computes.",
    "Rows are the modules of the model, from its input at the top to its output at the bottom.",
)
_LEGEND = {  # role: what its lines look like, and mean
    Role.STREAM: ("stream", "residual stream: one order, shared by all modules that add to it or read it"),
    Role.INNER: ("inner", "inner group: neurons between two layers, free to take any order"),
    Role.SEGMENT: (
        "segment",
        "concatenated group: later layers read it side by side with others; it too may take any order",
    ),
    Role.PER_HEAD: (
        "bundle",
        "attention heads: the heads change places (bracket), and each has its own order inside (strands)",
    ),
    Role.PER_CONV_GROUP: (
        "bundle",
        "grouped convolution: its groups change places (bracket), each has its own order inside (strands)",
    ),
}
_LEAD = "a weight reads the group at the ring and writes the group at the dot; small dots: norms, biases, tables"
_REASONS = {
    "input": "the model's input comes in this order",
    "output": "the model's output must keep its order",
    "spatial": "positions in space, time or a kernel",
    "constant": "a constant that is not in the state dict fixes the order",
    "unknown operator": "an operator without a rule, which may or may not depend on the order",
    "misaligned": "two axes meet whose parts do not line up",
    "order": "an operator whose result depends on the order",
    "unused": "no operator uses it",
}


def draw_picture(graph: PermutationGraph, model: str, everything: bool = False) -> str:
    """The picture as an SVG document, with a title and a legend."""
    return render("graph.svg", alone=True, **_values(graph, model, everything)) + "\n"


def draw_fit(graph: PermutationGraph, model: str, gains: Mapping[str, float], notes: Mapping[str, str]) -> str:
    """The picture as a part of a page, with groups painted by what was gained in them, and a note on each.

    Gains lie between 0 and 1; a group without one is gray.
    """
    values = _values(graph, model, notes=notes)
    values["paint"] = {group.name: gain_colour(gains.get(group.name)) for group in graph.groups}
    return render("graph.svg", alone=False, **values)


def draw_page(graph: PermutationGraph, model: str, everything: bool = False, check: Verification | None = None) -> str:
    """A page with figures, picture, groups and pinned axes."""
    values = _values(graph, model, everything)
    title = f"{model}: permutation graph"
    return render("graph.html", alone=False, title=title, check=check, meanings=_REASONS, **values)


def gain_colour(gain: float | None) -> str:
    """The colour of a gain between 0 and 1: four steps, and gray for none.

    Example:
        >>> gain_colour(None), gain_colour(0.05), gain_colour(0.9)
        ('gain0', 'gain1', 'gain4')
    """
    return f"gain{0 if gain is None else 1 + sum(gain >= limit for limit in _GAINS)}"


def _legend(plan: Sketch) -> list[tuple[str, str]]:
    """Samples of the lines and marks that occur, and what they mean."""
    present = {lane.role for lane in plan.lanes}
    pinned = {reason for row in plan.rows for reason, _ in (*row.flow.pinned_reads, *row.flow.pinned_writes)}
    entries = [entry for role, entry in _LEGEND.items() if role in present] + [("lead", _LEAD)]
    if pinned:
        red = "; red: for another reason, such as an operator without a rule" if pinned - {"input", "output"} else ""
        entries.append(("pin", f"pinned: here the order bears meaning and stays (input, output{red})"))
    return entries


def _values(
    graph: PermutationGraph, model: str, everything: bool = False, notes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the templates show, with all coordinates."""
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
    # Where the columns begin, from left to right, and the size of the whole.
    shown = [(row, _LETTER if row.major else _SMALL_LETTER) for row in plan.rows if not row.folded]
    pinned = max((lane.x for lane in plan.lanes), default=50) + 28
    name = pinned + 26
    size = name + 18 + round(max((len(row.name) * letter for row, letter in shown), default=60))
    chip = size + 18 + round(max((len(row.size) * letter for row, letter in shown), default=40))
    height = sum(row.height for row in plan.rows) + 18
    return {"pinned": pinned, "name": name, "size": size, "chip": chip, "width": max(chip + 330, 860), "height": height}


def _bands(plan: Sketch) -> list[tuple[int, int]]:
    # Every other block has a tinted ground, to show where one ends: (upper edge, height).
    blocks = [list(rows) for block, rows in groupby(plan.rows, key=lambda row: row.block) if block]
    return [(rows[0].y - rows[0].height // 2, sum(row.height for row in rows)) for rows in blocks[::2]]


def _leads(plan: Sketch, pinned: int) -> list[tuple[Any, ...]]:
    # From what a module reads to what it writes: (row, left end, right end, where it arrives first, from which side:
    # 1 from the left and -1 from the right, pins at its ends).
    place = {lane.group.name: lane.x for lane in plan.lanes}
    leads = []
    for row in plan.rows:
        if row.flow.leads:
            ends = [(18, row.flow.pinned_reads), (pinned, row.flow.pinned_writes)]
            reads = [place[name] for name in row.flow.reads] + [18] * bool(row.flow.pinned_reads)
            writes = [place[name] for name in row.flow.writes] + [pinned] * bool(row.flow.pinned_writes)
            pairs = [(read, write) for read in reads for write in writes]
            source, sink = min(pairs, key=lambda pair: (pair[0] == pair[1], abs(pair[0] - pair[1])))
            direction = (sink > source) - (sink < source)
            pins = [(x, *_pin(sides)) for x, sides in ends if sides]
            leads.append((row, min(reads + writes), max(reads + writes), sink, direction, pins))
    return leads


def _pin(sides: Sequence[tuple[str, int]]) -> tuple[str, str]:
    known = all(reason in ("input", "output") for reason, _ in sides)
    return "; ".join(f"pinned ({reason}): {size}" for reason, size in sides), "pin" if known else "pin warn"


def _marks(lane: Lane, plan: Sketch) -> list[tuple[Row, str, float, float]]:
    # Where modules read, write or touch a group: (row, verb, radii of an ellipse).
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
    # A group is named where it begins, and what is pinned where it is: (x, y, width, words, tip, group).
    chips = []
    lanes = sorted(plan.lanes, key=lambda lane: lane.column)
    for number, row in enumerate(plan.rows):
        named = [(lane.words, tips[lane.group.name], lane.group.name) for lane in lanes if lane.first == number]
        pinned = [
            (f"pinned: {reason} {size}", f"the order of these {size} stays", None)
            for reason, size in (*row.flow.pinned_reads, *row.flow.pinned_writes)
        ]
        x = left
        for words, tip, group in (*named, *pinned):
            width = round(len(words) * _SMALL_LETTER) + 12
            chips.append((x, row.y, width, words, tip, group))
            x += width + 5
    return chips
