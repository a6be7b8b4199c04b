"""The line through two sets of weights and the plane through three: coordinates, grids of points, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from hf_retarget.errors import ModelError, RetargetError

Tensors = Mapping[str, Tensor]
Shares = tuple[float, ...]
"""Barycentric coordinates of a point: the share of each corner, adding up to one."""

_FLAT = 1e-3
"""Sine of the angle below which a triangle counts as a line; rounding to half precision causes such angles."""
_COARSE = 4
"""Minimum number of points along a side of a picture."""


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
    """Distances between the corners in weight space."""

    @property
    def is_line(self) -> bool:
        """Whether it is a line, with two corners."""
        return len(self.corners) == 2

    def shares(self, x: float, y: float = 0.0) -> Shares:
        """The share of each corner at the point x, y."""
        if self.is_line:
            return (1.0 - x, x)
        _, (width, _), (over, height) = self.places
        third = y / height
        second = (x - third * over) / width
        return (1.0 - second - third, second, third)


def mix(corners: Sequence[Tensors], shares: Shares) -> dict[str, Tensor]:
    """Mix the weights of the corners; at a corner, its weights are returned exactly.

    Floating-point tensors are mixed in float64; other tensors are taken from the first corner.

    Example:
        >>> mix([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], (0.75, 0.25))
        {'w': tensor([0.2500, 0.2500])}
    """
    mixed = {name: first.clone() for name, first in corners[0].items()}
    for name, first in mixed.items():
        if first.is_floating_point():
            total = torch.zeros(first.shape, dtype=torch.float64)
            for share, corner in zip(shares, corners, strict=True):
                if share != 0.0:  # 0 × inf would be NaN
                    total.add_(corner[name].double(), alpha=share)
            mixed[name] = total.to(first.dtype)
    return mixed


def span(corners: Sequence[Tensors], names: Iterable[str], called: Sequence[str]) -> Basis:
    """The line through two sets of weights, or the plane through three; distances count the tensors in `names`.

    Example:
        >>> points = [{"w": torch.tensor(each)} for each in ([0.0, 0.0], [2.0, 0.0], [1.0, 3.0])]
        >>> span(points, ["w"], "abc").places
        ((0.0, 0.0), (2.0, 0.0), (1.0, 3.0))
    """
    chosen = list(names)

    def edge(start: Tensors, end: Tensors, name: str) -> Tensor:
        return (end[name].double() - start[name].double()).flatten()

    def distance(one: Tensors, other: Tensors) -> float:
        return math.hypot(*(float(edge(one, other, name).norm()) for name in chosen)) if one is not other else 0.0

    distances = tuple(tuple(distance(one, other) for other in corners) for one in corners)
    if len(corners) == 2:
        return Basis(tuple(corners), ((0.0, 0.0), (1.0, 0.0)), distances)
    for one, other in combinations(range(3), 2):
        if distances[one][other] == 0.0:
            raise ModelError(
                f"'{called[one]}' and '{called[other]}' have the same weights, so the three models span no plane; "
                "give only two of them, for the line between them"
            )
    origin, second, third = corners
    width = distances[0][1]
    over = math.fsum(float(torch.dot(edge(origin, second, n), edge(origin, third, n))) for n in chosen) / width
    # Not by Pythagoras: subtracting two large squares would lose precision for a flat triangle.
    height = math.hypot(
        *(float((edge(origin, third, n) - over / width * edge(origin, second, n)).norm()) for n in chosen)
    )
    if height < _FLAT * min(distances[0][2], distances[1][2]):
        raise ModelError(
            "'{}', '{}' and '{}' lie on one line in weight space, so they span no plane; "
            "give the two at its ends; the line between them passes through the third".format(*called)
        )
    return Basis(tuple(corners), ((0.0, 0.0), (width, 0.0), (over, height)), distances)


class Point(NamedTuple):
    """A point, and the share of each corner."""

    x: float
    y: float
    shares: Shares


@dataclass(frozen=True)
class Grid:
    """Columns and rows (one row for a line), and all points: the corners, those of coarser grids, and its own."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    points: tuple[Point, ...]


def lay_grids(basis: Basis, size: int, margin: float) -> list[Grid]:
    """Lay out grids from coarse to fine, with a margin around the corners as a share of their extent.

    The finest grid has `size` points along each side; the points of each grid start with those of the previous one.

    Example:
        >>> basis = span([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], ["w"], "ab")
        >>> lay_grids(basis, 5, 0.0)[-1].x
        (0.0, 0.25, 0.5, 0.75, 1.0)
    """
    if size < 2:
        raise RetargetError(f"a grid needs at least 2 points along a side, not {size}")
    if not 0 <= margin <= 10:
        raise RetargetError(f"the margin is {margin}; give a share of the distance between the models, from 0 to 10")

    def divide(values: Sequence[float]) -> list[float]:
        low, extent = min(values), max(values) - min(values)
        edge = margin * extent
        return [low - edge + (extent + 2 * edge) * (number / (size - 1)) for number in range(size)]

    def thin(values: Sequence[float], stride: int) -> tuple[float, ...]:
        return tuple(values[i] for i in sorted({*range(0, len(values), stride), len(values) - 1}))

    x, y = zip(*basis.places, strict=True)
    columns, rows = divide(x), [0.0] if basis.is_line else divide(y)
    points: dict[Shares, Point] = {}
    for number, place in enumerate(basis.places):  # with exact shares, which coordinates may not give
        shares = tuple(float(other == number) for other in range(len(basis.places)))
        points[shares] = Point(*place, shares)
    stride = 1
    while len(thin(columns, 2 * stride)) >= _COARSE:
        stride *= 2
    grids = []
    while stride:
        across, down = thin(columns, stride), thin(rows, stride)
        for place in ((x, y) for y in down for x in across):
            points.setdefault(basis.shares(*place), Point(*place, basis.shares(*place)))
        grids.append(Grid(across, down, tuple(points.values())))
        stride //= 2
    return grids
