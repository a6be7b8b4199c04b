"""Stacks: what they hold, and how much compression may change."""

from __future__ import annotations

import math

import pytest
import torch

from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.matching import objective
from hf_retarget.matching.descent import MovedSource, descend
from hf_retarget.matching.fit import measure_fit
from hf_retarget.matching.objective import Compression, Stacks


def value(stacks: Stacks, permutation) -> float:
    source = MovedSource(stacks, permutation)
    found = source.objective()
    source.put_back(stacks.graph.invert(permutation))
    return found


def expected(graph, pairs, permutation) -> float:
    total = 0.0
    for target, source in pairs:
        moved = graph.apply(permutation, source)
        total += sum(float((target[name].double() * moved[name].double()).sum()) for name in target)
    return total


def test_objective_is_the_sum_of_inner_products(network, noise):
    model, graph, _ = network
    pairs = [(noise(model, 2 * i), noise(model, 2 * i + 1)) for i in range(4)]
    stacks = Stacks(graph)
    for target, source in pairs:
        stacks.add(target, source)
    for permutation in (graph.identity(), graph.random(0), graph.random(1)):
        assert value(stacks, permutation) == pytest.approx(expected(graph, pairs, permutation), rel=1e-4, abs=1e-3)


def correlated(noise, model, steps):
    common = noise(model, 0), noise(model, 1)
    for step in range(steps):
        yield tuple(
            {name: tensor + 0.1 * noise(model, 10 + 2 * step + side)[name] for name, tensor in base.items()}
            for side, base in enumerate(common)
        )


@pytest.mark.parametrize("energy", [0.9, 0.99, 0.999])
def test_compression_loses_no_more_than_the_energy_it_drops(network, noise, energy):
    model, graph, _ = network
    steps = 8
    exact, small = Stacks(graph), Stacks(graph, Compression(energy, sizes=steps))
    for target, source in correlated(noise, model, steps):
        exact.add(target, source)
        small.add(target, source)
    assert small.elements < exact.elements
    scale = sum(math.prod(piece.norms) for piece in exact.pieces.values())
    differences = []
    for seed in range(10):
        permutation = graph.random(seed)
        differences.append(abs(value(exact, permutation) - value(small, permutation)))
    assert max(differences) <= (steps - 1) * (1 - energy) * scale + 1e-3  # it was compressed as many times
    assert max(differences) > 1e-3  # the test would say nothing otherwise


def test_compression_respects_the_size_limit(network, noise):
    model, graph, _ = network
    size = sum(parameter.numel() for parameter in model.parameters())
    stacks = Stacks(graph, Compression(energy=1.0, sizes=2.0))
    for seed in range(12):
        stacks.add(noise(model, seed), noise(model, seed + 100))
    assert stacks.elements <= 2 * 2.0 * size


def test_compressed_matching_reaches_nearly_the_same(network, noise):
    model, graph, _ = network
    exact, small = Stacks(graph), Stacks(graph, Compression(0.99))
    for target, source in correlated(noise, model, 6):
        exact.add(target, source)
        small.add(target, source)
    best, close = descend(exact, restarts=3), descend(small, restarts=3)
    assert value(exact, close.permutation) >= 0.9 * best.objective


@pytest.mark.parametrize("normalise", [False, True])
def test_products_that_are_added_up_say_the_same_as_stacks(network, noise, monkeypatch, normalise):
    model, graph, _ = network
    added, stacked = Stacks(graph, normalise=normalise), Stacks(graph, normalise=normalise)
    for stacks, pairs in ((added, 4), (stacked, 0)):
        monkeypatch.setattr(objective, "_PAIRS", pairs)
        for step in range(3):
            stacks.add(noise(model, 2 * step), noise(model, 2 * step + 1))
    alone = {key for key, piece in added.pieces.items() if piece.products is not None}
    assert alone == {key for key, piece in added.pieces.items() if len(piece.factors) == 1}
    assert alone
    assert all(piece.products is None for piece in stacked.pieces.values())
    assert added.weights() == pytest.approx(stacked.weights(), rel=1e-5)
    for permutation in (graph.identity(), graph.random(0)):
        ours, theirs = measure_fit(added, permutation), measure_fit(stacked, permutation)
        assert (ours.identity, ours.matched) == pytest.approx((theirs.identity, theirs.matched), rel=1e-4, abs=1e-4)
        assert ours.perfect == pytest.approx(theirs.perfect, rel=1e-5)
        assert descend(added, permutation).permutation == descend(stacked, permutation).permutation
    assert descend(added).objective == pytest.approx(descend(stacked).objective, rel=1e-4)
    before = sum(added.pieces[key].elements for key in alone)
    added.add(noise(model, 6), noise(model, 7))
    assert sum(added.pieces[key].elements for key in alone) == before


def test_bad_pairs_are_refused(network, noise):
    model, graph, _ = network
    good = noise(model, 0)
    name = next(iter(good))
    stacks = Stacks(graph)
    undefined = good | {name: good[name].clone()}
    undefined[name].view(-1)[0] = float("nan")
    with pytest.raises(MatchError, match=f"'{name}' of the target has 1 values that are NaN"):
        stacks.add(undefined, good)
    with pytest.raises(MatchError, match="infinite"):
        stacks.add(good, good | {name: good[name] * float("inf")})
    with pytest.raises(MatchError, match=f"'{name}' is missing on the source side"):
        stacks.add(good, {key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(TensorMismatchError, match=f"'{name}' of the source has shape"):
        stacks.add(good, good | {name: torch.zeros(1, 2, 3)})
    with pytest.raises(TensorMismatchError, match="'nonsense' is not a tensor"):
        stacks.add(good | {"nonsense": torch.zeros(1)}, good | {"nonsense": torch.zeros(1)})
