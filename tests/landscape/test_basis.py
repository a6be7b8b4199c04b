"""Positions and weights of points between models; corners have exactly the models' weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from hf_retarget.errors import ModelError, RetargetError
from hf_retarget.landscape.geometry import lay_grids, mix, span

NAMES = ["w", "b"]


def make(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {"w": torch.randn(40, 30, generator=generator), "b": torch.randn(40, generator=generator)}
    return {name: (scale * tensor).to(dtype) for name, tensor in weights.items()} | {"count": torch.tensor(seed)}


def distance(one: dict, other: dict) -> float:
    return math.sqrt(sum(float((one[n].double() - other[n].double()).square().sum()) for n in NAMES))


def corner(number: int) -> tuple[float, ...]:
    """The shares of a corner itself."""
    return tuple(float(other == number) for other in range(3))


@pytest.fixture
def basis():
    return span([make(0), make(1), make(2)], NAMES, "abc")


def test_corners_have_exactly_the_weights_of_the_models(basis):
    for number in range(3):
        found = mix(basis.corners, corner(number))
        assert all(torch.equal(found[name], basis.corners[number][name]) for name in NAMES)


def test_coordinates_keep_distances(basis):
    for i in range(3):
        for j in range(3):
            flat = math.dist(basis.places[i], basis.places[j])
            assert flat == pytest.approx(distance(basis.corners[i], basis.corners[j]), rel=1e-12)
            assert basis.distances[i][j] == pytest.approx(flat, rel=1e-12)
    point, other = (3.7, -5.1), (-20.0, 11.0)
    far = distance(
        *(
            mix([{n: t.double() for n, t in c.items()} for c in basis.corners], basis.shares(*place))
            for place in (point, other)
        )
    )
    assert far == pytest.approx(math.dist(point, other), rel=1e-12)


def test_the_places_of_the_corners_give_their_shares(basis):
    for number, place in enumerate(basis.places):
        assert basis.shares(*place) == pytest.approx(corner(number), abs=1e-12)


def test_the_middle_is_the_mean_up_to_one_bit(basis):
    middle = mix(basis.corners, (1 / 3, 1 / 3, 1 / 3))
    x, y = (sum(place[axis] for place in basis.places) / 3 for axis in (0, 1))
    assert basis.shares(x, y) == pytest.approx((1 / 3,) * 3)
    for name in NAMES:
        exact = sum(corner[name].double() for corner in basis.corners) / 3
        assert torch.allclose(middle[name], exact.float(), rtol=2**-23, atol=0)


def test_mixing_a_model_with_itself_changes_nothing():
    model = make(3, scale=1e-3)
    for share in (0.1, 1 / 3, 0.7, 1.3):
        found = mix([model, model], (1.0 - share, share))
        assert all(torch.equal(found[name], model[name]) for name in NAMES)


def test_integer_tensors_are_those_of_the_first_and_dtypes_are_kept():
    found = mix([make(4, dtype=torch.float16), make(5, dtype=torch.float16)], (0.5, 0.5))
    assert int(found["count"]) == 4
    assert found["w"].dtype == torch.float16


def test_an_infinite_weight_does_not_affect_other_corners():
    broken = make(6)
    broken["w"][0, 0] = math.inf
    found = mix([make(7), broken], (1.0, 0.0))
    assert torch.equal(found["w"], make(7)["w"])


def test_a_flat_triangle_is_distinguished_from_a_line():
    first, second = make(0), make(1)
    towards = mix([first, second], (0.4, 0.6))
    with pytest.raises(ModelError, match=r"'a', 'b' and 'c' lie on one line .* give the two at its ends"):
        span([first, second, towards], NAMES, "abc")
    beyond = mix([first, second], (-1.0, 2.0))
    with pytest.raises(ModelError, match="one line"):
        span([first, second, beyond], NAMES, "abc")
    aside = {**towards, "b": towards["b"] + 0.05 * make(2)["b"]}
    height = span([first, second, aside], NAMES, "abc").places[2][1]
    assert height == pytest.approx(0.05 * float(make(2)["b"].norm()), rel=0.05)


def test_duplicates_among_three_models_are_refused():
    with pytest.raises(ModelError, match=r"'old' and 'copy' have the same weights.*give only two of them"):
        span([make(0), make(1), make(0)], NAMES, ["old", "new", "copy"])


# ---- the grid


def test_the_grid_encloses_the_corners_with_a_margin(basis):
    grid = lay_grids(basis, 9, 0.25)[-1]
    for axis, values in ((0, grid.x), (1, grid.y)):
        low, high = (f(place[axis] for place in basis.places) for f in (min, max))
        assert values[0] == pytest.approx(low - 0.25 * (high - low))
        assert values[-1] == pytest.approx(high + 0.25 * (high - low))
        assert len(values) == 9
    assert len(grid.points) == 9 * 9 + 3


@pytest.mark.parametrize("size", [2, 3, 4, 5, 9, 10, 17, 20])
def test_each_grid_extends_the_previous_one(basis, size):
    grids = lay_grids(basis, size, 0.2)
    assert [point.shares for point in grids[0].points[:3]] == [corner(number) for number in range(3)]
    for grid in grids:
        assert len({point.shares for point in grid.points}) == len(grid.points), "nothing is scored twice"
        assert {(x, y) for x in grid.x for y in grid.y} <= {(point.x, point.y) for point in grid.points}
    for coarse, fine in pairwise(grids):
        assert fine.points[: len(coarse.points)] == coarse.points, (
            "each grid starts with the points of the previous one"
        )
    sizes = [len(grid.x) for grid in grids]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == size
    assert min(4, size) <= sizes[0] < 8, "the first picture comes early"


def test_a_line_has_each_end_exactly_once():
    line = span([make(0), make(1)], NAMES, "ab")
    points = lay_grids(line, 5, 0.0)[-1].points
    assert sorted(point.x for point in points) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [point.shares for point in points[:2]] == [(1.0, 0.0), (0.0, 1.0)]
    wider = lay_grids(line, 4, 0.5)[-1].points
    assert sorted(point.x for point in wider)[:3] == pytest.approx([-0.5, 0.0, 1 / 6])


@pytest.mark.parametrize(("size", "margin"), [(1, 0.2), (9, -0.1), (9, 11.0), (9, math.nan)])
def test_an_invalid_grid_is_refused(basis, size, margin):
    with pytest.raises(RetargetError):
        lay_grids(basis, size, margin)
