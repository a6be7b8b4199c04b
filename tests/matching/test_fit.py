"""How well a permutation fits: cosines of what is alike, of what is not, and of what was planted."""

from __future__ import annotations

import pytest

import hf_retarget as rt
from hf_retarget.matching.descent import descend
from hf_retarget.matching.fit import Cosines, cosines, measure_fit
from hf_retarget.matching.methods import begin
from hf_retarget.matching.objective import Compression, Stacks
from hf_retarget.matching.problem import Problem, State
from hf_retarget.matching.trajectory import LinearTrajectory


def test_cosines_of_sets_of_tensors(network, noise):
    model, graph, _ = network
    ours, permutation = noise(model, 0), graph.random(0)
    theirs = graph.apply(graph.invert(permutation), ours)
    before, after = cosines(ours, theirs, graph, [permutation])
    assert after == 1.0
    assert before == pytest.approx(cosines(theirs, ours, graph, [])[0])
    assert before < 1.0
    assert cosines(ours, {name: -3 * tensor for name, tensor in ours.items()}, graph, []) == [-1.0]
    assert cosines(ours, {name: 0 * tensor for name, tensor in ours.items()}, graph, []) == [None]


@pytest.mark.parametrize("compression", [None, Compression(energy=0.9999)])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_permutation_fits_and_none_does_not(network, noise, compression, normalise):
    model, graph, _ = network
    order = graph.random(seed=3)
    stacks = Stacks(graph, compression, normalise)
    for seed in range(2):
        source = noise(model, seed)
        stacks.add(graph.apply(order, source), source)
    identity, planted = (measure_fit(stacks, each) for each in (graph.identity(), order))
    assert identity.identity == identity.matched == planted.identity
    assert planted.matched == pytest.approx(planted.perfect, rel=1e-3)
    assert {group.name for group in planted.groups} == {group.name for group in graph.groups}
    for still, moved in zip(identity.groups, planted.groups, strict=True):
        assert (still.moved, still.after) == (0.0, still.before)
        assert moved.before == still.before
        assert moved.after == pytest.approx(1.0, abs=1e-3)
        assert moved.neurons == order[moved.name].numel()


def test_it_agrees_with_the_objective_of_the_search(network, noise):
    model, graph, _ = network
    stacks = Stacks(graph)
    stacks.add(noise(model, 0), noise(model, 1))
    found = descend(stacks)
    fit = measure_fit(stacks, found.permutation)
    assert fit.matched == pytest.approx(found.objective, rel=1e-4)
    assert fit.identity <= fit.matched <= fit.perfect


def test_without_anything_to_compare_there_is_only_what_moved(network):
    _, graph, _ = network
    fit = measure_fit(Stacks(graph), graph.random(seed=0))
    assert (fit.identity, fit.matched, fit.perfect) == (0.0, 0.0, 0.0)
    assert all(group.before is None and group.after is None for group in fit.groups)
    assert any(group.moved for group in fit.groups)


def test_a_state_remembers_cosines_and_objectives(network, noise, tmp_path):
    model, graph, _ = network
    weights = noise(model, 0)
    start = begin(Problem(graph, weights, weights, LinearTrajectory(weights, weights, 1)))
    state = State(1, start.permutation, weights, start.stacks, 2.0, 2, (1.0, 2.0), Cosines(0.1, None, 0.3))
    state.save(tmp_path / "state.safetensors")
    again = State.load(tmp_path / "state.safetensors", graph)
    assert (again.objectives, again.cosines) == (state.objectives, state.cosines)
    assert isinstance(again.cosines, Cosines)
    assert isinstance(again.permutation, rt.Permutation)
