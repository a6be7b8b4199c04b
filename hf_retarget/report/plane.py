"""Pictures and pages of `plane`: curves along a line, contours over a plane."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_retarget.errors import RetargetError
from hf_retarget.files import write_text
from hf_retarget.report.chart import Chart, Drawing
from hf_retarget.report.page import COLOURS, clean, render
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes
from hf_retarget.words import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = {"top1": "accuracy", "loss": "loss"}
_NAME = 28  # maximum length of a model's name in the picture
_INK, _PAPER = "#202020", "#fdfdfd"  # on contours, whose colours are the same on light and dark screens
_CELLS = 400  # maximum number of tooltips in a panel, to limit the size of the page
_LEVELS = 12
_SQUARE = 0.35  # minimum ratio of the sides for equal scales; otherwise the picture would be a strip
_WORST = 3.0  # range of the loss colours, as a multiple of the range among the models

Figures = Mapping[str, Any]


def draw_plane(figures: Figures) -> Chart:
    """Draw accuracy and loss of plane.json, with the models marked and named."""
    return _draw_line(figures) if figures["kind"] == "line" else _draw_contours(figures)


def describe_plane(figures: Figures) -> str:
    """Describe the picture in a sentence.

    Example:
        >>> model = {"name": "a", "top1": 0.5, "loss": 1.0}
        >>> barrier = {"loss": 0.5, "loss_at": 0.4, "top1": 0.1, "top1_at": 0.5}
        >>> describe_plane({"kind": "line", "models": [model, {**model, "name": "b"}], "barrier": barrier})
        'From a (50.0%, loss 1.000) to b (50.0%, loss 1.000): accuracy falls by up to 10.0 points, loss rises by up to \
0.500 above a straight line between the two.'
    """
    models = [f"{each['name']} ({percent(each['top1'])}, loss {number(each['loss'])})" for each in figures["models"]]
    if figures["kind"] == "line":
        top1, loss = figures["barrier"]["top1"], figures["barrier"]["loss"]
        rises = "is not finite somewhere" if loss is None else f"rises by up to {loss:.3f}"
        return (
            f"From {models[0]} to {models[1]}: accuracy falls by up to {100 * top1:.1f} points, "
            f"loss {rises} above a straight line between the two."
        )
    scores = [each["top1"] for each in figures["points"]]
    return (
        f"The plane through {models[0]}, {models[1]} and {models[2]}: "
        f"accuracy lies between {percent(min(scores))} and {percent(max(scores))}."
    )


def _describe_point(point: Figures, models: Sequence[Figures]) -> str:
    parts = zip(point["shares"], models, strict=True)
    mixture = " + ".join(f"{share:.2f} {clean(each['name'], _NAME)}" for share, each in parts if abs(share) >= 0.005)
    scores = f"accuracy {percent(point['top1'])}, loss {number(point['loss'])}"
    return f"{mixture}\n{scores}".replace("+ -", "− ")


# ---- a line


def _draw_line(figures: Figures) -> Chart:
    drawing = Drawing("plane", 8.2, 3.2, panels=2)
    models, points = figures["models"], sorted(figures["points"], key=lambda point: float(point["x"]))
    tips = {each["x"]: _describe_point(each, models) for each in points}
    start, end = (clean(each["name"], _NAME) for each in models)
    for axes, (key, words) in zip(drawing.panels, _PANELS.items(), strict=True):
        ends, values = ([math.nan if each[key] is None else each[key] for each in some] for some in (models, points))
        axes.plot([0, 1], ends, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(list(tips), values, color=COLOURS["accent"], marker="o", markersize=2.6)
        axes.plot([0, 1], ends, linestyle="none", marker="o", markersize=8, color=COLOURS["accent"])
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], [start, "¼", "½", "¾", end])
        _mark_barrier(axes, figures["barrier"], key, ends)
        drawing.columns(tips, axes)
    drawing.label(percents="y", legend=0)
    return drawing.finish(describe_plane(figures))


def _mark_barrier(axes: Axes, barrier: Figures, key: str, ends: Sequence[float]) -> None:
    height, place = barrier[key], barrier[f"{key}_at"]
    if height:
        base = ends[0] + place * (ends[1] - ends[0])
        arrow = {"arrowstyle": "<->", "color": COLOURS["other"], "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (place, base), (place, base + (height if key == "loss" else -height)), arrowprops=arrow)
        words = f"barrier {height:.3f}" if key == "loss" else f"barrier {100 * height:.1f} points"
    else:
        words = "not finite" if height is None else "no barrier"
    axes.set_title(words, loc="right", fontsize=10.5, color=COLOURS["other" if height else "muted"])


# ---- a plane


def _draw_contours(figures: Figures) -> Chart:
    columns, rows = figures["grid"]["x"], figures["grid"]["y"]
    ratio = (rows[-1] - rows[0]) / (columns[-1] - columns[0])
    equal = _SQUARE < ratio < 1 / _SQUARE
    drawing = Drawing("plane", 9.0, 0.7 + 3.6 * (min(max(ratio, 0.5), 1.3) if equal else 0.9), panels=2)
    points = {(each["x"], each["y"]): each for each in figures["points"]}
    for axes, key in zip(drawing.panels, _PANELS, strict=True):
        _fill(drawing, axes, figures, [[points[x, y][key] for x in columns] for y in rows], key)
    for axes, words in zip(drawing.panels, _PANELS.values(), strict=True):
        axes.grid(visible=False)
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.set_xlabel("distance in weight space along u")
        axes.set_aspect("equal" if equal else "auto")
        _mark_models(axes, figures["models"])
        _add_cells(drawing, axes, figures, points)
    drawing.axes.set_ylabel("along v" if equal else "along v (another scale)")
    return drawing.finish(describe_plane(figures))


def _fill(drawing: Drawing, axes: Axes, figures: Figures, values: list[list[float | None]], key: str) -> None:
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    if key == "loss":
        levels = _loss_levels(figures)
    else:
        scores = [each["top1"] for each in figures["points"]]
        levels = _rising(list(map(float, MaxNLocator(_LEVELS).tick_values(min(scores), max(scores)))))
    colours, words = ("viridis_r", "{:.4g}") if key == "loss" else ("viridis", "{:.3g}%")
    extend: Literal["max", "neither"] = "max" if key == "loss" else "neither"
    worst = max(levels) * 2 + 1  # a loss that is not finite is worse than any number
    table = [[worst if value is None else min(value, worst) for value in row] for row in values]
    grid = figures["grid"]["x"], figures["grid"]["y"], table, levels
    filled = axes.contourf(*grid, cmap=colours, norm=BoundaryNorm(levels, 256, extend=extend), extend=extend)
    axes.contour(*grid, colors=_PAPER, linewidths=0.5, alpha=0.55)
    bar = drawing.figure.colorbar(filled, ax=axes, shrink=0.92, pad=0.02, aspect=28)
    shown = levels[:: 1 if len(levels) < 10 else 2]
    bar.set_ticks(shown, labels=[words.format(level if key == "loss" else 100 * level) for level in shown])
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0, labelcolor=COLOURS["muted"], labelsize=9)


def _loss_levels(figures: Figures) -> list[float]:
    """Levels that are dense where the loss is low, as in Garipov et al.: high losses need no detail."""
    losses = sorted(each["loss"] for each in figures["points"] if each["loss"] is not None) or [1.0]
    low = losses[0]
    known = [each["loss"] for each in figures["models"] if each["loss"] is not None]
    high = min(losses[-1], max(losses[len(losses) * 3 // 4], low + _WORST * (max(known, default=low) - low)))
    digits = max(0, 2 - math.floor(math.log10(max(high - low, 1e-6))))
    unit = 10.0**-digits
    values = [low + (high - low) * (step / _LEVELS) ** 1.6 for step in range(1, _LEVELS + 1)]
    return _rising([math.floor(low / unit) * unit, *(round(value, digits) for value in values)])


def _rising(levels: list[float]) -> list[float]:
    """Sort levels, remove duplicates, and ensure at least two."""
    once = sorted(set(levels))
    return once if len(once) > 1 else [once[0] - 0.01, once[0] + 0.01]


def _mark_models(axes: Axes, models: Sequence[Figures]) -> None:
    from matplotlib.patheffects import withStroke

    around = [(each["x"], each["y"]) for each in (*models, models[0])]
    edge = [withStroke(linewidth=2.4, foreground=_INK, alpha=0.5)]
    axes.plot(*zip(*around, strict=True), color=_PAPER, linewidth=1.1, linestyle=(0, (4, 3)), path_effects=edge)
    mark: dict[str, Any] = {"markersize": 9, "mfc": _PAPER, "mec": _INK, "mew": 1.6}
    for each, marker in zip(models, ("o", "s", "^"), strict=True):
        axes.plot(each["x"], each["y"], marker=marker, **mark)
    height = max(each["y"] for each in models)
    middle = sum(each["x"] for each in models) / 3
    for each in models:
        up, left = each["y"] > height / 2, each["x"] > middle
        axes.annotate(
            clean(each["name"], _NAME),
            (each["x"], each["y"]),
            (0, 9 if up else -9),
            textcoords="offset points",
            va="bottom" if up else "top",
            ha="center" if up else "right" if left else "left",
            fontsize=9,
            color=_INK,
            bbox={"boxstyle": "round,pad=0.22", "facecolor": _PAPER, "edgecolor": "none", "alpha": 0.88},
        )


def _add_cells(drawing: Drawing, axes: Axes, figures: Figures, points: Mapping[tuple[float, float], Figures]) -> None:
    from matplotlib.patches import Rectangle

    columns, rows = figures["grid"]["x"], figures["grid"]["y"]
    every = math.ceil(math.sqrt(len(columns) * len(rows) / _CELLS))
    if len(columns) <= every or len(rows) <= every:
        return
    wide, high = columns[every] - columns[0], rows[every] - rows[0]
    for y in rows[::every]:
        for x in columns[::every]:
            cell = Rectangle((x - wide / 2, y - high / 2), wide, high, facecolor=COLOURS["line"], alpha=0.004)
            axes.add_patch(cell)
            drawing.tip(cell, _describe_point(points[x, y], figures["models"]))
    axes.set_xlim(columns[0], columns[-1])
    axes.set_ylim(rows[0], rows[-1])


# ---- pages

_MARKS = ("<!-- plane -->", "<!-- end of plane -->")
_OLD = re.compile(f"{_MARKS[0]}.*?{_MARKS[1]}\n?", re.DOTALL)
_BEFORE = re.compile(r'<section id="(?:classes|images|cost|origin)">|</main>')
"""The section is inserted before the first of these."""
_CONTENTS = '<li><a href="#moved">What moved</a></li>\n'
_ENTRY = f'{_MARKS[0]}<li><a href="#plane">Between models</a></li>{_MARKS[1]}\n'


def draw_plane_page(figures: Figures, chart: Chart | None = None) -> str:
    """Render plane.html, with the picture, the models and the method."""
    return render("plane.html", **_values(figures, chart or draw_plane(figures)))


def show_in_report(report: Path, figures: Figures) -> None:
    """Add a section with the picture to the report of a port, replacing an earlier one."""
    bare = _OLD.sub("", read_bytes(report, MAX_DOCUMENT_BYTES).decode(errors="replace"))
    place = _BEFORE.search(bare)
    if place is None:
        raise RetargetError(f"'{report}' is not the report of a port; nothing was added")
    section = f"{_MARKS[0]}\n{render('plane_section.html', **_values(figures, draw_plane(figures)))}\n{_MARKS[1]}\n"
    page = bare[: place.start()] + section + bare[place.start() :]
    write_text(report, page.replace(_CONTENTS, _CONTENTS + _ENTRY, 1))


def _values(figures: Figures, chart: Chart) -> dict[str, Any]:
    names = [each["name"] for each in figures["models"]]
    return {
        "title": f"Between {', '.join(names[:-1])} and {names[-1]}",
        "figures": figures,
        "chart": chart,
        "words": describe_plane(figures),
        "models": [
            (each["name"], percent(each["top1"]), number(each["loss"]), _permuted(each["permuted"]), each["reference"])
            for each in figures["models"]
        ],
        "distances": [(name, *map(number, row)) for name, row in zip(names, figures["distances"], strict=True)],
    }


def _permuted(how: Figures | None) -> str:
    if how is None:
        return "no"
    words = "by weight matching" if how["by"] == "match" else f"by {how['by']}"
    return f"{words} ({percent(how['moved'], 0)} of the neurons)"
