"""Pages about what is between models: one of its own, and a section in the report of a port."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_retarget.report.chart import Chart
from hf_retarget.report.page import number, percent, render
from hf_retarget.report.plane import describe_plane, draw_plane

Figures = Mapping[str, Any]

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
