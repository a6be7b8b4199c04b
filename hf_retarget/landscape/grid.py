"""Where to look: points on a regular grid around the corners, a coarse grid first and the finer ones after it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_retarget.errors import RetargetError
from hf_retarget.landscape.basis import Basis, Shares

_COARSE = 4
"""Points along a side of the first grid, at least: fewer make no picture."""


@dataclass(frozen=True)
class Point:
    """A place, and how much of each corner it consists of."""

    x: float
    y: float
    shares: Shares


@dataclass(frozen=True)
class Grid:
    """The corners, and the crossings of some columns and rows, in the order in which they are looked at."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    """One row for a line."""
    corners: tuple[Point, ...]
    levels: tuple[tuple[Point, ...], ...]
    """What each level adds to the one before; after each there is a whole, finer grid. The first has the corners."""
    axes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """The columns and rows that are complete after each level."""

    def __len__(self) -> int:
        return sum(map(len, self.levels))


def lay_grid(basis: Basis, size: int, margin: float) -> Grid:
    """A grid with `size` points along each side, and a margin around the corners in parts of their extent.

    Example:
        >>> import torch
        >>> from hf_retarget.landscape.basis import span
        >>> basis = span([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], ["w"], "ab")
        >>> lay_grid(basis, 5, 0.0).x
        (0.0, 0.25, 0.5, 0.75, 1.0)
    """
    if size < 2:
        raise RetargetError(f"a grid of {size} points shows nothing; give at least 2 along a side")
    if not 0 <= margin <= 10:
        raise RetargetError(f"the margin is {margin}; give a part of the distance between the models, from 0 to 10")
    columns = _divide([x for x, _ in basis.places], size, margin)
    rows = (0.0,) if basis.is_line else _divide([y for _, y in basis.places], size, margin)
    corners = tuple(Point(x, y, basis.corner(number)) for number, (x, y) in enumerate(basis.places))
    seen = {corner.shares for corner in corners}
    levels: list[tuple[Point, ...]] = []
    axes = []
    for stride in _strides(size):
        across, down = _kept(len(columns), stride), _kept(len(rows), stride)
        points = [Point(columns[i], rows[j], basis.shares(columns[i], rows[j])) for j in down for i in across]
        fresh = [point for point in points if point.shares not in seen]
        seen |= {point.shares for point in fresh}
        levels.append(tuple(fresh) if levels else (*corners, *fresh))
        axes.append((across, down))
    return Grid(columns, rows, corners, tuple(levels), tuple(axes))


def _divide(values: list[float], size: int, margin: float) -> tuple[float, ...]:
    low, high = min(values), max(values)
    edge = margin * (high - low)
    start, whole = low - edge, high - low + 2 * edge
    return tuple(start + whole * (number / (size - 1)) for number in range(size))


def _strides(size: int) -> list[int]:
    """Powers of two, from the coarsest that still makes a picture down to one."""
    stride = 1
    while len(_kept(size, 2 * stride)) >= _COARSE:
        stride *= 2
    return [stride >> halved for halved in range(stride.bit_length())]


def _kept(size: int, stride: int) -> tuple[int, ...]:
    """Every so many, and the last."""
    return tuple(sorted({*range(0, size, stride), size - 1}))
