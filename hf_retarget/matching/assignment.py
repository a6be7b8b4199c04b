"""The linear assignment problem, plain and nested: the only place that knows which solver is used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Gains = NDArray[np.floating]
"""`gains[i, j]`: what is gained if position `i` takes element `j`. Leading axes are independent problems."""

Index = NDArray[np.int64]

_ROUNDS = 10


def assign(gains: Gains) -> tuple[Index, float]:
    """The permutation with the largest gain, and that gain; the identity if nothing is better.

    Example:
        >>> assign(np.array([[0.0, 1.0], [2.0, 0.0]]))
        (array([1, 0]), 3.0)
        >>> assign(np.zeros((3, 3)))
        (array([0, 1, 2]), 0.0)
    """
    index = _solve(np.asarray(gains, np.float64))
    best = float(gains[np.arange(len(index)), index].sum(dtype=np.float64))
    stay = float(gains.diagonal().sum(dtype=np.float64))
    return (index, best) if best > stay else (np.arange(len(index)), stay)


def _solve(gains: Gains) -> Index:
    losses = gains.diagonal()[:, None] - gains
    if np.count_nonzero(losses.min(axis=1) < 0) > len(losses) / 2:  # most want to move: nothing is known yet
        return _scipy(losses)
    # Prices for the columns change no solution, but SciPy is several times faster if most elements are cheapest where
    # they are. Some rounds of shortest paths look for such prices; if they come to rest, no cycle has anything to gain,
    # and the identity is the solution.
    prices, room = np.zeros(len(losses)), np.empty_like(losses)
    for _ in range(_ROUNDS):
        better = np.add(losses, prices, out=room).min(axis=1)
        if np.array_equal(better, prices):
            return np.arange(len(losses))
        prices = better
    np.add(losses, prices, out=room)
    room -= prices[:, None]
    return _scipy(room)


def _scipy(losses: Gains) -> Index:
    index: Index = linear_sum_assignment(losses)[1].astype(np.int64)
    return index


def assign_rows(gains: Gains) -> tuple[Index, float]:
    """One assignment for each index of the leading axes: the inner permutations of fixed blocks.

    Example:
        >>> index, gain = assign_rows(np.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]))
        >>> index.tolist(), gain
        ([[1, 0], [0, 1]], 4.0)
    """
    index = np.empty(gains.shape[:-1], np.int64)
    total = 0.0
    for block in np.ndindex(*gains.shape[:-2]):
        index[block], gain = assign(gains[block])
        total += gain
    return index, total


def assign_nested(outer: Gains, inners: list[Gains]) -> tuple[Index, list[Index], float]:
    """The exact joint optimum for blocks that may change places while each carries its own inner permutations.

    `outer[a, b]` is the gain of block `b` at place `a` that no inner permutation can change, `inners[k][a, b]` the
    matrix of gains of the k-th inner permutation then. Whatever pair of blocks is chosen, its best inner permutations
    are known, so one assignment over their scores is exact.

    Example:
        >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
        >>> inner = np.stack([np.stack([0 * swap, swap]), np.stack([swap, 0 * swap])])
        >>> heads, (rows,), gain = assign_nested(np.zeros((2, 2)), [inner])
        >>> heads.tolist(), rows.tolist(), gain
        ([1, 0], [[1, 0], [1, 0]], 4.0)
    """
    blocks = len(outer)
    scores = outer.astype(np.float64)
    best = [np.empty((blocks, blocks, gains.shape[-1]), np.int64) for gains in inners]
    for gains, index in zip(inners, best, strict=True):
        for a, b in np.ndindex(blocks, blocks):
            index[a, b], gain = assign(gains[a, b])
            scores[a, b] += gain
    order, total = assign(scores)
    return order, [index[np.arange(blocks), order] for index in best], total
