"""The linear assignment problem, plain and nested; the only module that depends on a solver."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import IO

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Gains = NDArray[np.floating]
"""`gains[i, j]`: the gain if position `i` takes element `j`. Leading axes are independent problems."""

Index = NDArray[np.int64]

_AUCTION_FROM = 700
"""Smaller problems are solved by SciPy alone, which is faster for them."""
_EPSILONS = (0.05, 0.01, 0.002, 4e-4, 8e-5, 2e-5)
"""Precision of the prices in each stage, relative to the mean of the rows' largest gains."""
_BIDS = 100
"""Maximum number of bids per row, over all stages; real gains need 20 to 60."""


def assign(gains: Gains) -> tuple[Index, float]:
    """The permutation with the largest gain, and that gain; the identity if nothing is better.

    Example:
        >>> assign(np.array([[0.0, 1.0], [2.0, 0.0]]))
        (array([1, 0]), 3.0)
        >>> assign(np.zeros((3, 3)))
        (array([0, 1, 2]), 0.0)
    """
    gains = np.asarray(gains, np.float64)
    # Prices of the columns do not change the solution, but good ones shorten SciPy's paths: many times faster.
    losses = _find_prices(gains) - gains if len(gains) >= _AUCTION_FROM else -gains
    index: Index = linear_sum_assignment(losses)[1].astype(np.int64)
    best = float(gains[np.arange(len(index)), index].sum())
    stay = float(gains.diagonal().sum())
    return (index, best) if best > stay else (np.arange(len(index)), stay)


def _find_prices(gains: Gains) -> Gains:
    """Prices at which nearly every row can have its favourite column, by an auction (Bertsekas), one row at a time.

    A row without a column takes the one worth most to it, and raises its price until the second best is worth more by
    ε; the previous owner is free again. Each stage starts from the result of the previous one, with a smaller ε.
    """
    size, every = len(gains), np.arange(len(gains))
    means = gains.mean(axis=0)
    wishes = np.empty(gains.shape, np.float32)  # copies of large gains take as long as the auction itself
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(gains, means, out=wishes, casting="same_kind")
        wishes -= wishes.mean(axis=1, keepdims=True)
        scale = float(wishes.max(axis=1).mean())
        if not 0 < scale < np.inf:  # all rows are equal, or there are values for SciPy to reject
            return np.zeros(size)
        wishes /= scale
        np.clip(wishes, -size, size, out=wishes)
    prices, values, rows = np.zeros(size, np.float32), np.empty(size, np.float32), list(wishes)
    owner, left, few, worth = every.copy(), _BIDS * size, size >> 10, np.empty_like(wishes)
    for epsilon in _EPSILONS:
        np.subtract(wishes, prices, out=worth)
        held = np.flatnonzero(owner >= 0)
        theirs = owner[held]
        happy = worth[theirs, held] >= worth.max(axis=1)[theirs] - epsilon
        owner[held[~happy]] = -1
        waiting = np.ones(size, bool)
        waiting[theirs[happy]] = False
        owners, free = owner.tolist(), deque(np.flatnonzero(waiting).tolist())
        while len(free) > few and left:  # the last few fight for long; SciPy settles them faster
            row = free.popleft()
            np.subtract(rows[row], prices, out=values)
            best = values.argmax()
            highest, values[best] = values[best], -np.inf
            prices[best] += highest - np.maximum.reduce(values) + epsilon
            if owners[best] >= 0:
                free.append(owners[best])
            owners[best] = row
            left -= 1
        if not left:
            break
        owner[:] = owners
    found: Gains = means + prices.astype(np.float64) * scale
    return found


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
    """The exact joint optimum for blocks that may change places, each with its own inner permutations.

    `outer[a, b]` is the gain of block `b` at place `a` that is independent of inner permutations, `inners[k][a, b]` the
    gain matrix of the k-th inner permutation in that case. The best inner permutations of every pair of blocks are
    computed first, so a single assignment over their scores is exact.

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


# ---- solving in parallel

Solution = tuple[Index, float]


class Solvers:
    """Processes that solve large assignments in parallel; with threads, the GIL would serialize the auctions.

    They are started on demand, read matrices and write permutations through pipes, and end with this process.
    """

    smallest = 512
    """Smaller assignments are solved faster than they are sent."""

    def __init__(self) -> None:
        self._own = threading.local()

    @cached_property
    def count(self) -> int:
        """The number of torch's threads; with one, no other process is started."""
        import torch

        return torch.get_num_threads() if sys.executable else 1

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.count, "assignment")

    def assign(self, gains: Gains, *, alone: bool = False) -> Callable[[], Solution]:
        """Start solving; return a function that waits for the permutation and its gain.

        One that is alone is solved by this process, when it is waited for.
        """
        if alone or self.count < 2 or len(gains) < self.smallest:
            return lambda: assign(gains)
        return self._threads.submit(self._ask, np.ascontiguousarray(gains, np.float64)).result

    def _ask(self, gains: Gains) -> Solution:
        try:
            process = self._process()
            if process.stdin is None or process.stdout is None:
                raise EOFError
            process.stdin.write(len(gains).to_bytes(8, "little"))
            process.stdin.write(gains.data)
            process.stdin.flush()
            found = np.frombuffer(_read(process.stdout, 8 * len(gains) + 8), np.float64)
        except (OSError, EOFError):  # the process could not be started, or was killed
            return assign(gains)
        return found[1:].astype(np.int64), float(found[0])

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            command, pipe = [sys.executable, "-m", "hf_retarget.matching.assignment"], subprocess.PIPE
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=alone, start_new_session=True
            )  # in its own session: Ctrl-C only reaches the main process, whose exit closes the pipe
            atexit.register(process.kill)
            self._own.process = process
        return process


SOLVERS = Solvers()


def _serve(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Solve problems from a pipe until it is closed."""
    while size := asked.read(8):
        length = int.from_bytes(size, "little")
        index, best = assign(np.frombuffer(_read(asked, 8 * length**2), np.float64).reshape(length, length))
        answers.write(np.array([best, *index], np.float64).tobytes())
        answers.flush()


def _read(source: IO[bytes], size: int) -> bytes:
    found = source.read(size)
    if len(found) < size:
        raise EOFError
    return found


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
