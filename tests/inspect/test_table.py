"""The text views: plain columns for grep, and a folded table on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from hf_retarget.graph import PermutationGraph
from hf_retarget.inspection import print_summary, summarise
from hf_retarget.inspection.roles import Role


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text(graph: PermutationGraph, everything: bool = False, terminal: bool = False) -> str:
    file = Terminal() if terminal else io.StringIO()
    print_summary(summarise(graph, "pico"), file, everything)
    return file.getvalue()


def test_plain_text_has_one_line_for_every_group_and_no_escape_codes(vit):
    lines = text(vit).splitlines()
    for group in vit.groups:
        assert sum(line.split("  ")[0] == group.name for line in lines) == 1
    assert "\x1b" not in "".join(lines)
    assert all(line == line.rstrip() for line in lines)


def test_plain_text_is_aligned(vit):
    lines = text(vit).splitlines()
    header = next(line for line in lines if line.startswith("GROUP"))
    at = header.index("ROLE")
    rows = lines[lines.index(header) + 1 :][: len(vit.groups)]
    assert all(row[at - 1] == " " and row[at] != " " for row in rows)


def test_a_terminal_folds_equal_blocks(vit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folded, full = text(vit, terminal=True), text(vit, everything=True, terminal=True)
    assert "blocks.0.fc1" in folded
    assert "blocks.1.fc1" not in folded
    assert "blocks.0 … blocks.3: the same 4 groups in each of 4 blocks" in folded
    assert "blocks.1.fc1" in full


def test_figures(vit):
    summary = summarise(vit, "pico")
    assert (len(summary.groups), summary.per_block) == (17, 8)
    assert summary.share_on_one_free_axis == 1.0
    stream, heads, inner = summary.groups[0], summary.groups[1], summary.groups[2]
    assert (stream.role, stream.size_text, stream.outer_text) == (Role.STREAM, "12", "")
    assert (heads.role, heads.parameters) == (Role.HEADS, 3 * 144 + 144)
    assert (inner.role, inner.size_text, inner.outer_text) == (Role.PER_HEAD, "3 × 4", heads.name)
    assert inner.parameters == 2 * 144, "q and k, not v"


def test_pinned_axes_are_counted_by_reason(vit):
    reasons = {pinned.reason: (len(pinned.axes), pinned.axes[0]) for pinned in summarise(vit, "pico").pinned}
    assert reasons == {"spatial": (1, "pos_embed:1"), "input": (1, "embed.weight:1"), "output": (1, "head.weight:0")}


def test_unknown_operators_are_named(evil):
    assert "No axis rule for" in text(evil)


def test_rich_markup_in_a_name_is_shown_as_text(vit):
    renamed = replace(vit, groups=(replace(vit.groups[0], name="[red]x[/red]"), *vit.groups[1:]))
    assert "[red]x[/red]" in text(renamed)


def test_an_empty_graph_prints_its_figures():
    assert "none" in text(PermutationGraph((), {}))


def test_roles_of_grouped_convolutions(grouped):
    roles = {group.name: group.role for group in summarise(grouped, "pico").groups}
    assert roles == {"groups": Role.CONV_GROUPS, "in": Role.PER_CONV_GROUP, "out": Role.PER_CONV_GROUP}


def test_a_gate_inside_one_block_is_not_a_residual_stream(gated):
    roles = {group.name: group.role for group in summarise(gated, "pico").groups}
    assert roles["blocks.0.expand"] is Role.INNER
    assert roles["stem"] is Role.STREAM


def test_concatenated_groups_have_their_own_role(dense):
    roles = {group.name: group.role for group in summarise(dense, "pico").groups}
    assert roles == {"stem": Role.SEGMENT, "a": Role.SEGMENT, "b": Role.INNER}
