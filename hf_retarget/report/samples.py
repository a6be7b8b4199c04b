"""Test images with what the models say about them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from hf_retarget.report.chart import COLOURS, Chart, Drawing, clean
from hf_retarget.report.classes import class_names
from hf_retarget.report.page import data_uri

Document = dict[str, Any]

KINDS = {"only ours": "Only the port is right", "only theirs": "Only the other is right"} | {
    "neither": "Both are wrong",
    "both": "Both are right",
}
_ALONE = {"neither": "The port is wrong", "both": "The port is right"}
"""The same where there is nothing to compare with."""
WHO = {"port": "port", "finetuned": "port + fine-tuning", "control": "plain", "masked": "mask", "naive": "naive"}
_COLUMNS = 6


def list_samples(document: Document, names: list[str], thumbnails: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """The kinds of images, each with how many there are and those that are shown; none if no image is to be shown."""
    facts = document.get("samples") or {}
    if not thumbnails:
        return []
    found = []
    for kind, words in KINDS.items():
        images = [each for each in facts.get("images", ()) if each["kind"] == kind and each["number"] in thumbnails]
        if count := facts.get("counts", {}).get(kind, 0):
            shown = [_image(each, names, thumbnails[each["number"]]) for each in images]
            words = words if facts.get("theirs") else _ALONE[kind]
            found.append({"words": words, "count": count, "images": shown})
    return found


def _image(facts: dict[str, Any], names: list[str], picture: bytes) -> dict[str, Any]:
    said = [
        {"who": WHO.get(who, who), "name": _name(names, guess), "right": guess == facts["label"]}
        for who, guess in facts["predictions"].items()
    ]
    label = _name(names, facts["label"])
    kind = "image/jpeg" if picture.startswith(b"\xff\xd8") else "image/png"
    words = "; ".join(f"{each['who']} says {each['name']}" for each in said)
    return {
        "address": data_uri(picture, kind),
        "label": label,
        "said": said,
        "alt": f"Test image {facts['number']}: {label}. {words}.",
    }


def draw_samples(document: Document, thumbnails: Mapping[int, bytes]) -> Chart | None:
    """All shown images on one sheet, as a file; the page shows them one by one."""
    from PIL import Image

    images = [each for each in (document.get("samples") or {}).get("images", ()) if each["number"] in thumbnails]
    if not images:
        return None
    names, rows = class_names(document), -(-len(images) // _COLUMNS)
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
            f"{WHO.get(who, who).split()[0]}: {clean(_name(names, guess), 11)}"
            for who, guess in each["predictions"].items()
        ]
        axes.text(x, y + 0.48, "\n".join(lines), ha="center", va="top", fontsize=6.5, color=COLOURS["text"])
    axes.set_xlim(-0.55, _COLUMNS - 0.45)
    axes.set_ylim(1.5 * rows - 0.45, -0.55)
    axes.set_axis_off()
    return drawing.finish(f"{len(images)} test images, each with its label and what the models say.")


def _name(names: list[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)
