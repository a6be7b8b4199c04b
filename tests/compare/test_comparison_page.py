"""The comparison page in a real browser: the winner, all columns at 1280 px, legible text on a phone."""

from __future__ import annotations

import pytest
from chromium import PROGRAM, browse

import hf_retarget as rt
from hf_retarget.contenders import find_contender
from hf_retarget.report.comparison import draw_comparison_page, draw_curves, draw_prices

CUT = "[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1).length"
LETTERS = """[...document.querySelectorAll('svg.chart')].map((chart) =>
    chart.getBoundingClientRect().width / chart.viewBox.baseVal.width)"""


@pytest.fixture
def compared(port):
    names = ("tuned-head", "naive-line", "naive-head", "head", "matched", "whole", "whole-head")
    besides = [{"name": name, "role": "beside", "gradients": 0, "validation": 0.4,
                "test": {"top1": 0.4, "top5": None, "loss": 1.0, "images": 100}} for name in names]  # fmt: skip
    folders = [port(f"{method}-{seed}", top1, port__method=method, port__seed=seed, besides=besides)
               for method, top1 in (("fgmt", 0.6), ("gmt", 0.5)) for seed in (1, 2)]  # fmt: skip
    return rt.compare(folders).to_json()


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (Debian: apt install chromium)")
def test_the_page_fits_wide_and_narrow_screens(compared, tmp_path):
    path = tmp_path / "compare.html"
    path.write_text(draw_comparison_page(compared))
    with browse(tmp_path) as browser:
        page = browser.page()
        page.resize(1280)
        page.open(path)
        assert page.run(CUT) == 0
        assert page.run("document.querySelector('.verdict b').innerText") == "Best: fgmt"
        assert page.run("document.querySelectorAll('tr.best').length") == 1
        tops = page.run("[...document.querySelectorAll('svg.chart')].map((each) => each.getBoundingClientRect().top)")
        assert tops[0] == pytest.approx(tops[1], abs=40), "two charts beside each other"
        page = browser.page()
        page.resize(390)
        page.open(path)
        assert page.run("document.documentElement.scrollWidth") == 390
        assert min(page.run(LETTERS)) > 1.3, "a chart on a phone keeps the size of its letters"
        assert page.complaints == []


def test_a_contender_has_the_same_colour_everywhere(compared):
    page = draw_comparison_page(compared)
    assert 'var(--plain)"></i>plain' in page
    for draw, name in ((draw_curves, "fgmt"), (draw_curves, "gmt"), (draw_prices, "plain")):
        assert find_contender(name).colours[0] in draw(compared).svg
