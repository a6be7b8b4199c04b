"""The picture and the page: well-formed, complete, and safe."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree

import pytest

from hf_retarget.graph import PermutationGraph
from hf_retarget.inspection import draw_page, draw_picture
from hf_retarget.inspection.picture import sketch
from hf_retarget.inspection.roles import Role

SVG = "{http://www.w3.org/2000/svg}"
GRAPHS = ["vit", "deep_vit", "evil", "dense", "grouped", "gated"]


def parse(graph: PermutationGraph, name: str = "pico", everything: bool = True) -> ElementTree.Element:
    return ElementTree.fromstring(draw_picture(graph, name, everything))


@pytest.mark.parametrize("name", GRAPHS)
def test_the_picture_is_well_formed_and_contains_every_group(name, request):
    graph = request.getfixturevalue(name)
    root = parse(graph)
    assert root.tag == f"{SVG}svg"
    drawn = {node.get("data-g") for node in root.iter(f"{SVG}g") if "group" in node.get("class", "").split()}
    assert drawn == {str(number) for number in range(len(graph.groups))}
    titles = "\n".join(node.text or "" for node in root.iter(f"{SVG}title"))
    assert all(group.name in titles for group in graph.groups)


@pytest.mark.parametrize("name", GRAPHS)
def test_overlapping_lanes_never_share_a_column(name, request):
    for one, other in combinations(sketch(request.getfixturevalue(name)).lanes, 2):
        apart = one.last < other.first or other.last < one.first
        assert apart or one.column != other.column


def test_every_line_and_mark_has_a_tooltip(vit):
    for node in parse(vit).iter(f"{SVG}g"):
        if {"group", "row", "leads", "start"} & set(node.get("class", "").split()):
            assert node.find(f"{SVG}title") is not None


def test_the_stream_is_leftmost_and_heads_are_beside_their_inner_groups(vit):
    plan = sketch(vit)
    stream = next(lane for lane in plan.lanes if lane.role is Role.STREAM)
    assert stream.column == 0
    assert (plan.rows[stream.first].name, plan.rows[stream.last].name) == ("pos_embed", "head")
    assert len(plan.bundles) == 4
    for bundle in plan.bundles:
        columns = [lane.column for lane in bundle]
        assert columns == list(range(columns[0], columns[0] + 3))
        assert bundle[0].role is Role.HEADS


def test_a_weight_reads_its_input_and_writes_its_output(vit):
    rows = {row.name: row.flow for row in sketch(vit).rows}
    assert (rows["blocks.0.fc1"].reads, rows["blocks.0.fc1"].writes) == (("embed",), ("blocks.0.fc1",))
    assert rows["blocks.0.fc1"].touches == (), "its bias rides along"
    assert rows["blocks.0.norm"].touches == ("embed",)
    assert rows["embed"].reads == (("input", 7),)
    assert rows["head"].writes == (("output", 10),)
    assert not rows["pos_embed"].leads


def test_a_concatenation_reads_all_of_its_segments(dense):
    rows = {row.name: row.flow for row in sketch(dense).rows}
    assert rows["b"].reads == ("stem", "a")


def test_a_deep_model_shows_the_first_and_last_of_many_equal_blocks(deep_vit):
    names = [row.name for row in sketch(deep_vit).rows]
    assert "blocks.1 … blocks.38" in names
    assert "blocks.0.fc1" in names
    assert "blocks.39.fc1" in names
    assert "blocks.7.fc1" not in names
    assert "38 more blocks like blocks.0" in draw_picture(deep_vit, "pico")
    assert "blocks.7.fc1" in [row.name for row in sketch(deep_vit, everything=True).rows]


def test_light_and_dark(vit):
    assert "prefers-color-scheme: dark" in draw_picture(vit, "pico")


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_names_are_escaped(evil):
    name = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    root = parse(evil, name)
    assert not [node for node in root.iter() if node.tag in (f"{SVG}script", f"{SVG}img")]
    reader = read(draw_page(evil, name))
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert not [key for key, _ in reader.attributes if key.startswith("on")]


def test_the_page_needs_no_network(vit):
    page = draw_page(vit, "pico")
    reader = read(page)
    assert not {"img", "iframe"} & set(reader.tags)
    addresses = [value for key, value in reader.attributes if key in ("src", "href", "xlink:href")]
    assert all(value.startswith(("#", "data:")) for value in addresses)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_page_lists_every_axis_and_reason(vit):
    page = draw_page(vit, "pico")
    assert page.startswith("<!doctype html>")
    assert 'name="viewport"' in page
    for group in vit.groups:
        for axis in group.axes:
            assert f">{axis}<" in page
    assert all(f">{reason}<" in page for reason in ("input", "output", "spatial"))


def test_rows_of_the_table_refer_to_lanes_of_the_picture(vit):
    page = draw_page(vit, "pico")
    assert all(page.count(f'data-g="{number}"') == 3 for number in range(len(vit.groups))), "lane, label, table row"
