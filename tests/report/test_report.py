"""The report on made-up ports: complete, small, reproducible, safe, and clear about missing parts."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hf_retarget.document import parse_document
from hf_retarget.report import compose_report
from hf_retarget.report.classes import draw_classes, list_confusions
from hf_retarget.report.figures import draw_curve, draw_price, draw_time, list_paid
from hf_retarget.report.report import list_facts, tabulate_steps

ALL = ["curve", "price", "gradients", "moved", "groups", "sweeps", "batchnorm", "classes", "confusion", "time"]
GRAPH = '<svg xmlns="http://www.w3.org/2000/svg" class="graph"><title>graph</title></svg>'


class Reader(HTMLParser):
    """Collects every tag with its attributes, and all text outside of style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "script"):
            self.text += data


@pytest.fixture(scope="module")
def whole(documents, thumbnails):
    """The report of a port with all parts."""
    return compose_report(documents(), thumbnails, GRAPH)


def pick(content: dict, name: str) -> dict:
    """One of the contenders, which a test may change."""
    return next(each for each in content["contenders"] if each["name"] == name)


def names(report) -> list[str]:
    return [chart.name for chart in report.charts]


def test_the_page_is_complete(whole, tmp_path):
    report = whole
    assert report.problems == ()
    assert names(report) == [*ALL, "samples"]
    page = Reader(report.html)
    text = " ".join(page.text.split())
    expected = ["Worth it", "+4.0 points (±1.5)", "best at step 4", "70.0%", "66.0%", "e" * 40, "ab" * 32, "torch 2.14"]
    for words in (*expected, "hf-retarget port --steps 5", "a note", "class 3", "10.0 s", "1.0 GB"):
        assert words in text, words
    assert text.index("Worth it") < text.index("How good is it?")
    assert "/home/somebody" not in report.html
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 12
    assert all(each["src"].startswith("data:image/jpeg;base64,") and each["alt"] for each in pictures)
    assert [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("class") == "chart"]
    report.save(tmp_path)
    made = {path.name for path in (tmp_path / "figures").iterdir()}
    assert made == {f"{name}.{ending}" for name in names(report) for ending in ("png", "svg")} | {"graph.svg"}


def test_the_page_is_self_contained(whole):
    html = whole.html
    for _, attributes in Reader(html).tags:
        for key in ("src", "href", "xlink:href", "srcset", "action", "poster"):
            assert attributes.get(key, "#").startswith(("#", "data:")), attributes
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_ids_are_unique_and_links_resolve(whole):
    tags = Reader(whole.html).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes[key] for _, attributes in tags for key in ("href", "xlink:href") if key in attributes]
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_the_same_port_gives_the_same_bytes(whole, document, thumbnails):
    again = compose_report(document, thumbnails, GRAPH)
    assert again.html == whole.html
    assert [(each.svg, each.png) for each in again.charts] == [(each.svg, each.png) for each in whole.charts]


def test_two_hundred_classes_take_less_than_two_megabytes(documents, thumbnails):
    labels = [f"{n:03}. A species of bird with quite a long name, number {n}" for n in range(200)]
    large = documents(classes=200, names=labels, groups=120, steps=40)
    report = compose_report(large, thumbnails, GRAPH + " " * 400_000)
    assert report.problems == ()
    assert len(report.html.encode()) < 2_000_000
    assert "The 15 classes with the largest lead" in report.html
    assert labels[117] in report.html, "all are in the table"


def test_malicious_names_are_escaped(evil, thumbnails):
    report = compose_report(evil, thumbnails, GRAPH)
    assert report.problems == ()
    page = Reader(report.html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert all(not key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert all(tag != "img" or attributes["src"].startswith("data:") for tag, attributes in page.tags)
    assert "49" not in page.text.partition("{{ 7 * 7 }}")[0][-20:]
    assert "{{ 7 * 7 }}" in page.text
    assert "<script>window.hacked = 1</script>" in page.text, "it is shown, as text"
    assert "\x00" not in report.html
    report.html.encode()  # no lone surrogates
    for chart in report.charts:
        ElementTree.fromstring(chart.svg)
        ElementTree.fromstring(chart.inline)
        assert "<script>" not in chart.inline


def test_stages_are_named_after_contenders(documents):
    drawn = draw_time(documents(seconds={"gradients": 2.0, "plain": 3.0, "plain: search": 1.0}))
    assert "plain fine-tuning, same price: search" in drawn.svg


def test_a_winner_without_a_permutation_moves_no_neurons(documents):
    document = documents()
    still = documents(permutation={**document.to_json()["permutation"], "moved": 0.0})
    assert "90% of the neurons moved" in compose_report(document).html
    assert "The winner leaves all neurons in place." in compose_report(still).html


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (
            {"lacking": ("plain", "finetuned"), "matching": {}, "seconds": {}},
            {"price", "moved", "groups", "sweeps", "time"},
        ),
        (
            {"samples": None, "batchnorm": {"layers": 0, "batches": 0, "statistics": {}}, "lacking": ("naive", "tuned")}
            | {"memory": {}, "peak_memory": None, "command": "", "notes": []},
            {"samples", "batchnorm"},
        ),
    ],
)
def test_missing_measurements_are_left_out(changes, missing, documents, thumbnails):
    report = compose_report(documents(**changes), thumbnails)
    assert report.problems == ()
    assert {*ALL, "samples"} - set(names(report)) == missing


def test_a_port_without_comparisons(documents):
    everybody = ("finetuned", "plain", "naive", "tuned", "base")
    report = compose_report(documents(steps=2, lacking=everybody, samples=None))
    assert report.problems == ()
    assert "There is no model to compare with." in report.html


def test_a_failing_picture_is_named_and_the_rest_is_kept(content):
    content["batchnorm"]["statistics"]["broken"] = {"before": None, "after": None}
    report = compose_report(parse_document(content))
    assert set(ALL) - set(names(report)) == {"batchnorm"}
    assert [problem.partition(":")[0] for problem in report.problems] == ["batchnorm"]
    assert "could not be drawn" in report.html
    assert "TypeError" in report.html


def test_the_price_counts_images(document):
    paid = {each.name: [spent for spent, _ in each.curve] for each in list_paid(document)}
    assert paid == {"fgmt": [128, 256, 384, 512, 640], "finetuned": [640, 800], "plain": [0, 320, 800]}
    chart = draw_price(document)
    for words in ("after 128 images", "after 640 images", "after 800 images"):
        assert words in chart.inline
    assert "plain fine-tuning, same price ends at 66.0%" in chart.alt


def test_captions_interpret_the_figures(content):
    document = parse_document(content)
    assert "(naive port), it reaches 25.0%" in draw_curve(document).caption
    assert "falls to 50.0%" in draw_curve(document).caption
    assert "ends at 68.0%" in draw_price(document).caption
    content["matching_lead"] = {"value": 0.02, "error": 0.015}
    assert "matching is worth +2.0 points (±1.5, not shown to differ)" in draw_curve(parse_document(content)).caption
    pick(content, "plain")["lead"] = {"value": 0.1, "error": 0.02}
    assert "Its lead on the test images is +10.0 points (±2.0)." in draw_price(parse_document(content)).caption


def test_the_mask_alone_is_shown_with_the_naive_port(masked, thumbnails):
    document = parse_document(masked)
    chart, mask, naive = draw_curve(document), "mask alone, no matching", "naive port, no matching"
    assert f"step 3\n{document.port.row.label}: 48.0%\n{mask}: 45.0%\n{naive}: 25.0%" in chart.inline
    assert f"{mask}: at best 45.0%; {naive}: at best 25.0%" in chart.alt
    assert ("50.0%", mask, "naive-sign") in list_facts(document)
    columns, rows = tabulate_steps(document)
    assert {row[columns.index("mask alone")] for row in rows} == {"45.0%"}
    assert "(mask alone), it reaches 45.0%" in draw_curve(document).caption
    masked["contenders"].remove(pick(masked, "plain"))
    without = parse_document(masked)
    assert without.rival.name == "naive-sign", "what the verdict compares the matching with"
    assert "mask alone" in draw_classes(without).inline
    assert compose_report(without, thumbnails).problems == ()


@pytest.mark.parametrize("method", ["naive", "naive-sign"])
def test_a_port_without_matching_gets_no_credit_for_it(method, masked):
    port = pick(masked, "fgmt-sign") | {"name": method}
    beside = ["naive", "tuned"] if method == "naive-sign" else ["tuned"]
    masked |= {"winner": method, "contenders": [port, *(pick(masked, name) for name in beside)]}
    document = parse_document(masked)
    assert "matching" not in draw_curve(document).caption
    assert [kind for *_, kind in list_facts(document)].count(method) == 1
    assert document.rival is (document.find("naive") if method == "naive-sign" else None)
    assert compose_report(document).problems == ()


def test_small_shares_have_distinct_axis_labels(documents):
    low = documents(classes=200, steps=5, lacking=("naive", "tuned", "plain"))
    steps = tuple(replace(each, top1=0.01) for each in low.port.steps)
    low = replace(low, contenders=(replace(low.port, steps=steps), *low.contenders[1:]))
    marks = re.findall(r">([\d.]+%)<", draw_curve(low).inline)
    assert len(marks) == len(set(marks)) > 2


def test_only_contenders_that_ran_have_a_column(document):
    columns, rows = tabulate_steps(document)
    assert columns == ("step", "way", "port", "loss", "naive", "moved", "sweeps", "time")
    assert {len(row) for row in rows} == {8}


def test_sample_images_are_optional(document):
    page = compose_report(document).html
    assert "single images" not in page
    assert "#images" not in page


def test_sample_images_without_a_rival_are_right_or_wrong(content, thumbnails):
    content["samples"] |= {"theirs": None, "counts": {"only ours": 0, "only theirs": 0, "neither": 30, "both": 55}}
    page = compose_report(parse_document(content), thumbnails).html
    assert "The port is wrong: 30 test images" in page
    assert "The port is right: 55 test images" in page


@pytest.mark.parametrize(("height", "folded"), [(600, False), (5000, True)])
def test_the_picture_of_a_deep_network_is_folded(documents, height, folded):
    page = compose_report(documents(), graph=f'<svg width="860" height="{height}"></svg>').html
    assert ("<details><summary>The picture" in page) is folded
    assert ("<details open><summary>The picture" in page) is not folded


def test_a_graph_without_gains_has_no_legend_for_them(document):
    assert "coloured by the gain from matching" in compose_report(document, graph=GRAPH).html
    page = compose_report(replace(document, matching={}), graph=GRAPH).html
    assert "<h3>The network</h3>" in page
    assert "not measured" not in page


def test_the_most_frequent_mistakes_come_first():
    confusion = [[5, 1, 0, 0], [4, 2, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0]]
    assert list_confusions(confusion, [f"class {number}" for number in range(4)])[:2] == [
        ("class 1", "class 0", "4", "66.7%"),
        ("class 3", "class 1", "3", "100.0%"),
    ]
