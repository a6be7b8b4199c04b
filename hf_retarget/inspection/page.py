"""One self-contained HTML page about a permutation graph: figures, picture, groups and pinned axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_retarget.inspection.lanes import Sketch, sketch
from hf_retarget.inspection.legend import INTRODUCTION, list_legend
from hf_retarget.inspection.markup import Element, element, render_html
from hf_retarget.inspection.picture import picture
from hf_retarget.inspection.style import COLOURS, PAGE, SCRIPT, colour
from hf_retarget.inspection.summary import GroupSummary, Summary, summarise

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph
    from hf_retarget.graph.verify import Verification

_REASONS = {
    "input": "the model's input comes in this order",
    "output": "the model's output must keep its order",
    "spatial": "positions in space, time or a kernel",
    "constant": "a constant that is not in the state dict fixes the order",
    "unknown operator": "an operator without a rule: free, perhaps, but nobody knows",
    "misaligned": "two axes meet whose parts do not line up",
    "order": "an operator whose result depends on the order",
    "unused": "no operator uses it",
}


def draw_page(graph: PermutationGraph, model: str, everything: bool = False, check: Verification | None = None) -> str:
    """The page as a string; it needs no network."""
    summary = summarise(graph, model)
    plan = sketch(graph, everything)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{model}: permutation graph"),
        element("style", COLOURS + PAGE),
    )
    body = element(
        "body",
        element("h1", model),
        element("p", _WHAT),
        _facts(summary, check),
        *_unknown(summary),
        element("h2", "Picture"),
        element("p", " ".join(INTRODUCTION)),
        list_legend(plan),
        element("p", _HINT, class_="muted"),
        element("div", picture(graph, model, plan, explained=False), class_="wide"),
        element("h2", "Groups"),
        element("div", _groups(summary, plan), class_="wide"),
        element("h2", "Pinned axes"),
        element("div", _pinned(summary), class_="wide"),
        element("footer", element("p", f"Made by hf-retarget inspect. Graph {summary.fingerprint[:12]}.")),
        element("script", SCRIPT),
    )
    return "<!doctype html>\n" + render_html(element("html", head, body, lang="en")) + "\n"


_WHAT = (
    "A permutation graph says which neurons of a model may be reordered together without changing what it computes. "
    "All axes of one group share one permutation; a pinned axis keeps its order."
)
_NUMBERS = dict.fromkeys(("size", "parameters"), "number")
_HINT = "Point at a line, or at a row of the table below, to see everything that moves with it; click to keep it."


def _facts(summary: Summary, check: Verification | None) -> Element:
    facts = [
        (f"{len(summary.groups)}", "groups"),
        (f"{summary.per_block}", "of them per head or convolution group"),
        (f"{summary.parameters:,}", "parameters"),
        (f"{summary.share_one:.2%}", "on a free axis"),
        (f"{summary.share_two:.2%}", "on two free axes"),
    ]
    items = [element("li", element("b", value), words) for value, words in facts if value != "0"]
    if check is not None:
        mark = element("b", "verified" if check.passed else "refuted", class_=None if check.passed else "warn")
        items.append(element("li", mark, check.verdict))
    return element("ul", *items, class_="facts")


def _unknown(summary: Summary) -> list[Element]:
    if not summary.unknown_operators:
        return []
    items = [element("li", text) for text in summary.unknown_operators]
    return [element("h2", "Unknown operators", class_="warn"), element("ul", *items)]


def _groups(summary: Summary, plan: Sketch) -> Element:
    shades = {lane.group.name: lane.shade for lane in plan.lanes}
    heads = ("group", "role", "size", "outer", "parameters", "axes")
    rows = [
        _group(number, group, colour(group.role, shades.get(group.name, 0)))
        for number, group in enumerate(summary.groups)
    ]
    return _table(heads, rows)


def _group(number: int, group: GroupSummary, paint: str) -> Element:
    axes = element(
        "details", element("summary", _count(len(group.axes))), *(element("div", axis) for axis in group.axes)
    )
    return element(
        "tr",
        element("td", element("span", class_="swatch", style=f"--c: {paint}"), group.name, class_="name"),
        element("td", group.role.value),
        element("td", group.size_text, class_="number"),
        element("td", group.outer_text, class_="name"),
        element("td", f"{group.parameters:,}", class_="number"),
        element("td", axes),
        data_g=str(number),
    )


def _pinned(summary: Summary) -> Element:
    rows = []
    for pinned in summary.pinned:
        shown = element(
            "details", element("summary", _count(pinned.count)), *(element("div", axis) for axis in pinned.axes)
        )
        cells = (pinned.reason, _REASONS.get(pinned.reason, ""), pinned.where)
        rows.append(element("tr", *(element("td", cell) for cell in cells), element("td", shown)))
    return _table(("reason", "meaning", "for example at", "axes"), rows)


def _count(axes: int) -> str:
    return "1 axis" if axes == 1 else f"{axes} axes"


def _table(heads: tuple[str, ...], rows: list[Element]) -> Element:
    head = element("thead", element("tr", *(element("th", text, class_=_NUMBERS.get(text)) for text in heads)))
    return element("table", head, element("tbody", *rows))
