"""The layout of the picture: modules become rows, groups become lanes, as in ``git log --graph``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import TYPE_CHECKING

from hf_retarget.inspection.blocks import Repeat, blocks_of, repeated_blocks
from hf_retarget.inspection.roles import Flow, Role, flows, join, roles

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph

_MANY_ROWS = 150
_SHADES = 4  # of each family of roles in the palette
# Tensors that belong to their module; any other, such as `pos_embed`, gets a row of its own.
_ORDINARY = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True)
class Row:
    """One module: its tensors and what they read and write. A row with `folded` stands for several blocks."""

    name: str
    tensors: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    flow: Flow = field(default_factory=Flow)
    folded: tuple[str, ...] = ()
    block: str = ""
    y: int = 0
    """Where its middle is."""

    @property
    def major(self) -> bool:
        """Whether it is a weight or stands for blocks, rather than a norm or a table."""
        return self.flow.leads or bool(self.folded)

    @property
    def height(self) -> int:
        """From its upper to its lower edge."""
        return 24 if self.major else 16

    @property
    def size(self) -> str:
        """The shape of its largest tensor, ``64×3×7×7``."""
        return "×".join(map(str, self.shape))

    @property
    def tip(self) -> str:
        """The row in words."""
        pinned_reads = [f"pinned {reason} of {size}" for reason, size in self.flow.pinned_reads]
        pinned_writes = [f"pinned {reason} of {size}" for reason, size in self.flow.pinned_writes]
        does = {
            "reads": (*self.flow.reads, *pinned_reads),
            "writes": (*self.flow.writes, *pinned_writes),
            "touches": self.flow.touches,
        }
        return "\n".join(
            [", ".join(self.tensors), *(f"{verb} {', '.join(names)}" for verb, names in does.items() if names)]
        )


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

    @property
    def x(self) -> int:
        """Where it is. Streams are thick, and what is beside them needs space on its left."""
        return 20 * self.column + (50 if self.role is Role.STREAM else 58)

    @property
    def colour(self) -> str:
        """Its name in the palette."""
        return f"{self.role.family}{self.shade % _SHADES}"

    @property
    def shape(self) -> str:
        """How it is drawn: a thick ``stream``, a ``bracket`` for blocks, ``strands`` for their insides, a ``line``."""
        if self.role.is_outer:
            return "bracket"
        return "strands" if self.role.is_per_block else "stream" if self.role is Role.STREAM else "line"

    @property
    def words(self) -> str:
        """The group in a few words: ``residual stream 192``, ``3 heads``, ``64 in each of 3 heads``."""
        if self.role.is_outer:
            return f"{self.group.size} {self.role.value}"
        if self.role.is_per_block:
            block = "heads" if self.role is Role.PER_HEAD else "groups"
            return f"{self.group.size} in each of {' × '.join(map(str, self.group.blocks))} {block}"
        return f"{self.role.value} {self.group.size}"


@dataclass(frozen=True)
class Sketch:
    """Rows and lanes, ready to be drawn."""

    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    bundles: tuple[tuple[Lane, ...], ...]
    """Lanes that lie together because one permutes the blocks of the others: heads or convolution groups."""


def sketch(graph: PermutationGraph, everything: bool = False) -> Sketch:
    """Lay out a graph. Of many blocks that are alike, long models show the first and the last, unless `everything`."""
    rows = _rows(graph)
    if len(rows) > _MANY_ROWS and not everything:
        rows = _fold(rows, repeated_blocks(graph, shortest=4))
    spans: dict[str, tuple[int, int]] = {}
    for number, row in enumerate(rows):
        for name in row.flow.groups:
            spans[name] = (spans.get(name, (number,))[0], number)
    units = _place([group for group in graph.groups if group.name in spans], roles(graph), spans)
    bundles = (unit for unit in units if unit[0].shape in ("bracket", "strands"))
    return Sketch(tuple(_stack(rows)), tuple(lane for unit in units for lane in unit), tuple(bundles))


def _rows(graph: PermutationGraph) -> list[Row]:
    members: dict[str, list[str]] = {}
    for tensor in graph.layouts:
        module, _, leaf = tensor.rpartition(".")
        members.setdefault(module if leaf in _ORDINARY and module else tensor, []).append(tensor)
    flow_of = flows(graph)
    rows = []
    for name, tensors in members.items():
        flow = join(flow_of[tensor] for tensor in tensors)
        # A buffer that no group touches, such as an index table, is not part of the picture.
        if flow.groups or flow.leads or any(tensor in graph.parameters for tensor in tensors):
            largest = max((graph.layouts[tensor].shape for tensor in tensors), key=math.prod)
            rows.append(Row(name, tuple(tensors), largest, flow))
    return rows


def _fold(rows: Sequence[Row], repeats: Iterable[Repeat]) -> list[Row]:
    # The first block shows what the others look like, and the last where they end: only the middle is folded.
    middle = {block: repeat for repeat in repeats for block in repeat.blocks[1:-1]}

    def repeat_of(row: Row) -> Repeat | None:
        parts = row.name.split(".")
        return next((middle[block] for i in range(len(parts)) if (block := ".".join(parts[:i])) in middle), None)

    folded: list[Row] = []
    for repeat, alike in groupby(rows, key=repeat_of):
        if repeat is None:
            folded += alike
        else:
            first, *blocks, _ = repeat.blocks
            folded.append(Row(f"{blocks[0]} … {blocks[-1]}", folded=(first, *blocks)))
    return folded


def _stack(rows: Sequence[Row]) -> list[Row]:
    blocks = blocks_of([row.name for row in rows], {row.name for row in rows if row.flow.leads})
    placed: list[Row] = []
    bottom = 0
    for row, block in zip(rows, blocks, strict=True):
        placed.append(replace(row, block=block, y=bottom + row.height // 2))
        bottom += row.height
    return placed


def _place(
    groups: Sequence[Group], role_of: dict[str, Role], spans: dict[str, tuple[int, int]]
) -> list[tuple[Lane, ...]]:
    # Streams come first, so that they get the leftmost columns; the others follow in the order of their first row.
    units = []
    for unit in _units(groups, role_of):
        first, last = min(spans[group.name][0] for group in unit), max(spans[group.name][1] for group in unit)
        units.append((role_of[unit[0].name] is not Role.STREAM, first, -last, unit))
    placed: list[tuple[Lane, ...]] = []
    taken: set[tuple[int, int]] = set()  # columns and rows
    for beside, first, minus_last, unit in sorted(units, key=lambda each: each[:3]):
        last, role = -minus_last, role_of[unit[0].name]
        streams = [
            lane for (lane, *_) in placed if lane.role is Role.STREAM and lane.first <= last and lane.last >= first
        ]
        column = max((lane.column + 1 for lane in streams), default=0) if beside else 0
        # One free row at both ends keeps lanes that share a column from looking like one.
        while not taken.isdisjoint(product(range(column, column + len(unit)), range(first - 1, last + 2))):
            column += 1
        taken.update(product(range(column, column + len(unit)), range(first, last + 1)))
        shade = sum(lane.role is role for other in placed for lane in other)
        placed.append(
            tuple(
                Lane(group, role_of[group.name], column + i, *spans[group.name], i if len(unit) > 1 else shade)
                for i, group in enumerate(unit)
            )
        )
    return placed


def _units(groups: Sequence[Group], role_of: dict[str, Role]) -> list[list[Group]]:
    # What must lie side by side: heads with their insides; everything else alone.
    units = {group.name: [group] for group in groups if not role_of[group.name].is_per_block}
    for group in groups:
        if role_of[group.name].is_per_block:
            outer = next((name for name in group.outer if name in units and role_of[name].is_outer), group.name)
            units.setdefault(outer, []).append(group)
    return list(units.values())
