"""Coordinate descent: planted permutations, brute force, monotone objectives."""

from __future__ import annotations

import warnings
from itertools import pairwise, permutations

import pytest
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.matching.descent import _Descent, descend
from hf_retarget.matching.objective import Compression, Stacks


def inner(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def stacked(graph, target, source, **options) -> Stacks:
    stacks = Stacks(graph, **options)
    stacks.add(target, source)
    return stacks


@pytest.mark.parametrize("seed", range(3))
def test_planted_permutation_is_recovered(network, noise, seed):
    model, graph, _ = network
    source = noise(model, seed)
    planted = graph.random(seed + 100)
    found = descend(stacked(graph, graph.apply(planted, source), source), restarts=5, seed=seed)
    assert found.permutation == planted
    assert found.objective == pytest.approx(inner(source, source), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_the_objective_reaches_the_planted_one(network, noise, seed):
    model, graph, _ = network
    source, disturbance = noise(model, seed), noise(model, seed + 50)
    planted = graph.random(seed)
    target = {name: value + 0.3 * disturbance[name] for name, value in graph.apply(planted, source).items()}
    found = descend(stacked(graph, target, source), restarts=5)
    assert found.objective >= inner(target, graph.apply(planted, source)) - 1e-3
    assert found.objective == pytest.approx(inner(target, graph.apply(found.permutation, source)), rel=1e-5)


def test_brute_force_agrees_on_one_tiny_group(noise):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = rt.trace(model, torch.zeros(1, 3))
    target, source = noise(model, 1), noise(model, 2)
    (group,) = graph.groups
    best = max(
        inner(target, graph.apply(rt.Permutation(graph.fingerprint, {group.name: torch.tensor(order)}), source))
        for order in permutations(range(5))
    )
    assert descend(stacked(graph, target, source)).objective == pytest.approx(best, rel=1e-5)


def test_a_whole_state_dict_with_batchnorm_is_matched(noise):
    """Counts of minibatches and factors have no axis, and counts are no weights."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.factor

    model = Scaled().eval()
    graph = rt.trace(model, torch.zeros(2, 5))
    source = model.state_dict() | noise(model, 1) | {"body.1.num_batches_tracked": torch.tensor(10**6)}
    planted = graph.random(3)
    found = rt.match(graph, graph.apply(planted, source), source)
    assert found.permutation == planted
    weights = {name: each for name, each in source.items() if each.is_floating_point()}
    assert found.objective == pytest.approx(inner(weights, weights), rel=1e-5)


def test_brute_force_agrees_on_heads(noise):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(3, 3 * 6), nn.Linear(6, 2)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Heads()
    graph = rt.trace(model, torch.zeros(2, 4, 3))
    assert sorted(group.shape for group in graph) == [(2,), (2, 3), (2, 3)]
    target, source = noise(model, 1), noise(model, 2)
    heads, qk, v = graph.groups
    orders = [torch.tensor(order) for order in permutations(range(3))]

    def value(order, index_qk, index_v) -> float:
        indices = {heads.name: torch.tensor(order), qk.name: torch.stack(index_qk), v.name: torch.stack(index_v)}
        return inner(target, graph.apply(rt.Permutation(graph.fingerprint, indices), source))

    still = [orders[0], orders[0]]
    best = -float("inf")
    for order in ((0, 1), (1, 0)):
        # Rows of different heads and kinds touch different elements, so each can be chosen by itself.
        start, gain = value(order, still, still), 0.0
        for kind in (0, 1):
            for row in (0, 1):
                options = []
                for candidate in orders:
                    rows = [list(still), list(still)]
                    rows[kind][row] = candidate
                    options.append(value(order, *rows) - start)
                gain += max(options)
        best = max(best, start + gain)
    assert descend(stacked(graph, target, source)).objective == pytest.approx(best, rel=1e-5)


def test_objective_never_falls(network, noise):
    model, graph, _ = network
    for seed in range(5):
        found = descend(stacked(graph, noise(model, seed), noise(model, seed + 10)), seed=seed)
        values = [sweep.objective for sweep in found.sweeps]
        assert all(later >= earlier - 1e-6 * abs(earlier) for earlier, later in pairwise(values))
        assert (
            found.objective >= inner(noise(model, seed), noise(model, seed + 10)) - 1e-4
        )  # not worse than the identity


@pytest.mark.parametrize("start", ["guess", "given"])
def test_a_search_leaves_the_stacks_as_they_were(network, noise, start):
    model, graph, _ = network
    stacks = Stacks(graph)
    stacks.add(noise(model, 0), noise(model, 1))
    before = [(piece.target.clone(), piece.source.clone()) for piece in stacks.pieces.values()]
    found = descend(stacks, graph.random(0) if start == "given" else None, restarts=2)
    assert found.permutation.moved > 0
    for piece, (target, source) in zip(stacks.pieces.values(), before, strict=True):
        assert torch.equal(piece.target, target)
        assert torch.equal(piece.source, source)


def test_same_seed_same_result_and_restarts_never_hurt(network, noise):
    model, graph, _ = network
    stacks = stacked(graph, noise(model, 1), noise(model, 2))
    once, again, more = descend(stacks, seed=3), descend(stacks, seed=3), descend(stacks, seed=3, restarts=4)
    assert once.permutation == again.permutation
    assert more.objective >= once.objective


@pytest.mark.parametrize("how", [None, Compression()])
def test_any_number_of_threads_finds_the_same_permutation(how, noise):
    model, graph = deep((16, 300, 720, 300, 5))  # wide enough for threads, and one group for the auction
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            stacks = Stacks(graph, how)
            for step in range(2):
                stacks.add(noise(model, 1 + step), noise(model, 11 + step))
            found.append(descend(stacks).permutation)
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_warm_start_goes_on_from_where_it_was(network, noise):
    model, graph, _ = network
    stacks = stacked(graph, noise(model, 1), noise(model, 2))
    first = descend(stacks)
    second = descend(stacks, first.permutation)
    assert second.objective == pytest.approx(first.objective, rel=1e-6)
    assert second.permutation == first.permutation
    assert sum(sweep.moved for sweep in second.sweeps) == 0


def test_a_square_matrix_on_one_group_is_accepted_only_if_it_helps(noise):
    """Both axes of the matrix are one group, so a step is quadratic and its linear guess may be wrong."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.square, self.head = nn.Linear(2, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)

        def forward(self, x):
            x = self.embed(x)
            return self.head(x + self.square(x))

    model = Square()
    graph = rt.trace(model, torch.zeros(1, 2))
    for seed in range(20):
        target, source = noise(model, seed), noise(model, seed + 100)
        found = descend(stacked(graph, target, source), seed=seed)
        values = [inner(target, source)] + [sweep.objective for sweep in found.sweeps]
        assert all(later >= earlier - 1e-4 for earlier, later in pairwise(values))
        assert found.objective == pytest.approx(inner(target, graph.apply(found.permutation, source)), abs=1e-3)


def test_zero_gradients_keep_the_identity_and_warn(network, noise):
    model, graph, _ = network
    zeros = {name: torch.zeros_like(value) for name, value in noise(model, 0).items()}
    with pytest.warns(UserWarning, match="nothing to match"):
        found = descend(stacked(graph, zeros, noise(model, 1)))
    assert found.permutation == graph.identity()


def test_no_warning_when_all_is_well(network, noise):
    model, graph, _ = network
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descend(stacked(graph, noise(model, 0), noise(model, 1)))


def test_normalised_tensors_count_alike(noise):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = rt.trace(model, torch.zeros(1, 3))
    source = noise(model, 0)
    one, other = graph.random(1), graph.random(2)
    # A huge last layer votes for one permutation, everything else for another.
    target = {name: graph.apply(one if name == "2.weight" else other, {name: source[name]})[name] for name in source}
    target["2.weight"] *= 1e3
    plain, normalised = stacked(graph, target, source), stacked(graph, target, source, normalise=True)
    assert descend(plain).permutation == one
    assert descend(normalised).permutation != one
    for name, weight in normalised.weights().items():
        if name != "2.bias":  # pinned: no group acts on it
            assert weight * float(target[name].norm()) * float(source[name].norm()) == pytest.approx(1.0, rel=1e-5)


def deep(widths=(12, 40, 40, 40, 40, 40, 5)):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, rt.trace(model, torch.zeros(1, widths[0]))


def test_the_guess_finds_at_once_what_a_blind_start_searches_for(noise):
    model, graph = deep()
    source = noise(model, 0)
    planted = graph.random(1)
    stacks = stacked(graph, graph.apply(planted, source), source)
    guessed, blind = descend(stacks), descend(stacks, start=graph.identity())
    assert guessed.permutation == planted
    assert len(guessed.sweeps) == 1  # only to see that nothing is left to do
    assert len(blind.sweeps) > 2


def test_an_identity_that_is_better_than_the_guess_is_kept(network, noise):
    model, graph, _ = network
    source, disturbance = noise(model, 0), noise(model, 1)
    target = {name: value + 3 * disturbance[name] for name, value in source.items()}
    assert descend(stacked(graph, target, source)).objective >= inner(target, source) - 1e-3


def test_products_that_are_corrected_equal_those_computed_anew(noise):
    model, graph = deep()
    stacks = stacked(graph, noise(model, 0), noise(model, 1))
    descent = _Descent(stacks, graph.identity(), 0)
    descent.run(100, 0.0)
    corrected = 0
    source = descent.source
    for number, known in enumerate(source._known):
        piece = source.pieces[number]
        for axes, gains in known.items():
            outer = piece.factors[axes[0]].outer
            anew = source._product(piece, piece.target, source.source[number], outer, axes)
            assert gains == pytest.approx(anew, rel=1e-3, abs=1e-3)
            corrected += 1
    assert corrected >= len(graph)  # nothing was compared otherwise
    descent.close()
    assert stacks.pieces["0.weight", 0].source.equal(
        stacked(graph, noise(model, 0), noise(model, 1)).pieces["0.weight", 0].source
    )
