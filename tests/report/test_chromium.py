"""The report in a real browser: no requests, values on hover, dark mode, narrow screens, print, and safety."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_retarget import trace
from hf_retarget.inspection import draw_fit, draw_page
from hf_retarget.report import compose_report


@pytest.fixture(scope="module")
def report(documents, thumbnails, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    compose_report(documents(), thumbnails).save(folder)
    return folder / "report.html"


PLACE = """(() => { const chart = document.querySelector('[aria-label^="Validation accuracy over 5 steps"]');
chart.scrollIntoView({block: 'center', behavior: 'instant'});
const spot = chart.querySelectorAll('.spot')[2].getBoundingClientRect();
return [spot.left + spot.width / 2, spot.top + spot.height / 2]; })()"""
TOOLTIP = "document.getElementById('tooltip').hidden ? null : document.getElementById('tooltip').innerText"


def test_it_loads_without_errors_or_network(page, report):
    shown = page()
    shown.open(report)
    assert shown.complaints == []
    assert shown.requests == []
    assert shown.run("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert shown.run("document.querySelectorAll('svg.chart').length") == 10


def test_hovering_shows_values(page, report):
    shown = page()
    shown.resize(1100)
    shown.open(report)
    assert shown.run(TOOLTIP) is None
    shown.point(*shown.run(PLACE))
    assert shown.run(TOOLTIP).splitlines()[:3] == [
        "step 3",
        "port by fgmt: 48.0%",
        "naive port, no matching: 25.0%",
    ]
    box = shown.run("(({left, right}) => [left, right])(document.getElementById('tooltip').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 1100
    shown.point(1, 1)
    assert shown.run(TOOLTIP) is None


def test_the_keyboard_shows_values(page, report):
    shown = page()
    shown.open(report)
    shown.run("document.querySelector('[aria-label^=\"Validation accuracy over 5 steps\"]').focus()")
    shown.press("ArrowRight")
    assert shown.run(TOOLTIP).startswith("step 1\n")
    shown.press("ArrowRight")
    assert shown.run(TOOLTIP).startswith("step 2\n")
    shown.press("Escape")
    assert shown.run(TOOLTIP) is None


def test_dark_mode_is_readable(page, report):
    shown = page()
    shown.open(report)
    found = {}
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        found[scheme] = shown.run(CONTRAST)
    assert found["light"]["ground"] > 0.9
    assert found["dark"]["ground"] < 0.05
    for scheme, facts in found.items():
        assert facts["worst"] >= 4.5, (scheme, facts)


# The luminance of the ground, and the lowest contrast of any text on it (WCAG asks for 4.5), in charts, too.
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const luminance = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = luminance(getComputedStyle(document.body).backgroundColor);
  const ratio = (one, two) => (Math.max(one, two) + .05) / (Math.min(one, two) + .05);
  let worst = 99, where = '';
  const words = 'h1, h2, h3, p, b, span, a, figcaption, th, td, summary, svg.chart text';
  for (const node of document.querySelectorAll(words)) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    if (node.closest('.samples i')) continue;
    const style = getComputedStyle(node);
    const box = node.closest('.verdict');
    const under = box ? luminance(getComputedStyle(box).backgroundColor) : ground;
    const found = ratio(luminance(node.tagName === 'text' ? style.fill : style.color), under);
    if (found < worst) { worst = found; where = `${node.tagName} ${node.textContent.slice(0, 30)}`; }
  }
  return { ground, worst, where };
})()"""


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_need_no_horizontal_scrolling(width, page, report):
    shown = page()
    shown.resize(width)
    shown.open(report)
    assert shown.run("document.documentElement.scrollWidth") <= width
    smallest = shown.run("""Math.min(...[...document.querySelectorAll('svg.chart text')]
        .map((text) => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a))""")
    assert smallest > 6.5, "the words in charts stay readable"


def test_it_prints(page, report, tmp_path):
    shown = page()
    shown.prefer("dark")
    shown.open(report)
    shown.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert shown.run("document.querySelector('details.print').open"), "on paper one cannot click"


def test_print_is_white_in_dark_mode(page, documents, tmp_path):
    graph = draw_fit(
        trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), example_input=torch.zeros(1, 4)), "m", {}, {}
    )
    compose_report(documents(), graph=graph).save(tmp_path)
    shown = page()
    shown.open(tmp_path / "report.html")
    grounds = (
        "['body', '.graph'].map((each) => getComputedStyle(document.querySelector(each)).getPropertyValue('--bg'))"
    )
    found = {}
    for media in ("screen", "print"):
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        shown.call("Emulation.setEmulatedMedia", media=media, features=dark)
        found[media] = shown.run(grounds)
    assert set(found["print"]) == {"#ffffff"}
    assert "#ffffff" not in found["screen"]


def test_the_page_of_a_graph_supports_pointer_and_keyboard(page, tmp_path):
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2)), example_input=torch.zeros(1, 4))
    (tmp_path / "graph.html").write_text(draw_page(graph, "pico"), encoding="utf-8")
    shown = page()
    shown.resize(1100, 1200)
    shown.open(tmp_path / "graph.html")
    assert (shown.complaints, shown.requests) == ([], [])
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        assert shown.run(CONTRAST)["worst"] >= 4.5
    lane = "document.querySelector('.group .reach').getBoundingClientRect()"
    picked = "[...document.querySelectorAll('tr.picked')].map((row) => row.cells[0].innerText)"
    shown.point(*shown.run(f"(({{left, right, top}}) => [(left + right) / 2, top + 9])({lane})"))
    assert shown.run(TOOLTIP).startswith("0 (4): inner")
    assert shown.run(picked) == ["0"]
    shown.point(1, 1)
    assert (shown.run(TOOLTIP), shown.run(picked)) == (None, [])
    shown.run("document.querySelector('.scroll > .graph').focus()")
    for _ in range(2):
        shown.press("ArrowDown")
    assert shown.run(picked) == ["1"]
    shown.press("Escape")
    assert (shown.run(TOOLTIP), shown.run(picked)) == (None, [])


def test_malicious_names_are_escaped(page, evil, thumbnails, tmp_path):
    compose_report(evil, thumbnails).save(tmp_path)
    shown = page()
    shown.resize(390)
    shown.open(tmp_path / "report.html")
    assert shown.run("window.hacked") is None
    assert shown.complaints == []
    assert shown.requests == []
    assert shown.run("document.querySelectorAll('svg.chart').length") == 10
    assert shown.run("document.documentElement.scrollWidth") <= 390
