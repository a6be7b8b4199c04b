"""Where everything goes in the picture: modules become rows, groups become lanes, as in ``git log --graph``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from hf_retarget.inspection.flow import Flow, flows, join
from hf_retarget.inspection.folding import Run, repeated_blocks
from hf_retarget.inspection.roles import Role, roles

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph

_MANY_ROWS = 150
# Tensors that belong to their module; any other, say `pos_embed`, gets a row under its own name.
_ORDINARY = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True)
class Row:
    """One module: its tensors and what they read and write. A row with `folded` stands for several blocks."""

    name: str
    tensors: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    flow: Flow = field(default_factory=Flow)
    folded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """One group: a vertical line in a column, from the first row that it touches to the last."""

    group: Group
    role: Role
    column: int
    first: int
    last: int
    shade: int
    """Tells neighbours with the same role apart."""


@dataclass(frozen=True)
class Bundle:
    """Heads or convolution groups: the lanes that lie together because one permutes the blocks of the others."""

    lanes: tuple[Lane, ...]

    @property
    def first(self) -> int:
        """The first row."""
        return min(lane.first for lane in self.lanes)

    @property
    def last(self) -> int:
        """The last row."""
        return max(lane.last for lane in self.lanes)


@dataclass(frozen=True)
class Sketch:
    """Rows and lanes, ready to be drawn."""

    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    bundles: tuple[Bundle, ...]

    @property
    def columns(self) -> int:
        """How many lanes lie side by side."""
        return max((lane.column + 1 for lane in self.lanes), default=0)


def sketch(graph: PermutationGraph, everything: bool = False) -> Sketch:
    """Lay out a graph. Long models show the first and the last of many blocks that are alike, unless `everything`."""
    rows = _rows(graph)
    if len(rows) > _MANY_ROWS and not everything:
        rows = _fold(rows, repeated_blocks(graph, shortest=4))
    role_of = roles(graph)
    spans: dict[str, tuple[int, int]] = {}
    for number, row in enumerate(rows):
        for name in row.flow.groups:
            spans[name] = (spans.get(name, (number,))[0], number)
    shown = [group for group in graph.groups if group.name in spans]
    lanes: list[Lane] = []
    bundles: list[Bundle] = []
    occupied: list[list[tuple[int, int]]] = []
    for unit in _units(shown, role_of, spans):
        placed = _place(unit, role_of, spans, lanes, occupied)
        lanes += placed
        if placed[0].role.is_outer or placed[0].role.is_per_block:
            bundles.append(Bundle(tuple(placed)))
    return Sketch(tuple(rows), tuple(lanes), tuple(bundles))


def _rows(graph: PermutationGraph) -> list[Row]:
    members: dict[str, list[str]] = {}
    for tensor in graph.layouts:
        module, _, leaf = tensor.rpartition(".")
        members.setdefault(module if leaf in _ORDINARY and module else tensor, []).append(tensor)
    flow_of = flows(graph)
    rows = []
    for name, tensors in members.items():
        flow = join(flow_of[tensor] for tensor in tensors)
        # A buffer that no group touches, say an index table, is not part of the picture.
        if flow.groups or flow.leads or any(tensor in graph.parameters for tensor in tensors):
            largest = max(tensors, key=lambda tensor: math.prod(graph.layouts[tensor].shape))
            rows.append(Row(name, tuple(tensors), graph.layouts[largest].shape, flow))
    return rows


def _fold(rows: Sequence[Row], runs: Iterable[Run]) -> list[Row]:
    # The first block shows what the others look like, and the last where the run ends: only the middle goes.
    middle = {block: run for run in runs for block in run.blocks[1:-1]}

    def run_of(row: Row) -> Run | None:
        parts = row.name.split(".")
        return next((middle[block] for i in range(len(parts)) if (block := ".".join(parts[:i])) in middle), None)

    folded: list[Row] = []
    for run, alike in groupby(rows, key=run_of):
        if run is None:
            folded += alike
        else:
            blocks = run.blocks[1:-1]
            folded.append(Row(f"{blocks[0]} … {blocks[-1]}", folded=(run.blocks[0], *blocks)))
    return folded


def _units(shown: Sequence[Group], role_of: dict[str, Role], spans: dict[str, tuple[int, int]]) -> list[list[Group]]:
    # What must lie side by side: heads with their insides; everything else alone. Streams come first, so that
    # they get the leftmost columns, then units in the order of their first row.
    units: dict[str, list[Group]] = {group.name: [group] for group in shown if not role_of[group.name].is_per_block}
    for group in shown:
        if role_of[group.name].is_per_block:
            outer = next((name for name in group.outer if name in units and role_of[name].is_outer), group.name)
            units.setdefault(outer, []).append(group)

    def order(unit: list[Group]) -> tuple[bool, int, int]:
        first, last = _span(unit, spans)
        return role_of[unit[0].name] is not Role.STREAM, first, -last

    return sorted(units.values(), key=order)


def _span(unit: Sequence[Group], spans: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return min(spans[group.name][0] for group in unit), max(spans[group.name][1] for group in unit)


def _place(
    unit: Sequence[Group],
    role_of: dict[str, Role],
    spans: dict[str, tuple[int, int]],
    lanes: Sequence[Lane],
    occupied: list[list[tuple[int, int]]],
) -> list[Lane]:
    first, last = _span(unit, spans)
    role = role_of[unit[0].name]
    streams = (lane for lane in lanes if lane.role is Role.STREAM and lane.first <= last and lane.last >= first)
    column = 0 if role is Role.STREAM else max((lane.column + 1 for lane in streams), default=0)
    # One row of air at both ends keeps lanes that share a column from looking like one.
    while any(
        begin <= last + 1 and end >= first - 1
        for taken in occupied[column : column + len(unit)]
        for begin, end in taken
    ):
        column += 1
    while len(occupied) < column + len(unit):
        occupied.append([])
    shade = sum(lane.role is role for lane in lanes)
    placed = []
    for offset, group in enumerate(unit):
        occupied[column + offset].append((first, last))
        own_first, own_last = spans[group.name]
        own_shade = offset if len(unit) > 1 else shade
        placed.append(Lane(group, role_of[group.name], column + offset, own_first, own_last, own_shade))
    return placed
