"""One palette for charts, pictures and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_retarget.contenders import contenders
from hf_retarget.graph import Group
from hf_retarget.inspection.picture import Lane, gain_colour
from hf_retarget.inspection.roles import Role
from hf_retarget.report import Drawing, page, render
from hf_retarget.report.page import PALETTE, all_colours

TEMPLATES = sorted((Path(page.__file__).parent / "templates").iterdir())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_use_only_the_palette(path):
    text = path.read_text(encoding="utf-8")
    used = set(re.findall(r"var\(--([a-z]+\d?)[,)]", text))
    assert used <= {*PALETTE, "c", "width"}  # two that an element sets itself
    assert not re.search(r"#[0-9a-f]{6}", text)


def test_every_page_has_every_colour_for_light_and_dark_screens():
    style = render("base.html", title="x").partition("</style>")[0]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    for name, (on_light, on_dark) in all_colours().items():
        assert f"--{name}: {on_light};" in light
        assert f"--{name}: {on_dark};" in dark


def test_charts_use_the_colours_of_the_page():
    drawing = Drawing("x")
    painted = {each.name: each.colours for each in contenders()} | {"gain1": PALETTE["gain1"]}
    for light, _ in painted.values():
        drawing.axes.plot([0, 1], [0, 1], color=light)
    chart = drawing.finish("lines")
    for name, (light, _) in painted.items():
        assert light in chart.svg
        assert f"var(--{name})" in chart.inline, "not another name of the same light colour"
        assert light not in chart.inline


def test_contenders_have_distinct_colours():
    for screen in (0, 1):
        colours = [each.colours[screen] for each in contenders()]
        assert len(set(colours)) == len(colours)


def test_groups_use_the_palette():
    group = Group("x", 4)
    for role in Role:
        assert {Lane(group, role, 0, 0, 0, shade).colour for shade in range(9)} <= set(PALETTE)
    assert {gain_colour(gain) for gain in (None, 0.0, 0.2, 0.3, 1.0)} <= set(PALETTE)
