"""The picture of a permutation graph: an SVG in which residual streams, inner groups and heads can be seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hf_retarget.inspection.geometry import Geometry, shape_text
from hf_retarget.inspection.lanes import Bundle, Lane, Row, Sketch, sketch
from hf_retarget.inspection.legend import draw_legend
from hf_retarget.inspection.markup import Element, element, render_svg
from hf_retarget.inspection.roles import Role
from hf_retarget.inspection.style import COLOURS, PICTURE, colour, gain_colour

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph


def draw_picture(graph: PermutationGraph, model: str, everything: bool = False) -> str:
    """The picture as a self-contained SVG document."""
    return render_svg(picture(graph, model, sketch(graph, everything))) + "\n"


def draw_fit(graph: PermutationGraph, model: str, gains: Mapping[str, float], notes: Mapping[str, str]) -> str:
    """The picture as a part of a page, with groups painted by what was gained in them, and a note on each.

    Gains lie between 0 and 1; a group without one is gray.
    """
    paint = {group.name: gain_colour(gains.get(group.name)) for group in graph.groups}
    drawn = picture(graph, model, sketch(graph), explained=False, paint=paint, notes=notes)
    sheet = next(each for each in drawn if each.tag == "style")
    sheet.text = COLOURS.replace(":root", ".graph") + PICTURE  # the colours of the page are its own
    return render_svg(drawn)


def picture(
    graph: PermutationGraph,
    model: str,
    plan: Sketch,
    explained: bool = True,
    paint: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Element:
    """The picture of a sketch as an element, to be put into a page, which may explain it itself.

    `paint` gives groups other colours than those of their roles, and `notes` says more about them.
    """
    numbers = {group.name: number for number, group in enumerate(graph.groups)}
    legend, height = draw_legend(plan, _title(graph, model)) if explained else (None, 0.0)
    geometry = Geometry(plan, top=height)
    look = _Look(paint or {}, notes or {})
    return element(
        "svg",
        element("title", f"Permutation graph of {model}"),
        element("style", COLOURS + PICTURE),
        element("rect", class_="back", width=geometry.width, height=geometry.height),
        legend,
        *_headings(geometry),
        *_bands(geometry),
        *(_box(bundle, geometry) for bundle in plan.bundles),
        *(_leads(row, y, geometry, numbers) for row, y in geometry.rows if row.flow.leads),
        *(_group(lane, geometry, numbers, look) for lane in plan.lanes),
        *(_label(*row, block, geometry, numbers) for row, block in zip(geometry.rows, geometry.blocks, strict=True)),
        *_chips(plan, geometry, numbers, look),
        class_="graph",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {geometry.width:g} {geometry.height:g}",
        width=geometry.width,
        height=geometry.height,
        role="img",
    )


def _title(graph: PermutationGraph, model: str) -> tuple[str, str]:
    parameters = sum(math.prod(graph.layouts[name].shape) for name in graph.parameters)
    return model, f"{len(graph.groups)} groups · {parameters:,} parameters, {graph.share(1):.2%} of them on a free axis"


def _headings(geometry: Geometry) -> list[Element]:
    y = geometry.top - 12
    columns = [
        (geometry.name_x, "MODULE"),
        (geometry.shape_x, "SHAPE"),
        (geometry.chip_x, "GROUPS THAT BEGIN HERE"),
    ]
    return [element("text", text, class_="head", x=x, y=y) for x, text in columns]


def _bands(geometry: Geometry) -> list[Element]:
    # Every other block has a tinted ground, so that the eye finds where one ends.
    return [
        element("rect", class_="band", x=0, y=top, width=geometry.width, height=bottom - top)
        for top, bottom in geometry.bands
    ]


def _box(bundle: Bundle, geometry: Geometry) -> Element:
    left = geometry.lane_x[bundle.lanes[0].group.name] - 12
    right = geometry.lane_x[bundle.lanes[-1].group.name] + 12
    top, bottom = geometry.y(bundle.first) - 10, geometry.y(bundle.last) + 10
    return element("rect", class_="box", x=left, y=top, width=right - left, height=bottom - top, rx=7)


def _leads(row: Row, y: float, geometry: Geometry, numbers: dict[str, int]) -> Element:
    # A line from what the module reads to what it writes, with a tip where it arrives first.
    reads = [geometry.lane_x[name] for name in row.flow.reads]
    writes = [geometry.lane_x[name] for name in row.flow.writes]
    pins = []
    if row.flow.pinned_reads:
        reads.append(geometry.pin_in)
        pins.append(_pin(geometry.pin_in, y, row.flow.pinned_reads))
    if row.flow.pinned_writes:
        writes.append(geometry.pin_out)
        pins.append(_pin(geometry.pin_out, y, row.flow.pinned_writes))
    ends = sorted((*reads, *writes))
    source, sink = min(
        ((r, w) for r in reads for w in writes), key=lambda pair: (pair[0] == pair[1], abs(pair[0] - pair[1]))
    )
    tip = None
    if source != sink:
        at, back = (sink - 7, -7) if sink > source else (sink + 7, 7)
        tip = element("path", class_="tip", d=f"M{at:g} {y:g}l{back} -4.5v9z")
    return element(
        "g",
        element("title", describe(row)),
        element("path", class_="lead", d=f"M{ends[0]:g} {y:g}H{ends[-1]:g}"),
        tip,
        *pins,
        class_="leads",
        data_gs=_references(row.flow.groups, numbers),
    )


def _pin(x: float, y: float, sides: tuple[tuple[str, int], ...]) -> Element:
    warn = any(reason not in ("input", "output") for reason, _ in sides)
    words = "; ".join(f"pinned ({reason}): {size}" for reason, size in sides)
    square = element("rect", class_="pin warn" if warn else "pin", x=x - 4, y=y - 4, width=8, height=8, rx=1.5)
    return element("g", element("title", words), square)


def _group(lane: Lane, geometry: Geometry, numbers: dict[str, int], look: _Look) -> Element:
    x, top, bottom = geometry.lane_x[lane.group.name], geometry.y(lane.first), geometry.y(lane.last)
    boxed = lane.role.is_outer or lane.role.is_per_block
    if lane.first == lane.last:
        top, bottom = top - 7, bottom + 7
    width = 5.0 if lane.role is Role.STREAM else 2.6
    offsets = (-3.2, 0.0, 3.2) if lane.role.is_per_block else (0.0,)
    strands = [
        element(
            "path",
            class_="lane",
            d=f"M{x + offset:g} {top:g}V{bottom:g}",
            stroke_width=1.2 if len(offsets) > 1 else width,
        )
        for offset in offsets
    ]
    if lane.role.is_outer:
        strands.append(element("path", class_="lane", d=_bracket(x, top, bottom), stroke_width=width))
    halo = "halo boxed" if boxed else "halo"
    dots = [
        _dot(lane, row, x, y)
        for row, y in geometry.rows[lane.first : lane.last + 1]
        if lane.group.name in row.flow.groups
    ]
    return element(
        "g",
        element("title", look.describe(lane)),
        element("path", class_=halo, d=f"M{x:g} {top:g}V{bottom:g}", stroke_width=width + 4),
        *strands,
        element("path", class_="reach", d=f"M{x:g} {top:g}V{bottom:g}"),
        *dots,
        class_="group",
        style=f"--c: {look.colour(lane)}",
        data_g=str(numbers[lane.group.name]),
    )


def _bracket(x: float, top: float, bottom: float) -> str:
    return f"M{x + 6:g} {top - 7:g}H{x:g}V{bottom + 7:g}H{x + 6:g}"


def _dot(lane: Lane, row: Row, x: float, y: float) -> Element:
    name = lane.group.name
    reads, writes = name in row.flow.reads, name in row.flow.writes
    word = "reads and writes" if reads and writes else "reads" if reads else "writes" if writes else "touches"
    kind = "write" if writes else "read" if reads else "touch"
    wide, high = (6.0, 3.4) if lane.role.is_per_block else (4.8, 4.8) if lane.role is not Role.STREAM else (6.2, 6.2)
    if kind == "touch":
        wide, high = (5.2, 1.6) if lane.role.is_per_block else (3.4, 3.4)
    mark = element("rect", class_=kind, x=x - wide, y=y - high, width=2 * wide, height=2 * high, rx=high)
    if not (reads and writes):
        return element("g", element("title", f"{row.name} {word} {name}"), mark)
    ring = element(
        "rect", class_="loop", x=x - wide - 3, y=y - high - 3, width=2 * wide + 6, height=2 * high + 6, rx=high + 3
    )
    return element("g", element("title", f"{row.name} {word} {name}"), mark, ring)


def _label(row: Row, y: float, block: str, geometry: Geometry, numbers: dict[str, int]) -> Element:
    small = "" if row.flow.leads or row.folded else " small"
    if row.folded:
        words = f"⋯ {row.name}: {len(row.folded) - 1} more blocks like {row.folded[0]}"
        return element("g", element("text", words, class_="muted", x=geometry.name_x, y=y), class_="row", data_gs="")
    rest = row.name.removeprefix(block)
    name = element("tspan", rest, class_="muted") if small else rest
    return element(
        "g",
        element("title", describe(row)),
        element("text", element("tspan", block, class_="muted"), name, class_="name" + small, x=geometry.name_x, y=y),
        element("text", shape_text(row), class_="muted" + small, x=geometry.shape_x, y=y),
        class_="row",
        data_gs=_references(row.flow.groups, numbers),
    )


def _chips(plan: Sketch, geometry: Geometry, numbers: dict[str, int], look: _Look) -> list[Element]:
    # A group is named where it begins: a colour, a size, and its role in words. What is pinned is named as well.
    starts: dict[int, list[Lane]] = {}
    for lane in sorted(plan.lanes, key=lambda lane: lane.column):
        starts.setdefault(lane.first, []).append(lane)
    chips = []
    for number, (row, y) in enumerate(geometry.rows):
        x = geometry.chip_x
        for lane in starts.get(number, ()):
            chip, width = _chip(chip_text(lane), look.colour(lane), look.describe(lane), x, y)
            chip.set("data-g", str(numbers[lane.group.name]))
            chips.append(chip)
            x += width + 5
        for reason, size in (*row.flow.pinned_reads, *row.flow.pinned_writes):
            chip, width = _chip(f"pinned: {reason} {size}", "var(--pin)", f"the order of these {size} stays", x, y)
            chips.append(chip)
            x += width + 5
    return chips


def _chip(text: str, paint: str, title: str, x: float, y: float) -> tuple[Element, float]:
    width = len(text) * 6.4 + 12
    chip = element(
        "g",
        element("title", title),
        element("rect", class_="chip", x=x, y=y - 7, width=width, height=14, rx=7),
        element("text", text, class_="small", x=x + 6, y=y),
        class_="start",
        style=f"--c: {paint}",
    )
    return chip, width


def chip_text(lane: Lane) -> str:
    """A group in a few words: ``residual stream 192``, ``3 heads``, ``64 in each of 3 heads``."""
    size = lane.group.size
    if lane.role.is_outer:
        return f"{size} {lane.role.value}"
    if lane.role.is_per_block:
        block = "head" if lane.role is Role.PER_HEAD else "group"
        return f"{size} in each of {' × '.join(map(str, lane.group.blocks))} {block}s"
    return f"{lane.role.value} {size}"


def describe(row: Row) -> str:
    """A row in words, for its tooltip."""
    parts = [", ".join(row.tensors)]
    reads = [*row.flow.reads, *(f"pinned {reason} of {size}" for reason, size in row.flow.pinned_reads)]
    writes = [*row.flow.writes, *(f"pinned {reason} of {size}" for reason, size in row.flow.pinned_writes)]
    parts += [f"reads {', '.join(reads)}"] if reads else []
    parts += [f"writes {', '.join(writes)}"] if writes else []
    parts += [f"touches {', '.join(row.flow.touches)}"] if row.flow.touches else []
    return "\n".join(parts)


class _Look(NamedTuple):
    """How groups look, and what is said about them."""

    paint: Mapping[str, str]
    notes: Mapping[str, str]

    def colour(self, lane: Lane) -> str:
        return self.paint.get(lane.group.name) or colour(lane.role, lane.shade)

    def describe(self, lane: Lane) -> str:
        note = self.notes.get(lane.group.name)
        return f"{lane.group}: {lane.role.value}, {len(lane.group.axes)} axes" + (f"\n{note}" if note else "")


def _references(names: tuple[str, ...], numbers: dict[str, int]) -> str:
    return " ".join(str(numbers[name]) for name in names)
