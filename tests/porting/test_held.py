"""Fixed tables of the new base pin the groups that act on them."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.graph.permutation_graph import find_tables, pin_groups
from hf_retarget.porting.inputs import trace_model


class Rotary(nn.Module):
    """Queries and keys with pairs of channels rotated by fixed frequencies, followed by an MLP."""

    def __init__(self, uniform: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.q, self.k, self.v = (nn.Linear(12, 8) for _ in range(3))
        self.out = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, 3)
        self.register_buffer("periods", torch.ones(4) if uniform else torch.arange(1.0, 5.0))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1]).to(x)[:, None] / self.periods
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        scores = (self.turn(self.q(x)) @ self.turn(self.k(x)).transpose(1, 2)).softmax(-1)
        x = x + self.out(scores @ self.v(x))
        return self.fc2(self.fc1(self.norm(x.mean(1))).relu())


def test_a_table_pins_only_its_own_groups():
    model = Rotary().eval()
    traced = rt.trace(model, torch.zeros(2, 3, 16, 16))
    derived = trace_model(model, (3, 16, 16))
    touching = {g.name for g in traced.groups if any(axis.tensor == "periods" for axis in g.axes)}
    assert touching, "the trace finds that the pairs may be permuted, together with their periods"
    assert set(derived.held) == touching
    assert {group.name for group in derived.graph.groups} == {group.name for group in traced.groups} - touching
    assert derived.verification.passed
    # The new base keeps its own table, so every remaining permutation must keep the function without moving it.
    x = torch.randn(2, 3, 16, 16)
    before, state = model(x), dict(model.named_parameters())
    for graph, same in ((derived.graph, True), (traced, False)):
        moved = graph.apply(graph.random(seed=3), {name: tensor.detach() for name, tensor in state.items()})
        statistics = {name: tensor for name, tensor in model.named_buffers() if name.startswith("norm.running")}
        moved |= graph.apply(graph.random(seed=3), statistics)
        assert torch.allclose(torch.func.functional_call(model, moved, x), before, atol=1e-5) is same


def test_uniform_tables_and_statistics_pin_nothing():
    model = Rotary(uniform=True)
    assert find_tables(rt.trace(model, torch.zeros(2, 3, 16, 16)), model) == ()


@pytest.mark.parametrize("part", ["outer", "inner"])
def test_inner_axes_stay_free_when_the_order_of_blocks_is_pinned(part):
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    example = torch.zeros(2, 3, 32, 32)
    graph = rt.trace(model, example)
    inner = next(group for group in graph.groups if group.blocks and group.outer[0])
    name = inner.outer[0] if part == "outer" else inner.name
    less = pin_groups(graph, [name])
    assert len(less.groups) == len(graph.groups) - 1
    assert name not in {group.name for group in less.groups}
    assert less.fingerprint != graph.fingerprint
    if part == "outer":
        assert less[inner.name].outer == (None,)
    assert rt.verify(model, less, example, controls=None).passed
    assert {str(pinned.axis) for pinned in less.pinned} > {str(pinned.axis) for pinned in graph.pinned}
    tensors = {key: value.detach() for key, value in model.state_dict().items()}
    order = less.random(seed=0)
    assert all(torch.equal(less.invert(less.invert(order))[each], order[each]) for each in order)
    back = less.apply(less.invert(order), less.apply(order, tensors))
    assert all(torch.equal(back[key], value) for key, value in tensors.items())
