"""Coordinates of the picture: from rows and columns to places on the page."""

from __future__ import annotations

from itertools import groupby

from hf_retarget.inspection.lanes import Row, Sketch
from hf_retarget.inspection.paths import blocks_of
from hf_retarget.inspection.roles import Role

_PITCH = 20.0
_LETTER = 7.25  # the width of a letter of the 12 px monospaced face, on the safe side
_SMALL_LETTER = 6.4


class Geometry:
    """Where the rows, the lanes and the columns of text of one sketch are."""

    def __init__(self, plan: Sketch, top: float) -> None:
        self.top = top + 34
        self.rows: list[tuple[Row, float]] = []
        y = self.top
        self._edges = []
        for row in plan.rows:
            height = 23.0 if row.flow.leads or row.folded else 16.0
            self.rows.append((row, y + height / 2))
            self._edges.append((y, y + height))
            y += height
        self.blocks = blocks_of([row.name for row in plan.rows], {row.name for row in plan.rows if row.flow.leads})
        self.pin_in = 18.0
        # Streams are thick, and what stands beside them needs air on its left.
        air = {lane.group.name: 0 if lane.role is Role.STREAM else 8 for lane in plan.lanes}
        self.lane_x = {lane.group.name: _PITCH * lane.column + 50 + air[lane.group.name] for lane in plan.lanes}
        self.pin_out = max(self.lane_x.values(), default=50) + 28
        self.name_x = self.pin_out + 26
        shown = [row for row in plan.rows if not row.folded]
        self.shape_x = self.name_x + 18 + max((_width(row, row.name) for row in shown), default=60)
        self.chip_x = self.shape_x + 18 + max((_width(row, shape_text(row)) for row in shown), default=40)
        self.width = max(self.chip_x + 330, 860.0)
        self.height = y + 18

    def y(self, row: int) -> float:
        """The middle of a row."""
        return self.rows[row][1]

    @property
    def bands(self) -> list[tuple[float, float]]:
        """The upper and lower edge of every other block."""
        stretches = []
        for block, rows in groupby(range(len(self.rows)), key=lambda i: self.blocks[i]):
            numbers = list(rows)
            if block:
                stretches.append((self._edges[numbers[0]][0], self._edges[numbers[-1]][1]))
        return stretches[::2]


def shape_text(row: Row) -> str:
    """The shape of a row's largest tensor, ``64×3×7×7``."""
    return "×".join(map(str, row.shape))


def _width(row: Row, text: str) -> float:
    return len(text) * (_LETTER if row.flow.leads else _SMALL_LETTER)
