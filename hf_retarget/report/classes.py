"""Which classes gain and which lose, and what is taken for what: charts and rows over the classes."""

from __future__ import annotations

from typing import Any

from hf_retarget.report.chart import COLOURS, Chart, Drawing, clean
from hf_retarget.report.curves import is_the_port
from hf_retarget.report.page import percent

Document = dict[str, Any]

_MANY = 30  # classes that fit into one chart; of more, the extremes are shown
_CELLS = 20  # classes up to which every cell of the confusion matrix can be pointed at
_NAME = 20  # letters

WORDS = {
    "port": "port",
    "finetuned": "port, fine-tuned on",
    "control": "plain fine-tuning",
    "masked": "mask alone",
    "naive": "naive port",
}
"""Whose accuracy it is."""


def ours(document: Document) -> str:
    """Whose result counts: the port, or the port after fine-tuning."""
    return "finetuned" if "finetuned" in document["test"] else "port"


def theirs(document: Document) -> str | None:
    """What it is compared with: plain fine-tuning, else the port without matching, else nothing."""
    itself = {name for name in ("masked", "naive") if ours(document) == "port" and is_the_port(document, name)}
    return next(
        (name for name in ("control", "masked", "naive") if name in document["test"] and name not in itself), None
    )


def class_names(document: Document) -> list[str]:
    """What the classes are called: their labels, or their numbers.

    Example:
        >>> class_names({"inputs": {"data": {"classes": 2, "labels": None}}})
        ['0', '1']
    """
    data = document["inputs"]["data"]
    return [str(each) for each in data["labels"] or range(data["classes"])]


def list_classes(document: Document) -> list[tuple[str, float | None, float | None]]:
    """Each class: its name, our accuracy and theirs; first where we lead most."""
    names, mine = class_names(document), document["test"][ours(document)]["per_class"]
    other = document["test"][theirs(document)]["per_class"] if theirs(document) else [None] * len(mine)
    rows = list(zip(names, mine, other, strict=False))
    return sorted(rows, key=lambda row: (row[1] or 0.0) - (row[2] or 0.0), reverse=True)


def draw_classes(document: Document) -> Chart | None:
    """The accuracy on each class, ours and theirs."""
    rows = [row for row in list_classes(document) if row[1] is not None]
    if not rows:
        return None
    shown = rows if len(rows) <= _MANY else [*rows[: _MANY // 2], *rows[-_MANY // 2 :]]
    drawing = Drawing("classes", 5.0, 1.3 + 0.24 * len(shown))
    axes, places = drawing.axes, list(range(len(shown)))
    us, them = ours(document), theirs(document)
    values = [row[1] for row in shown]
    if them:
        others = [float("nan") if row[2] is None else row[2] for row in shown]
        axes.hlines(places, others, values, color=COLOURS["line"], linewidth=2.5, zorder=2)
        axes.plot(others, places, "v", color=COLOURS[them], label=WORDS[them], zorder=3)
    axes.plot(values, places, "o", color=COLOURS[us], label=WORDS[us], zorder=4)
    drawing.rows(
        places,
        [
            f"{name}\n{WORDS[us]}: {percent(mine)}" + (f"\n{WORDS[them]}: {percent(other)}" if them else "")
            for name, mine, other in shown
        ],
    )
    axes.set_yticks(places, [clean(row[0], _NAME) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-0.03, 1.03)
    drawing.percents("x")
    axes.set_xlabel("test accuracy on the class")
    drawing.legend()
    better = sum((mine or 0) > (other or 0) for _, mine, other in rows) if them else 0
    return drawing.finish(
        f"Test accuracy on {len(shown)} of {len(rows)} classes"
        + (f"; {WORDS[us]} is above {WORDS[them]} on {better} of them." if them else ".")
    )


def draw_confusion(document: Document) -> Chart | None:
    """What is taken for what: each row a true class, each column what was said."""
    matrix = document["test"][ours(document)].get("confusion")
    if not matrix:
        return None
    names, few = class_names(document), len(matrix) <= _CELLS
    drawing = Drawing("confusion", 5.0, 4.8)
    axes = drawing.axes
    shares = [[each / (sum(row) or 1) for each in row] for row in matrix]
    if few:
        _cells(drawing, matrix, shares, names)
        axes.set_xticks(range(len(names)), [clean(name, _NAME) for name in names], rotation=90)
        axes.set_yticks(range(len(names)), [clean(name, _NAME) for name in names])
    else:
        _image(drawing, shares)
    axes.set_xlim(-0.5, len(matrix) - 0.5)
    axes.set_ylim(len(matrix) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_aspect("equal")
    axes.set_xlabel("what the model says" + ("" if few else " (number of the class)"))
    axes.set_ylabel("what it is")
    right = sum(row[at] for at, row in enumerate(matrix)) / (sum(map(sum, matrix)) or 1)
    return drawing.finish(f"Confusion matrix of {len(matrix)} classes; {percent(right)} lies on the diagonal.")


def list_confusions(document: Document, most: int = 10) -> list[tuple[str, str, int, float]]:
    """The most frequent mistakes: what it is, what the model says, how often, and in which share of the class."""
    matrix, names = document["test"][ours(document)].get("confusion") or [], class_names(document)
    wrong = [(count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count]
    first = sorted(wrong, key=lambda each: (-each[0], each[1:]))[:most]
    return [(names[i], names[j], count, count / sum(matrix[i])) for count, i, j in first]


def _cells(drawing: Drawing, matrix: list[list[int]], shares: list[list[float]], names: list[str]) -> None:
    from matplotlib.patches import Rectangle

    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            paint = COLOURS["port" if i == j else "naive"]
            cell = Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=paint, alpha=max(0.004, 0.85 * shares[i][j]), lw=0)
            drawing.axes.add_patch(cell)
            words = "" if i == j else f"\ntaken for {names[j]}"
            drawing.tip(cell, f"{names[i]}{words}\n{count:,} images, {percent(shares[i][j])} of the class")
            if len(matrix) <= 12 and count:
                drawing.axes.text(j, i, str(count), ha="center", va="center", color=COLOURS["text"], fontsize=9)


def _image(drawing: Drawing, shares: list[list[float]]) -> None:
    import numpy as np
    from matplotlib.colors import to_rgba_array

    values = np.array(shares) ** 0.5  # so that rare mistakes are seen, too
    pixels = np.empty((*values.shape, 4))
    pixels[...] = to_rgba_array(COLOURS["naive"])[0]
    pixels[np.arange(len(values)), np.arange(len(values))] = to_rgba_array(COLOURS["port"])[0]
    pixels[..., 3] = values
    drawing.axes.imshow(pixels, interpolation="nearest")
