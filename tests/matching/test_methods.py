"""The methods, end to end on small real networks."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.contenders import contenders, find_contender
from hf_retarget.errors import MatchError
from hf_retarget.matching import problem as problem_module
from hf_retarget.matching.gradients import GradientCache, Gradients
from hf_retarget.matching.methods import match, run
from hf_retarget.matching.problem import MatchOptions, Problem, State
from hf_retarget.matching.trajectory import LinearTrajectory

WITHOUT_GRADIENTS = {"naive", "rebasin", "oracle"}


def make_problem(network, noise, target=None, steps=3, count=None, **more) -> Problem:
    model, graph, x = network
    source = {name: value.detach() for name, value in model.named_parameters()}
    tuned = {name: value + 0.05 * noise(model, 5)[name] for name, value in source.items()}
    other = {name: value + 0.3 * noise(model, 6)[name] for name, value in source.items()}
    gradients = Gradients(model, nn.functional.cross_entropy)

    def gradient(weights, step):
        if count is not None:
            count.append(step)
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(x.shape, generator=generator), torch.randint(0, 3, (len(x),), generator=generator)
        return gradients(weights, [data])

    target = other if target is None else target
    path = LinearTrajectory(source, tuned, steps)
    return Problem(graph, source, target, path, gradient, tuned_target={n: v * 1.1 for n, v in target.items()}, **more)


STEPPING = sorted(each.name for each in contenders() if each.step)
"""Methods that follow a trajectory step by step."""


@pytest.mark.parametrize("method", STEPPING)
def test_every_method_makes_every_step(network, noise, method):
    problem = make_problem(network, noise)
    states = list(run(method, problem))
    assert [state.step for state in states] == [1, 2, 3]
    assert states[-1].weights.keys() == problem.target.keys()
    assert all(bool(torch.isfinite(weight).all()) for weight in states[-1].weights.values())


@pytest.mark.parametrize("method", ["fgmt", "gmt"])
def test_ported_weights_are_target_plus_the_whole_permuted_delta(network, noise, method):
    problem = make_problem(network, noise)
    for state in run(method, problem):
        moved = problem.graph.apply(state.permutation, problem.trajectory.delta(state.step))
        for name, weight in state.weights.items():
            torch.testing.assert_close(weight, problem.target[name] + moved[name])


def test_naive_adds_the_delta_as_it_is(network, noise):
    problem = make_problem(network, noise)
    *_, last = run("naive", problem)
    delta = problem.trajectory.delta(3)
    assert all(torch.equal(last.weights[name], weight + delta[name]) for name, weight in problem.target.items())


def test_gmt_and_fgmt_agree_at_the_first_step(network, noise):
    problem = make_problem(network, noise)
    assert next(run("gmt", problem)).permutation == next(run("fgmt", problem)).permutation


def test_gradient_budgets(network, noise):
    budgets = {"fgmt": 2 * 3, "fgmt-sign": 2 * 3, "naive-sign": 3, "gmt": 2 * (1 + 2 + 3), "permuted-source": 2 * 3}
    for method in STEPPING:
        count: list[int] = []
        list(run(method, make_problem(network, noise, count=count)))
        assert len(count) == budgets.get(method, 0) == find_contender(method).gradients(3), method


def test_fgmt_between_identical_bases_is_the_identity(network, noise):
    model, graph, _ = network
    same = {name: value.detach() for name, value in model.named_parameters()}
    (state,) = run("fgmt", make_problem(network, noise, target=same, steps=1))
    assert state.permutation == graph.identity()


def test_sign_masked_steps_only_go_downhill(network, noise):
    problem = make_problem(network, noise, steps=1)
    (state,) = run("fgmt-sign", problem)
    gradient = problem.gradient_at(problem.target, 1)
    moved = kept = 0
    for name, weight in state.weights.items():
        move = weight - problem.target[name]
        assert not bool(((move * gradient[name]) > 0).any()), name
        kept += int((move != 0).sum())
        moved += move.numel()
    assert 0 < kept < moved


@pytest.mark.parametrize("method", STEPPING)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(network, noise, method, tmp_path):
    problem = make_problem(network, noise)
    for state in run(method, problem):
        if state.step == 1:
            state.save(tmp_path / "state.safetensors")
    restored = State.load(tmp_path / "state.safetensors", problem.graph)
    *_, resumed = run(method, problem, restored)
    assert resumed.permutation == state.permutation
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in state.weights.items())
    assert resumed.objective == state.objective


def test_a_state_of_another_graph_is_refused(network, noise, tmp_path):
    state = next(run("naive", make_problem(network, noise)))
    state.save(tmp_path / "state.safetensors")
    other = rt.trace(nn.Sequential(nn.Linear(2, 9), nn.Linear(9, 2)), torch.zeros(1, 2))
    with pytest.raises(MatchError, match="not a matching state of this graph"):
        State.load(tmp_path / "state.safetensors", other)
    (tmp_path / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(MatchError, match="cannot read a matching state"):
        State.load(tmp_path / "state.safetensors", other)


def test_source_gradients_come_from_the_cache(network, noise, tmp_path):
    first: list[int] = []
    cache = GradientCache(tmp_path, {"any": "key"})
    once = list(run("fgmt", make_problem(network, noise, count=first, cache=cache)))
    second: list[int] = []
    again = list(run("fgmt", make_problem(network, noise, count=second, cache=cache)))
    assert (len(first), len(second)) == (6, 3)
    assert once[-1].permutation == again[-1].permutation


@pytest.mark.parametrize("start", ["warm", "restart"])
def test_a_search_begins_at_the_step_before_or_anew(start, network, noise, monkeypatch):
    begun, descend = [], problem_module.descend

    def watch(stacks, at, **how):
        begun.append(at)
        return descend(stacks, at, **how)

    monkeypatch.setattr(problem_module, "descend", watch)
    first, second, _ = run("fgmt", make_problem(network, noise, options=MatchOptions(start=start)))
    assert begun == ([None, first.permutation, second.permutation] if start == "warm" else [None] * 3)


def test_an_unknown_start_is_refused():
    with pytest.raises(MatchError, match="unknown start 'cold'; choose 'restart' or 'warm'"):
        MatchOptions(start="cold")


def test_what_is_missing_is_named(network, noise):
    problem = make_problem(network, noise)
    bare = Problem(problem.graph, problem.source, problem.target, problem.trajectory)
    with pytest.raises(MatchError, match="needs gradients"):
        next(run("fgmt", bare))
    with pytest.raises(MatchError, match="'oracle' needs the actual fine-tuning"):
        next(run("oracle", bare))
    with pytest.raises(MatchError, match="unknown method 'fgm'; choose one of fgmt, fgmt-sign, gmt"):
        next(run("fgm", bare))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_a_permuted_copy_of_the_source_is_recovered(name, noise):
    model = timm.create_model(name, num_classes=4)
    graph = rt.trace(model)
    source = {key: value.detach() + 0.02 * noise(model, 1)[key] for key, value in model.named_parameters()}
    planted = graph.random(7)
    target = graph.apply(planted, source)
    assert match(graph, target, source).permutation == planted
    tuned = {key: value + 0.01 * noise(model, 2)[key] for key, value in source.items()}
    size = 160 if name == "test_vit" else 64
    data = [(torch.randn(8, 3, size, size), torch.randint(0, 4, (8,)))]
    gradients = Gradients(model, nn.functional.cross_entropy)
    problem = Problem(
        graph, source, target, LinearTrajectory(source, tuned, 2), lambda weights, _: gradients(weights, data)
    )
    for state in run("fgmt", problem):
        assert state.permutation == planted
