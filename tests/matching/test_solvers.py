"""Large assignments in processes of their own: the same permutations, and no harm if such a process dies."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.matching.assignment import SOLVERS, Solvers, assign
from hf_retarget.matching.descent import descend
from hf_retarget.matching.objective import Stacks


@pytest.fixture
def two() -> Solvers:
    solvers = Solvers()
    solvers.__dict__.update(count=2, smallest=50)
    return solvers


def draw_gains(seed: int, size: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, size))


def test_several_at_a_time_give_what_one_after_the_other_does(two):
    problems = [draw_gains(seed) for seed in range(6)]
    waiting = [two.assign(gains) for gains in problems]
    for gains, wait in zip(problems, waiting, strict=True):
        index, best = wait()
        ours, alone = assign(gains)
        assert np.array_equal(index, ours)
        assert best == alone


def test_a_process_that_was_killed_is_replaced(two):
    two.__dict__["count"] = 1  # all in one thread
    seen = []

    def ask_twice() -> None:
        for _ in range(2):
            seen.append(two._ask(draw_gains(1)))
            os.kill(two._process().pid, signal.SIGKILL)

    thread = threading.Thread(target=ask_twice)
    thread.start()
    thread.join()
    assert [best for _, best in seen] == [assign(draw_gains(1))[1]] * 2


def test_without_a_process_it_is_solved_here(two, monkeypatch):
    monkeypatch.setattr("hf_retarget.matching.assignment.sys.executable", "/nowhere/python")
    assert two.assign(draw_gains(2))()[1] == assign(draw_gains(2))[1]


def test_a_descent_ends_in_the_same_permutation_with_any_number_of_them(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, 60), nn.ReLU()]
    graph = rt.trace(nn.Sequential(*layers, nn.Linear(60, 10)), torch.zeros(2, 20))
    stacks = Stacks(graph)
    for _ in range(2):
        stacks.add(*({name: torch.randn(each.shape) for name, each in graph.layouts.items()} for _ in range(2)))
    found = []
    for count in (1, 2, 4):
        monkeypatch.setitem(vars(SOLVERS), "count", count)
        monkeypatch.setattr(Solvers, "smallest", 50)
        found.append(descend(stacks))
    assert found[0].sweeps[0].moved >= 2
    assert found[0].permutation == found[1].permutation == found[2].permutation
    assert found[0].objective == found[1].objective == found[2].objective
