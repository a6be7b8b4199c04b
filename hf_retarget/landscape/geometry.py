"""The line through two sets of weights and the plane through three: coordinates, grids of points, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_retarget.errors import ModelError, RetargetError

Tensors = Mapping[str, Tensor]
Shares = tuple[float, ...]
"""How much of each corner a point consists of; they add up to one."""

_FLAT = 1e-3
"""The sine of an angle below which a triangle counts as a line: rounding to half precision makes such angles."""


@dataclass(frozen=True, eq=False)
class Basis:
    """A line or a plane through corners.

    On a line, x goes from 0 at the first corner to 1 at the second. On a plane, x and y are distances in weight space
    along u and v (Garipov et al., 2018), and the first corner is the origin.
    """

    corners: tuple[Tensors, ...] = field(repr=False)
    places: tuple[tuple[float, float], ...]
    """x and y of each corner."""
    distances: tuple[tuple[float, ...], ...]
    """How far each corner is from each, in weight space."""

    @property
    def is_line(self) -> bool:
        """Whether there are two corners."""
        return len(self.corners) == 2

    def shares(self, x: float, y: float = 0.0) -> Shares:
        """How much of each corner the point at x, y consists of."""
        if self.is_line:
            return (1.0 - x, x)
        (_, _), (width, _), (over, height) = self.places
        third = y / height
        second = (x - third * over) / width
        return (1.0 - second - third, second, third)

    def corner(self, number: int) -> Shares:
        """The shares of a corner itself, exactly."""
        return tuple(float(each == number) for each in range(len(self.corners)))

    def weights(self, shares: Shares) -> dict[str, Tensor]:
        """The weights at a point; at a corner exactly those of the corner."""
        return mix(self.corners, shares)


def mix(corners: Sequence[Tensors], shares: Shares) -> dict[str, Tensor]:
    """Weighted sums of floating-point tensors, computed in float64; other tensors are those of the first corner.

    Example:
        >>> mix([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], (0.75, 0.25))
        {'w': tensor([0.2500, 0.2500])}
    """
    counted = [(share, corner) for share, corner in zip(shares, corners, strict=True) if share != 0.0]

    def mixed(name: str, first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first.clone()
        total = torch.zeros(first.shape, dtype=torch.float64)
        for share, corner in counted:
            total.add_(corner[name].double(), alpha=share)
        return total.to(first.dtype)

    return {name: mixed(name, first) for name, first in corners[0].items()}


def span(corners: Sequence[Tensors], names: Iterable[str], called: Sequence[str]) -> Basis:
    """The line through two sets of weights, or the plane through three; distances count the tensors in `names`.

    Example:
        >>> points = [{"w": torch.tensor(each)} for each in ([0.0, 0.0], [2.0, 0.0], [1.0, 3.0])]
        >>> span(points, ["w"], "abc").places
        ((0.0, 0.0), (2.0, 0.0), (1.0, 3.0))
    """
    chosen = list(names)
    distances = tuple(tuple(_distance(one, other, chosen) for other in corners) for one in corners)
    if len(corners) == 2:
        return Basis(tuple(corners), ((0.0, 0.0), (1.0, 0.0)), distances)
    _check_distinct(distances, called)
    origin, second, third = corners
    width = distances[0][1]
    inner = math.fsum(float(torch.dot(_edge(origin, second, n), _edge(origin, third, n))) for n in chosen)
    over = inner / width
    # Not by Pythagoras: the difference of two large squares would lose the digits of a flat triangle.
    height = math.hypot(
        *(float((_edge(origin, third, n) - over / width * _edge(origin, second, n)).norm()) for n in chosen)
    )
    if height < _FLAT * min(distances[0][2], distances[1][2]):
        raise ModelError(
            f"{_listed(called)} lie on one line in weight space, and span no plane; "
            "give the two at its ends: the line between them goes through the third"
        )
    return Basis(tuple(corners), ((0.0, 0.0), (width, 0.0), (over, height)), distances)


def _edge(start: Tensors, end: Tensors, name: str) -> Tensor:
    return (end[name].double() - start[name].double()).flatten()


def _distance(one: Tensors, other: Tensors, names: list[str]) -> float:
    return math.hypot(*(float(_edge(one, other, name).norm()) for name in names)) if one is not other else 0.0


def _check_distinct(distances: Sequence[Sequence[float]], called: Sequence[str]) -> None:
    for number, row in enumerate(distances):
        for other in range(number):
            if row[other] == 0.0:
                raise ModelError(
                    f"'{called[other]}' and '{called[number]}' have the same weights, and three models that are two "
                    "span no plane; give two models for the line between them"
                )


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"


# ---- grids

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
    """Every `stride`-th, and the last."""
    return tuple(sorted({*range(0, size, stride), size - 1}))
