"""Verification: correct graphs pass, wrong ones fail, and the certainty is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.graph import Factor, Layout

ROW = torch.zeros(2, 4)


def perceptron() -> nn.Sequential:
    """Two groups of six: "0" and "2"."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


class Residual(nn.Module):
    """A residual branch that is multiplied by zero before training."""

    def __init__(self, gamma: float = 0.0) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)
        nn.init.constant_(self.norm.weight, gamma)
        self.gamma = nn.Parameter(torch.full((6,), gamma))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.gamma * self.norm(self.down(self.up(x).relu())))


def edited(graph: rt.PermutationGraph, tensor: str, edit: Callable[[Factor], Factor]) -> rt.PermutationGraph:
    """The graph with all factors of one tensor changed."""
    layout = graph.layouts[tensor]
    blocks = tuple(block._replace(factors=tuple(map(edit, block.factors))) for block in layout.blocks)
    return replace(graph, layouts={**graph.layouts, tensor: Layout(layout.shape, blocks)})


def forgotten(graph: rt.PermutationGraph, tensor: str) -> rt.PermutationGraph:
    """The graph as if a tensor did not belong to any group."""
    return edited(graph, tensor, lambda factor: factor._replace(group=None, outer=()))


# ---------------------------------------------------------------------- right and wrong graphs


def test_a_right_graph_passes():
    model = perceptron()
    result = rt.verify(model, rt.trace(model, ROW), ROW)
    assert result.passed
    assert result.invariant
    assert result.error < 1e-12
    assert result.verdict.startswith("passed: 2 random permutations")


@pytest.mark.parametrize("tensor", ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight"])
def test_a_tensor_missing_from_its_groups_is_found(tensor):
    model = perceptron()
    result = rt.verify(model, forgotten(rt.trace(model, ROW), tensor), ROW)
    assert not result.passed
    assert not result.invariant
    assert result.error > 1e-3
    assert result.verdict.startswith("FAILED: the graph does not preserve the function")


def test_confused_groups_are_found():
    model = perceptron()
    graph = rt.trace(model, ROW)
    for group in ("0", "2"):
        other = {"0": "2", "2": "0"}[group]
        wrong = edited(graph, "2.weight", lambda factor, other=other: factor._replace(group=other))
        assert not rt.verify(model, wrong, ROW).passed


def test_a_pinned_axis_treated_as_free_is_found():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    graph = rt.trace(model, ROW)
    wrong = edited(graph, "1.bias", lambda factor: factor._replace(group="0"))
    assert not rt.verify(model, wrong, ROW).passed


def test_heads_permuted_inconsistently_are_found():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2)), torch.zeros(2, 5, 3)
    graph = rt.trace(model, x)
    assert rt.verify(model, graph, x).passed
    assert not rt.verify(model, forgotten(graph, "1.self_attn.in_proj_bias"), x).passed
    inner = [group.name for group in graph if group.blocks]
    swap = dict(zip(inner, reversed(inner), strict=True))
    wrong = edited(graph, "1.self_attn.out_proj.weight", lambda f: f._replace(group=swap.get(f.group, f.group)))
    assert not rt.verify(model, wrong, x).passed


def test_bounds_that_are_buffers_keep_their_order():
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.register_buffer("low", torch.tensor(-float("inf")))
            self.register_buffer("high", torch.tensor(float("inf")))

        def forward(self, x):
            return self.last(torch.clamp(self.first(x), self.low, self.high))

    model = Clipped()
    graph = rt.trace(model, torch.zeros(2, 6))
    result = rt.verify(model, graph, torch.zeros(2, 6))
    assert len(graph) == 1
    assert result.passed, result.verdict  # random bounds in the wrong order would make the output constant


def test_buffers_are_verified():
    model = Residual()
    graph = rt.trace(model, ROW)
    for buffer in ("norm.running_mean", "norm.running_var"):
        assert not rt.verify(model, forgotten(graph, buffer), ROW).passed


@pytest.mark.parametrize("tensor", ["up.bias", "down.weight", "norm.weight", "norm.bias", "gamma"])
def test_zero_weights_do_not_hide_errors(tensor):
    model = Residual(gamma=0.0)
    graph = rt.trace(model, ROW)
    assert rt.verify(model, graph, ROW, controls=None).passed
    assert not rt.verify(model, forgotten(graph, tensor), ROW).passed


def test_tied_weights_are_permuted_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.out = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(self.embed(x)).relu())

    model, tokens = Tied(), torch.tensor([[1, 2, 3]])
    graph = rt.trace(model, tokens)
    result = rt.verify(model, graph, tokens, controls=None)
    assert result.passed
    assert all(control.effective for control in result.controls)
    assert not rt.verify(model, forgotten(graph, "mix.bias"), tokens).passed


# ---------------------------------------------------------------------- negative controls


def test_controls_change_the_output():
    model = Residual()
    graph = rt.trace(model, ROW)
    result = rt.verify(model, graph, ROW, controls=None)
    assert [control.group for control in result.controls] == [group.name for group in graph]
    for control in result.controls:
        assert control.effective
        assert control.error > 1e-6
        assert control.tensor in {axis.tensor for axis in graph[control.group].axes}


@pytest.mark.parametrize(("asked", "done"), [(0, 0), (1, 1), (2, 2), (8, 2), (None, 2)])
def test_the_number_of_controls_is_as_requested(asked, done):
    model = perceptron()
    result = rt.verify(model, rt.trace(model, ROW), ROW, controls=asked)
    assert len(result.controls) == done
    assert result.passed
    assert f"{done} of {done} negative controls" in result.verdict


def test_an_inconclusive_verification_does_not_pass():
    class Deaf(nn.Module):
        """A model whose groups do not affect the output."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.direct = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.direct(x) + 0 * self.second(self.first(x))

    model = Deaf()
    result = rt.verify(model, rt.trace(model, ROW), ROW)
    assert result.invariant
    assert not result.passed
    assert "inconclusive" in result.verdict


# ---------------------------------------------------------------------- precision


class Casts(nn.Module):
    """Casts to float32 during its computation, in every possible way."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 64), nn.Linear(64, 2)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cast(self.first(x))
        return self.out(hidden.to(x.dtype))


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.type(torch.float32),
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1, torch.float32),
        lambda x: x.sum(-1, keepdim=True, dtype=torch.float32) * x,
        lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
        lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)),
        lambda x: torch.zeros(2, 64, dtype=torch.float32).copy_(x),
        lambda x: x.new_zeros(2, 64, dtype=torch.float32).add_(x),
        lambda x: torch.cat([x[:, :0].float(), x], -1),
    ],
)
def test_casts_to_float32_do_not_hide_errors(cast):
    model = Casts(cast)
    graph = rt.trace(model, ROW)
    result = rt.verify(model, graph, ROW)
    assert [group.shape for group in graph] == [(64,)]
    assert result.error <= 1e-8, result.verdict
    assert result.passed


def test_the_noise_floor_is_a_small_number():
    model = perceptron()
    result = rt.verify(model, rt.trace(model, ROW), ROW)
    assert math.isfinite(result.noise_floor)
    assert 0 < result.noise_floor < 1e-12


def test_the_tolerance_is_respected():
    model = perceptron()
    graph = forgotten(rt.trace(model, ROW), "0.bias")
    assert not rt.verify(model, graph, ROW, tolerance=1e-8).invariant
    assert rt.verify(model, graph, ROW, tolerance=100.0).invariant


def test_the_same_seed_gives_the_same_figures():
    model = perceptron()
    graph = rt.trace(model, ROW)
    first, again, other = (rt.verify(model, graph, ROW, seed=seed) for seed in (1, 1, 2))
    assert replace(first, seconds=0) == replace(again, seconds=0)
    assert replace(first, seconds=0) != replace(other, seconds=0)


def test_more_draws_find_larger_errors():
    model = perceptron()
    result = rt.verify(model, rt.trace(model, ROW), ROW, draws=5)
    assert result.draws == 5
    assert "5 random permutations" in result.verdict
    assert "1 random permutation kept" in rt.verify(model, rt.trace(model, ROW), ROW, draws=1).verdict


# ---------------------------------------------------------------------- what it reports


def test_the_result_is_json():
    model = perceptron()
    result = rt.verify(model, rt.trace(model, ROW), ROW, controls=None)
    document = json.loads(json.dumps(result.to_json()))
    assert document["passed"] is True
    assert document["verdict"] == result.verdict
    assert document["error"] == result.error
    assert [control["group"] for control in document["controls"]] == ["0", "2"]
    assert document["seconds"] > 0


@pytest.mark.parametrize(
    ("function", "word"),
    [(lambda x: x * 0, "only zeros"), (lambda x: (x - x) / (x - x), "NaN"), (lambda x: 1 / (x - x), "NaN or infinite")],
)
def test_an_uninformative_output_is_refused(function, word):
    class Mute(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    model = Mute(*perceptron())
    graph = rt.trace(model, ROW)
    with pytest.raises(rt.TraceError, match=f"Mute outputs {word}"):
        rt.verify(model, graph, ROW)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("example", [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.int64)], ids=["shape", "type"])
def test_an_example_that_does_not_fit_is_refused(example):
    model = perceptron()
    with pytest.raises(rt.TraceError, match="Sequential"):
        rt.verify(model, rt.trace(model, ROW), example)


def test_several_outputs_are_all_compared():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out, self.side = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, object]:
            hidden = self.first(x).relu()
            return {"out": self.out(hidden), "more": [self.side(hidden), None, 3]}

    model = Several()
    graph = rt.trace(model, ROW)
    assert rt.verify(model, graph, ROW).passed
    assert not rt.verify(model, forgotten(graph, "side.weight"), ROW).passed
