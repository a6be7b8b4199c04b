"""The pictures and pages of planes, from figures alone: malicious names, unusual values, and a real browser."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from chromium import PROGRAM, browse

from hf_retarget.errors import RetargetError
from hf_retarget.report.plane import draw_plane, draw_plane_page, show_in_report

NASTY = ["<img src=x onerror=alert(1)>", "$x^2$ & \"quoted\" 'name'", "مرحبا " + "very long " * 12]


def make_figures(models: int = 3, size: int = 6, scale: float = 1.0, loss=lambda x, y: 1 + x * x + y * y) -> dict:
    """A made-up plane.json."""
    names = NASTY[:models]
    line = models == 2
    places = [(0.0, 0.0), (1.0, 0.0), (0.4, scale)][:models]
    axis = [number / (size - 1) for number in range(size)]
    columns, rows = axis, [0.0] if line else [scale * each for each in axis]
    points = [{"x": x, "y": y, "shares": [float(i == n) for i in range(models)]} for n, (x, y) in enumerate(places)]
    points += [
        {"x": x, "y": y, "shares": [1 - x] + [x] + [0.0] * (models - 2)}
        for y in rows
        for x in columns[: -1 if line else None]
        if x or not line
    ]
    for point in points:
        point |= {
            "loss": loss(point["x"], point["y"]),
            "top1": 0.5 + 0.4 * math.sin(4 * point["x"] + point["y"]),
            "top5": None,
        }
    sides = [
        {"name": name, "reference": name, "x": x, "y": y, "permuted": None, "top1": 0.5, "loss": 1.0}
        for name, (x, y) in zip(names, places, strict=True)
    ]
    return {
        "kind": "line" if line else "plane",
        "finished": True,
        "models": sides,
        "distances": [[0.0] * models] * models,
        "barrier": {"loss": 0.4, "loss_at": 0.5, "top1": 0.1, "top1_at": 0.25} if line else None,
        "grid": {"x": columns, "y": rows, "planned": size},
        "points": points,
        "data": {"name": NASTY[0], "split": "test", "images": 100},
        "options": {"bn_batches": 2, "batch_size": 8, "seed": 0},
        "notes": [NASTY[0]],
        "command": NASTY[1],
    }


@pytest.mark.parametrize(
    "options",
    [
        {"models": 2},
        {},
        {"scale": 0.02},
        {"scale": 40.0},
        {"size": 2},
        {"size": 30},
        {"loss": lambda x, y: None},
        {"loss": lambda x, y: 2.0},
        {"loss": lambda x, y: None if x > 0.5 else 1e30 * (1 + x)},
        {"loss": lambda x, y: 1e-9 * (1 + x)},
        {"models": 2, "loss": lambda x, y: None},
    ],
)
def test_unusual_figures_are_drawn(options):
    chart = draw_plane(make_figures(**options))
    assert ElementTree.fromstring(chart.svg).tag.endswith("svg")
    assert chart.png.startswith(b"\x89PNG")
    assert "<img" not in chart.svg + chart.inline
    assert len(chart.svg) < 600_000, "however fine the grid"


def test_a_page_of_another_origin_is_not_changed(tmp_path):
    (tmp_path / "report.html").write_text("<html></html>")
    with pytest.raises(RetargetError, match="not the report of a port"):
        show_in_report(tmp_path / "report.html", make_figures())
    assert (tmp_path / "report.html").read_text() == "<html></html>"


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")
def test_the_pages_in_a_browser(tmp_path):
    for models in (2, 3):
        (tmp_path / f"{models}.html").write_text(draw_plane_page(make_figures(models)))
    with browse(tmp_path) as browser:
        for models in (2, 3):
            page = browser.page()
            page.resize(1100)
            page.open(tmp_path / f"{models}.html")
            assert page.run("document.querySelectorAll('img, script').length") == 1
            page.run("document.querySelector('svg.chart').scrollIntoView({behavior: 'instant'})")
            spot = "document.querySelectorAll('svg.chart .spot')[3].getBoundingClientRect()"
            page.point(page.run(f"{spot}.x + {spot}.width / 2"), page.run(f"{spot}.y + {spot}.height / 2"))
            assert "accuracy" in page.run("document.getElementById('tooltip').textContent")
            page.resize(380)
            assert page.run("document.documentElement.scrollWidth") <= 380
            assert page.complaints == []
            assert page.requests == []
