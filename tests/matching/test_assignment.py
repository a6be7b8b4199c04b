"""Assignments against brute force."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from hf_retarget.matching.assignment import assign, assign_nested, assign_rows


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
