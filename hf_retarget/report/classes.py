"""Classes and sample images of a report: gains and losses by class, confusions, and predictions for images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_retarget.contenders import find_contender
from hf_retarget.document import PortDocument
from hf_retarget.report.chart import Chart, Drawing
from hf_retarget.report.page import COLOURS, clean
from hf_retarget.words import percent

_MANY = 30  # maximum number of classes in a chart; of more, the extremes are shown
_CELLS = 20  # maximum number of classes for tooltips in the confusion matrix
_NAME = 20  # letters
_COLUMNS = 6  # of sample images

KINDS = {
    "only ours": "Only the port is right",
    "only theirs": "Only the other is right",
    "neither": "Both are wrong",
    "both": "Both are right",
}
"""Kinds of sample images, by which model is right."""
_ALONE = {"neither": "The port is wrong", "both": "The port is right"}
"""The labels without a model to compare with."""


def list_classes(document: PortDocument) -> list[tuple[str, float | None, float | None]]:
    """Name, accuracy of the result and accuracy of the rival for each class, largest lead first."""
    mine, rival = document.result.test.per_class, document.rival
    other = rival.test.per_class if rival else [None] * len(mine)
    rows = list(zip(document.data.class_names, mine, other, strict=False))
    return sorted(rows, key=lambda row: (row[1] or 0.0) - (row[2] or 0.0), reverse=True)


def draw_classes(document: PortDocument) -> Chart | None:
    """The accuracy of the result and the rival on each class."""
    rows = [row for row in list_classes(document) if row[1] is not None]
    if not rows:
        return None
    shown = rows if len(rows) <= _MANY else [*rows[: _MANY // 2], *rows[-_MANY // 2 :]]
    drawing = Drawing("classes", 5.0, 1.3 + 0.24 * len(shown))
    axes, places = drawing.axes, list(range(len(shown)))
    us, them = document.result.row, document.rival.row if document.rival else None
    values = [row[1] for row in shown]
    if them:
        others = [float("nan") if row[2] is None else row[2] for row in shown]
        axes.hlines(places, others, values, color=COLOURS["line"], linewidth=2.5, zorder=2)
        axes.plot(others, places, "v", color=them.colours[0], label=them.label, zorder=3)
    axes.plot(values, places, "o", color=us.colours[0], label=us.label, zorder=4)
    tips: dict[float, str] = {}
    for place, (name, mine, other) in enumerate(shown):
        tips[place] = f"{name}\n{us.label}: {percent(mine)}" + (f"\n{them.label}: {percent(other)}" if them else "")
    drawing.rows(tips)
    axes.set_yticks(places, [clean(row[0], _NAME) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-0.03, 1.03)
    drawing.label(f"test {document.measure} on the class", percents="x")
    alt = f"Test {document.measure} on {len(shown)} of {len(rows)} classes"
    if not them:
        return drawing.finish(f"{alt}.", "There is no model to compare with.")
    up, down = (sum(sign * ((mine or 0) - (other or 0)) > 0 for _, mine, other in rows) for sign in (1, -1))
    what = "port and fine-tuning" if document.result.role == "after" else "the port"
    few = (
        "" if len(rows) <= _MANY else " The 15 classes with the largest lead and the 15 with the largest lag are shown."
    )
    return drawing.finish(
        f"{alt}; {us.label} is above {them.label} on {up} of them.",
        f"On {up} of {len(rows)} classes {what} is above {them.short}, on {down} below.{few}",
    )


def draw_confusion(document: PortDocument) -> Chart | None:
    """The confusion matrix: rows are true classes, columns are predicted ones."""
    from matplotlib.colors import to_rgba_array
    from matplotlib.patches import Rectangle

    matrix = document.result.test.confusion
    if not matrix:
        return None
    names, few = document.data.class_names, len(matrix) <= _CELLS
    drawing = Drawing("confusion", 5.0, 4.8)
    axes = drawing.axes
    shares = np.array([[each / (sum(row) or 1) for each in row] for row in matrix])
    if few:
        for (i, j), count in np.ndenumerate(np.array(matrix)):
            paint, share = COLOURS["accent" if i == j else "other"], float(shares[i, j])
            cell = Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=paint, alpha=max(0.004, 0.85 * share), lw=0)
            words = "" if i == j else f"\ntaken for {names[j]}"
            drawing.tip(axes.add_patch(cell), f"{names[i]}{words}\n{count:,} images, {percent(share)} of the class")
            if len(matrix) <= 12 and count:
                axes.text(j, i, str(count), ha="center", va="center", color=COLOURS["text"], fontsize=9)
        axes.set_xticks(range(len(names)), [clean(name, _NAME) for name in names], rotation=90)
        axes.set_yticks(range(len(names)), [clean(name, _NAME) for name in names])
    else:
        pixels = np.empty((*shares.shape, 4))
        pixels[...] = to_rgba_array(COLOURS["other"])[0]
        pixels[np.diag_indices(len(shares))] = to_rgba_array(COLOURS["accent"])[0]
        pixels[..., 3] = shares**0.5  # so that rare mistakes are visible
        axes.imshow(pixels, interpolation="nearest")
    axes.set_xlim(-0.5, len(matrix) - 0.5)
    axes.set_ylim(len(matrix) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_aspect("equal")
    drawing.label("predicted class" + ("" if few else " (number)"), "true class", legend=0)
    right = sum(row[at] for at, row in enumerate(matrix)) / (sum(map(sum, matrix)) or 1)
    return drawing.finish(f"Confusion matrix of {len(matrix)} classes; {percent(right)} lies on the diagonal.")


def list_confusions(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """True class, predicted class, count and share of the true class for each confusion, most frequent first."""
    wrong = [(count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count]
    ranked = sorted(wrong, key=lambda each: (-each[0], each[1:]))
    return [(names[i], names[j], f"{count:,}", percent(count / sum(matrix[i]))) for count, i, j in ranked]


# ---- single images


def list_samples(document: PortDocument, thumbnails: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """The kinds of sample images, with their counts and the images shown; empty if no image is shown."""
    facts, names = document.samples or {}, document.data.class_names
    if not thumbnails:
        return []
    found = []
    for kind, words in KINDS.items():
        images = [each for each in facts.get("images", ()) if each["kind"] == kind and each["number"] in thumbnails]
        if count := facts.get("counts", {}).get(kind, 0):
            shown = [_describe_image(each, names, thumbnails[each["number"]]) for each in images]
            words = words if facts.get("theirs") else _ALONE[kind]
            found.append({"words": words, "count": count, "images": shown})
    return found


def _describe_image(facts: dict[str, Any], names: list[str], picture: bytes) -> dict[str, Any]:
    said = [
        {"who": find_contender(who).short, "name": _name(names, guess), "right": guess == facts["label"]}
        for who, guess in facts["predictions"].items()
    ]
    label = _name(names, facts["label"])
    kind = "image/jpeg" if picture.startswith(b"\xff\xd8") else "image/png"
    words = "; ".join(f"{each['who']} says {each['name']}" for each in said)
    return {
        "address": f"data:{kind};base64,{base64.b64encode(picture).decode()}",
        "label": label,
        "said": said,
        "alt": f"Test image {facts['number']}: {label}. {words}.",
    }


def draw_samples(document: PortDocument, thumbnails: Mapping[int, bytes]) -> Chart | None:
    """All sample images on one sheet, saved as a file; the page shows them one by one."""
    from PIL import Image

    images = [each for each in (document.samples or {}).get("images", ()) if each["number"] in thumbnails]
    if not images:
        return None
    names, rows = document.data.class_names, -(-len(images) // _COLUMNS)
    drawing = Drawing("samples", 7.2, 1.75 * rows)
    axes = drawing.axes
    for place, each in enumerate(images):
        x, y = place % _COLUMNS, place // _COLUMNS * 1.5
        with Image.open(io.BytesIO(thumbnails[each["number"]])) as picture:
            shape = picture.convert("RGB")
        wide, high = (0.43 * length / max(shape.size) for length in shape.size)
        axes.imshow(shape, extent=(x - wide, x + wide, y + high, y - high), interpolation="nearest")
        lines = [clean(_name(names, each["label"]), 16)]
        lines += [
            f"{find_contender(who).short}: {clean(_name(names, guess), 11)}"
            for who, guess in each["predictions"].items()
        ]
        axes.text(x, y + 0.48, "\n".join(lines), ha="center", va="top", fontsize=6.5, color=COLOURS["text"])
    axes.set_xlim(-0.55, _COLUMNS - 0.45)
    axes.set_ylim(1.5 * rows - 0.45, -0.55)
    axes.set_axis_off()
    return drawing.finish(f"{len(images)} test images, each with its label and the predictions of the models.")


def _name(names: list[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)
