"""Pictures and pages of what is between models: curves along a line, contours over a plane."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_retarget.report.chart import _STYLE, COLOURS, Chart, Drawing, clean
from hf_retarget.report.page import render
from hf_retarget.words import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAME = 28  # letters of a model's name in the picture
_INK, _PAPER = "#202020", "#fdfdfd"  # on top of contours, whose colours are the same on light and dark screens
_CELLS = 400  # tooltips in a panel, at most: more make a heavy page
_LEVELS = 12
_SQUARE = 0.35  # sides whose ratio is beyond this are drawn to different scales, or the picture would be a strip
_WORST = 3.0  # times the range of losses among the models that the colours of the loss tell apart

Figures = Mapping[str, Any]


class _Pair(Drawing):
    """Two charts beside each other: accuracy and loss."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib import rc_context

        super().__init__("plane", width, height)
        self.figure.clear()
        with rc_context(_STYLE):
            self.panels: tuple[Any, Any] = tuple(self.figure.subplots(1, 2))
        self.axes = self.panels[0]


def draw_plane(figures: Figures) -> Chart:
    """The picture of plane.json: accuracy and loss, with the models marked and named."""
    return _draw_line(figures) if figures["kind"] == "line" else _draw_contours(figures)


def describe_plane(figures: Figures) -> str:
    """What there is to see, in a sentence or two.

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


# ---- a line


def _draw_line(figures: Figures) -> Chart:
    drawing = _Pair(8.2, 3.2)
    points = sorted(figures["points"], key=lambda point: float(point["x"]))
    names = _names(figures)
    places = [each["x"] for each in points]
    tips = [f"{_mixture(each, names)}\n{_scores(each)}" for each in points]
    for axes, key, words in zip(drawing.panels, ("top1", "loss"), ("accuracy", "loss"), strict=True):
        values = [math.nan if each[key] is None else each[key] for each in points]
        ends = [math.nan if each[key] is None else each[key] for each in figures["models"]]
        axes.plot([0, 1], ends, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(places, values, color=COLOURS["accent"], marker="o", markersize=2.6)
        axes.plot([0, 1], ends, linestyle="none", marker="o", markersize=8, color=COLOURS["accent"])
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], [names[0], "¼", "½", "¾", names[1]])
        _mark_barrier(axes, figures["barrier"], key, ends)
        drawing.columns(places, tips, axes)
    drawing.percents()
    return drawing.finish(describe_plane(figures))


def _mark_barrier(axes: Axes, barrier: Mapping[str, Any], key: str, ends: Sequence[float]) -> None:
    height = barrier[key]
    if not height:
        words = "beyond all numbers" if height is None else "no barrier"
        axes.set_title(words, loc="right", fontsize=10.5, color=COLOURS["muted"])
        return
    place = barrier[f"{key}_at"]
    start = ends[0] + place * (ends[1] - ends[0])
    sign = 1 if key == "loss" else -1
    arrow = {"arrowstyle": "<->", "color": COLOURS["other"], "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (place, start), (place, start + sign * height), arrowprops=arrow)
    text = f"barrier {height:.3f}" if key == "loss" else f"barrier {100 * height:.1f} points"
    axes.set_title(text, loc="right", fontsize=10.5, color=COLOURS["other"])


# ---- a plane


def _draw_contours(figures: Figures) -> Chart:
    grid, models = figures["grid"], figures["models"]
    wide, high = (grid[axis][-1] - grid[axis][0] for axis in ("x", "y"))
    equal = _SQUARE < high / wide < 1 / _SQUARE
    drawing = _Pair(9.0, 0.7 + 3.6 * (min(max(high / wide, 0.5), 1.3) if equal else 0.9))
    values = {(each["x"], each["y"]): each for each in figures["points"]}
    accuracy, loss = drawing.panels
    _fill(
        drawing,
        accuracy,
        grid,
        values,
        "top1",
        _accuracy_levels(figures),
        "viridis",
        lambda value: f"{100 * value:.3g}%",
    )
    _fill(drawing, loss, grid, values, "loss", _loss_levels(figures), "viridis_r", lambda value: f"{value:.4g}")
    for axes, words in ((accuracy, "accuracy"), (loss, "loss")):
        axes.grid(visible=False)
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.set_xlabel("distance in weight space along u")
        axes.set_aspect("equal" if equal else "auto")
        _mark_models(axes, models)
        _add_cells(drawing, axes, figures)
    accuracy.set_ylabel("along v" if equal else "along v (another scale)")
    return drawing.finish(describe_plane(figures))


def _fill(
    drawing: Drawing,
    axes: Axes,
    grid: Mapping[str, Sequence[float]],
    values: Mapping[tuple[float, float], Mapping[str, Any]],
    key: str,
    levels: Sequence[float],
    colours: str,
    words: Any,
) -> None:
    from matplotlib.colors import BoundaryNorm

    # A loss that is no number is worse than any number.
    worst = max(levels) * 2 + 1
    table = [[_value(values[x, y][key], worst) for x in grid["x"]] for y in grid["y"]]
    norm = BoundaryNorm(levels, 256, extend="max" if key == "loss" else "neither")
    extend = "max" if key == "loss" else "neither"
    filled = axes.contourf(grid["x"], grid["y"], table, levels, cmap=colours, norm=norm, extend=extend)
    axes.contour(grid["x"], grid["y"], table, levels, colors=_PAPER, linewidths=0.5, alpha=0.55)
    bar = drawing.figure.colorbar(filled, ax=axes, shrink=0.92, pad=0.02, aspect=28)
    shown = list(levels)[:: 1 if len(levels) < 10 else 2]
    bar.set_ticks(shown, labels=[words(level) for level in shown])
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0, labelcolor=COLOURS["muted"], labelsize=9)


def _value(value: float | None, worst: float) -> float:
    return worst if value is None else min(value, worst)


def _accuracy_levels(figures: Figures) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    scores = [each["top1"] for each in figures["points"]]
    return _rising([float(tick) for tick in MaxNLocator(_LEVELS).tick_values(min(scores), max(scores))])


def _loss_levels(figures: Figures) -> list[float]:
    """Dense where the loss is low, as Garipov et al. draw it: what is far off is all the same bad."""
    losses = sorted(each["loss"] for each in figures["points"] if each["loss"] is not None) or [1.0]
    low = losses[0]
    known = [each["loss"] for each in figures["models"] if each["loss"] is not None]
    high = min(losses[-1], max(losses[len(losses) * 3 // 4], low + _WORST * (max(known, default=low) - low)))
    digits = max(0, 2 - math.floor(math.log10(max(high - low, 1e-6))))
    unit = 10.0**-digits
    values = [low + (high - low) * (step / _LEVELS) ** 1.6 for step in range(_LEVELS + 1)]
    return _rising([math.floor(low / unit) * unit, *(round(value, digits) for value in values[1:])])


def _rising(levels: list[float]) -> list[float]:
    """Each level once, and at least two."""
    once = sorted(dict.fromkeys(levels))
    return once if len(once) > 1 else [once[0] - 0.01, once[0] + 0.01]


def _mark_models(axes: Axes, models: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.patheffects import withStroke

    around = [*models, models[0]]
    axes.plot(
        [each["x"] for each in around],
        [each["y"] for each in around],
        color=_PAPER,
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        path_effects=[withStroke(linewidth=2.4, foreground=_INK, alpha=0.5)],
    )
    for each, marker in zip(models, ("o", "s", "^"), strict=True):
        axes.plot(
            each["x"],
            each["y"],
            marker=marker,
            markersize=9,
            markerfacecolor=_PAPER,
            markeredgecolor=_INK,
            markeredgewidth=1.6,
        )
    height = max(each["y"] for each in models)
    middle = sum(each["x"] for each in models) / 3
    for each in models:
        up = each["y"] > height / 2
        left = each["x"] > middle
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


def _add_cells(drawing: Drawing, axes: Axes, figures: Figures) -> None:
    from matplotlib.patches import Rectangle

    columns, rows, names = figures["grid"]["x"], figures["grid"]["y"], _names(figures)
    values = {(each["x"], each["y"]): each for each in figures["points"]}
    every = math.ceil(math.sqrt(len(columns) * len(rows) / _CELLS))
    columns, rows = columns[::every], rows[::every]
    if len(columns) < 2 or len(rows) < 2:
        return
    for y in rows:
        for x in columns:
            wide, high = columns[1] - columns[0], rows[1] - rows[0]
            cell = Rectangle((x - wide / 2, y - high / 2), wide, high, facecolor=COLOURS["line"], alpha=0.004)
            axes.add_patch(cell)
            drawing.tip(cell, f"{_mixture(values[x, y], names)}\n{_scores(values[x, y])}")
    axes.set_xlim(figures["grid"]["x"][0], figures["grid"]["x"][-1])
    axes.set_ylim(figures["grid"]["y"][0], figures["grid"]["y"][-1])


def _names(figures: Figures) -> list[str]:
    return [clean(each["name"], _NAME) for each in figures["models"]]


def _mixture(point: Mapping[str, Any], names: Sequence[str]) -> str:
    parts = [f"{share:.2f} {name}" for share, name in zip(point["shares"], names, strict=True) if abs(share) >= 0.005]
    return " + ".join(parts).replace("+ -", "− ")


def _scores(point: Mapping[str, Any]) -> str:
    return f"accuracy {percent(point['top1'])}, loss {number(point['loss'])}"


# ---- pages

_MARKS = ("<!-- plane -->", "<!-- end of plane -->")
_OLD = re.compile(f"{_MARKS[0]}.*?{_MARKS[1]}\n?", re.DOTALL)
_BEFORE = re.compile(r'<section id="(?:classes|images|cost|origin)">|</main>')
"""Where the section goes: after what moved, before the first of these that the report has."""
_CONTENTS = '<li><a href="#moved">What moved</a></li>\n'
_ENTRY = f'{_MARKS[0]}<li><a href="#plane">Between models</a></li>{_MARKS[1]}\n'


def draw_plane_page(figures: Figures, chart: Chart | None = None) -> str:
    """plane.html: the picture with tooltips, the models, and what was done; it needs no network."""
    return render("plane.html", **_values(figures, chart))


def add_plane(html: str, figures: Figures, chart: Chart | None = None) -> str | None:
    """A report with a section about a plane, instead of the one it may have had; None if it is no report of ours."""
    bare = _OLD.sub("", html)
    place = _BEFORE.search(bare)
    if place is None:
        return None
    section = f"{_MARKS[0]}\n{render('plane_section.html', **_values(figures, chart))}\n{_MARKS[1]}\n"
    page = bare[: place.start()] + section + bare[place.start() :]
    return page.replace(_CONTENTS, _CONTENTS + _ENTRY, 1)


def _values(figures: Figures, chart: Chart | None) -> dict[str, Any]:
    names = [each["name"] for each in figures["models"]]
    return {
        "title": f"Between {', '.join(names[:-1])} and {names[-1]}",
        "figures": figures,
        "chart": chart or draw_plane(figures),
        "words": describe_plane(figures),
        "models": [
            (each["name"], percent(each["top1"]), number(each["loss"]), _permuted(each["permuted"]), each["reference"])
            for each in figures["models"]
        ],
        "distances": [
            (name, *(number(value) for value in row)) for name, row in zip(names, figures["distances"], strict=True)
        ],
    }


def _permuted(how: Mapping[str, Any] | None) -> str:
    if how is None:
        return "no"
    words = "by weight matching" if how["by"] == "match" else f"by {how['by']}"
    return f"{words} ({percent(how['moved'], 0)} of the neurons)"
