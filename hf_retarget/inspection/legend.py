"""The legend of the picture: what its lines and marks mean, in plain words, for those that occur."""

from __future__ import annotations

from hf_retarget.inspection.lanes import Sketch
from hf_retarget.inspection.markup import Element, element
from hf_retarget.inspection.roles import Role

INTRODUCTION = (
    "Each line is a group: neurons that may be reordered together without changing what the model computes.",
    "Rows are the modules of the model, from its input at the top to its output at the bottom.",
)


def draw_legend(plan: Sketch, title: tuple[str, str]) -> tuple[Element, float]:
    """Title and legend as part of a picture that stands alone, and the height they take."""
    nodes = [
        element("text", title[0], class_="title", x=18, y=26),
        element("text", title[1], class_="words muted", x=18, y=50),
    ]
    y = 76.0
    for text in INTRODUCTION:
        nodes.append(element("text", text, class_="words", x=18, y=y))
        y += 19
    y += 12
    for sample, words in _entries(plan):
        nodes.append(element("g", *sample, transform=f"translate(18 {y:g})"))
        nodes.append(element("text", words, class_="words", x=92, y=y))
        y += 21
    return element("g", *nodes), y


def list_legend(plan: Sketch) -> Element:
    """The same legend as an HTML list, whose words wrap on a small screen."""
    items = []
    for sample, words in _entries(plan):
        drawing = element(
            "svg", *sample, class_="graph", viewBox="-1 -11 64 22", width=64, height=22, aria_hidden="true"
        )
        items.append(element("li", drawing, element("span", words)))
    return element("ul", *items, class_="legend")


def _entries(plan: Sketch) -> list[tuple[list[Element], str]]:
    present = {lane.role for lane in plan.lanes}
    flows = [row.flow for row in plan.rows]
    entries = []
    if Role.STREAM in present:
        entries.append(
            (_line("stream0", 5), "residual stream: one order, shared by all modules that add to it or read it")
        )
    if Role.INNER in present:
        entries.append((_line("inner0", 2.6), "inner group: neurons between two layers, free to take any order"))
    if Role.SEGMENT in present:
        words = "concatenated group: later layers read it side by side with others; it too may take any order"
        entries.append((_line("segment0", 2.6), words))
    if Role.PER_HEAD in present:
        entries.append(
            (
                _bundle(),
                "attention heads: the heads change places (bracket), and each has its own order inside (strands)",
            )
        )
    if Role.PER_CONV_GROUP in present:
        entries.append(
            (
                _bundle(),
                "grouped convolution: its groups change places (bracket), each has its own order inside (strands)",
            )
        )
    entries.append(
        (
            _lead(),
            "a weight reads the group at the ring and writes the group at the dot; small dots: norms, biases, tables",
        )
    )
    reasons = {reason for flow in flows for reason, _ in (*flow.pinned_reads, *flow.pinned_writes)}
    if reasons:
        red = "; red: nobody knows, an operator has no rule" if reasons - {"input", "output"} else ""
        entries.append((_pin(), f"pinned: here the order bears meaning and stays (input, output{red})"))
    return entries


def _style(colour: str) -> str:
    return f"--c: var(--{colour})"


def _line(colour: str, width: float) -> list[Element]:
    return [element("path", class_="lane", d="M2 0H58", stroke_width=width, style=_style(colour))]


def _bundle() -> list[Element]:
    strands = [
        element("path", class_="lane", d=f"M30 {y}H54", stroke_width=1.2, style=_style("head1")) for y in (-3, 0, 3)
    ]
    bracket = element("path", class_="lane", d="M8 -5H6V5H8M6 0H22", stroke_width=2.4, style=_style("head0"))
    return [element("rect", class_="box", x=0, y=-9, width=60, height=18, rx=7), bracket, *strands]


def _lead() -> list[Element]:
    return [
        element("path", class_="lead", d="M6 0H54"),
        element("path", class_="tip", d="M48 0l-6 -4v8z"),
        element("circle", class_="read", cx=6, cy=0, r=4.4, style=_style("stream0")),
        element("circle", class_="write", cx=54, cy=0, r=4.4, style=_style("inner0")),
    ]


def _pin() -> list[Element]:
    return [element("rect", class_="pin", x=26, y=-4, width=8, height=8, rx=1.5)]
