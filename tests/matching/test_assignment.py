"""Assignments against brute force and against SciPy, with and without the auction that finds prices."""

from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from hf_retarget.matching import assignment
from hf_retarget.matching.assignment import assign, assign_nested, assign_rows

# Gains of descents over real gradients: MobileNetV2 between two published checkpoints, ResNet-50 after a few steps.
# Rounded to half precision, which leaves each with one solution only.
REAL = np.load(Path(__file__).with_name("real_gains.npz"))


@pytest.fixture(autouse=True, params=[0, 10**6], ids=["auction", "scipy"])
def auction_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with the auction, whatever the size, and without."""
    monkeypatch.setattr(assignment, "_AUCTION_FROM", request.param)


def brute(gains: np.ndarray) -> float:
    size = len(gains)
    return max(gains[range(size), list(order)].sum() for order in permutations(range(size)))


@pytest.mark.parametrize("seed", range(20))
def test_plain_agrees_with_brute_force(seed: int) -> None:
    gains = np.random.default_rng(seed).normal(size=(5, 5))
    index, gain = assign(gains)
    assert sorted(index) == list(range(5))
    assert gain == pytest.approx(gains[range(5), index].sum())
    assert gain == pytest.approx(brute(gains))


def test_ties_keep_the_identity() -> None:
    for gains in (np.zeros((4, 4)), np.ones((4, 4)), np.eye(4) * 0 + np.arange(4)[:, None]):
        assert assign(gains)[0].tolist() == [0, 1, 2, 3]


def test_rows_are_independent() -> None:
    gains = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    index, total = assign_rows(gains)
    assert index.shape == (2, 3, 4)
    assert total == pytest.approx(sum(brute(gains[i, j]) for i, j in product(range(2), range(3))))


@pytest.mark.parametrize("seed", range(10))
def test_nested_agrees_with_brute_force(seed: int) -> None:
    blocks, sizes = 3, (3, 2)
    generator = np.random.default_rng(seed)
    outer = generator.normal(size=(blocks, blocks))
    inners = [generator.normal(size=(blocks, blocks, size, size)) for size in sizes]
    best = max(
        sum(outer[a, b] + sum(brute(inner[a, b]) for inner in inners) for a, b in enumerate(order))
        for order in permutations(range(blocks))
    )
    heads, rows, total = assign_nested(outer, inners)
    assert total == pytest.approx(best)
    told = sum(outer[a, heads[a]] for a in range(blocks))
    told += sum(
        inner[a, heads[a]][range(inner.shape[-1]), row[a]].sum()
        for inner, row in zip(inners, rows, strict=True)
        for a in range(blocks)
    )
    assert told == pytest.approx(best)  # the indices it returns reach the gain it claims


def check(gains: np.ndarray) -> None:
    """A permutation that reaches SciPy's gain."""
    every = np.arange(len(gains))
    best = gains[linear_sum_assignment(gains, maximize=True)].sum()
    index, gain = assign(gains)
    assert sorted(index) == list(every)
    assert gain == gains[every, index].sum()
    assert gain == pytest.approx(best, rel=1e-12, abs=1e-12 * np.abs(gains).max())
    again, _ = assign(gains)
    assert np.array_equal(index, again)


@pytest.mark.parametrize("name", REAL.files)
def test_real_gains_have_the_same_permutation_as_with_scipy(name: str) -> None:
    gains = REAL[name].astype(np.float64)
    assert np.array_equal(assign(gains)[0], linear_sum_assignment(gains, maximize=True)[1])
    settled = gains[:, assign(gains)[0]]  # what a late sweep sees: all are where they should be
    assert assign(settled)[0].tolist() == list(range(len(gains)))


def test_the_auction_leaves_scipy_little_to_do() -> None:
    """At its prices, nearly every neuron can have what it likes best: this is what makes SciPy fast."""
    for name in REAL.files:
        gains = REAL[name].astype(np.float64)
        every, (index, _) = np.arange(len(gains)), assign(gains)
        worth = gains - assignment._find_prices(gains)
        lost = (worth.max(axis=1) - worth[every, index]).mean() / gains.max(axis=1).mean()
        assert lost < 1e-4
        assert (gains.max(axis=1) - gains[every, index]).mean() / gains.max(axis=1).mean() > 0.05


def _one(size: int, at: tuple[int | slice, int | slice], value: float) -> np.ndarray:
    gains = np.random.default_rng(size).normal(size=(size, size))
    gains[at] = value
    return gains


_DRAW = np.random.default_rng(0)
_ALL = slice(None)
DEGENERATE = {
    "one neuron": np.ones((1, 1)),
    "one dead neuron": np.zeros((1, 1)),
    "two": np.array([[0.0, 1.0], [1.0, 0.0]]),
    "zeros": np.zeros((50, 50)),
    "constant": np.full((50, 50), 7.0),
    "constant rows": np.repeat(_DRAW.normal(size=(50, 1)), 50, axis=1),
    "constant columns": np.repeat(_DRAW.normal(size=(1, 50)), 50, axis=0),
    "whole numbers": _DRAW.integers(0, 3, (60, 60)).astype(float),
    "rank one": np.outer(np.arange(50.0), np.arange(50.0)),
    "dead rows": _one(60, (slice(25), _ALL), 0.0),
    "dead columns": _one(60, (_ALL, slice(25)), 0.0),
    "one hot column": _one(60, (_ALL, 3), 1e6),
    "one hot entry": _one(60, (3, 5), 1e9),
    "one cold entry": _one(60, (3, 5), -1e300),
    "huge range of rows": _DRAW.normal(size=(60, 60)) * 10.0 ** np.linspace(-8, 8, 60)[:, None],
    "huge": 1e200 * _DRAW.normal(size=(60, 60)),
    "tiny": 1e-200 * _DRAW.normal(size=(60, 60)),
    "identity": np.eye(60),
    "reversed": np.eye(60)[::-1],
    "twins": np.tile(_DRAW.normal(size=(30, 30)), (2, 2)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_gains(name: str) -> None:
    check(DEGENERATE[name])


def test_an_auction_that_is_cut_off_changes_no_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_BIDS", 1)
    for name in REAL.files:
        check(REAL[name].astype(np.float64))


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid numeric"):
        assign(_one(20, (3, 5), np.nan))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0, 4), st.integers(0, 40))
def test_random_gains(size: int, seed: int, uneven: float, rank: int) -> None:
    draw = np.random.default_rng(seed)
    gains = draw.normal(size=(size, rank)) @ draw.normal(size=(rank, size)) + 0.1 * draw.normal(size=(size, size))
    check(gains * draw.exponential(size=(size, 1)) ** uneven)


@pytest.mark.parametrize("near", [0.0, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("size", [1, 2, 7, 60])
def test_prices_change_no_solution(size: int, near: float) -> None:
    generator = np.random.default_rng(size)
    rows = generator.exponential(size=(size, 1)) ** 3  # uneven rows, as gradients have them
    gains = rows * (generator.normal(size=(size, size)) + near * np.eye(size))
    best = gains[linear_sum_assignment(gains, maximize=True)].sum()
    index, gain = assign(gains)
    assert sorted(index) == list(range(size))
    assert gain == pytest.approx(best, rel=1e-12)
    assert gain == pytest.approx(gains[np.arange(size), index].sum(), rel=1e-12)
