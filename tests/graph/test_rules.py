"""Every operator rule, on the smallest model that has the operator.

A row names the operator, a function that calls it, the shapes of the function's arguments (parameters; or buffers, see
`buffer`), and the expected groups: "3 4 2*5" stands for two plain groups, of 3 and 4 elements, and one of 5
elements that varies over 2 blocks.

The model contracts every output with one vector for each of its axes, so an axis is free unless the rule pins it, and
two axes that ought to be one group but are not make the check fail. As the vectors hold each axis by itself, axes of
outputs do not vary over others; what is reduced or contracted inside the operator may. Tables that end in JOINTLY
contract outputs with one tensor of the same shape instead: there, only what the operator holds keeps axes from varying.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import hf_retarget as rt
from hf_retarget.errors import RuleError
from hf_retarget.graph.build import build
from hf_retarget.graph.rules import lookup, registered, registry, rule
from hf_retarget.graph.trace import export

aten = torch.ops.aten
Row = tuple[str, Callable[..., Any], Sequence[Any], str]


class Contracted(nn.Module):
    """A function of parameters whose outputs are contracted to one number, times the sum of the model's input."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], jointly: bool = False) -> None:
        super().__init__()
        self.function = function
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                self.register_buffer(f"argument{i}", argument)
            else:
                self.register_parameter(f"argument{i}", nn.Parameter(torch.rand(argument) + 0.5))
        self.names = [f"argument{i}" for i in range(len(arguments))]
        self.jointly = jointly
        self.weights = nn.ParameterList()
        with torch.no_grad():
            for output in self.outputs():
                sizes = [output.shape] if jointly else output.shape
                self.weights.extend(nn.Parameter(torch.rand(size)) for size in sizes)

    def outputs(self) -> list[Tensor]:
        return pytree.tree_leaves(self.function(*(getattr(self, name) for name in self.names)))

    def forward(self, x: Tensor) -> Tensor:
        total, weights = 0, list(self.weights)
        for output in self.outputs():
            value = output.to(x.dtype)
            if self.jointly:
                value = (value * weights.pop(0)).sum()
            else:
                mine, weights = weights[: output.dim()], weights[output.dim() :]
                for vector in reversed(mine):
                    value = value @ vector
            total = total + value
        return total * x.sum()


def buffer(values: Any) -> Tensor:
    """An argument that is a persistent buffer: indices as a list, or the size of a float vector as a number."""
    return torch.ones(values) if isinstance(values, int) else torch.tensor(values)


def operators(module: fx.GraphModule) -> set[str]:
    """The names of all operators in a trace, by overload and by packet."""
    targets = {
        node.target for each in module.modules() if isinstance(each, fx.GraphModule) for node in each.graph.nodes
    }
    packets = {target.overloadpacket for target in targets if isinstance(target, torch._ops.OpOverload)}
    return {str(target) for target in targets | packets}


def expected(groups: str) -> list[tuple[int, ...]]:
    return sorted(tuple(map(int, group.split("*"))) for group in groups.split())


def verify_row(row: Row, jointly: bool = False) -> None:
    operator, function, arguments, groups = row
    model, x = Contracted(function, arguments, jointly), torch.ones(2)
    program = export(model, x)
    assert operator in operators(program.graph_module), f"the row does not test {operator}"
    graph = build(model, program)
    assert not graph.unknown_operators
    result = rt.verify(model, graph, x, controls=None)
    assert result.error <= 1e-8, result.verdict
    assert sorted(group.shape for group in graph) == expected(groups)
    assert all(control.effective for control in result.controls), result.controls


def rows(table: list[Row]) -> pytest.MarkDecorator:
    counts: dict[str, int] = {}
    names = []
    for operator, *_ in table:
        counts[operator] = counts.get(operator, 0) + 1
        names.append(f"{operator}-{counts[operator]}")
    return pytest.mark.parametrize("row", table, ids=names)


# ---------------------------------------------------------------------- layers

LAYERS: list[Row] = [
    ("aten.linear", F.linear, [(3, 4), (5, 4), (5,)], "3 4 5"),
    ("aten.linear", F.linear, [(2, 3, 4), (5, 4)], "2 3 4 5"),
    ("aten.linear", F.linear, [(4,), (5, 4), (5,)], "4 5"),
    ("aten.bilinear", F.bilinear, [(3, 4), (3, 5), (6, 4, 5), (6,)], "3 4 5 6"),
    ("aten.mm", torch.mm, [(3, 4), (4, 5)], "3 4 5"),
    ("aten.bmm", torch.bmm, [(2, 3, 4), (2, 4, 5)], "2 3 2*4 5"),  # each matrix may order its inner axis by itself
    ("aten.addmm", torch.addmm, [(3, 5), (3, 4), (4, 5)], "3 4 5"),
    ("aten.addmm", torch.addmm, [(5,), (3, 4), (4, 5)], "3 4 5"),
    ("aten.baddbmm", torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], "2 3 2*4 5"),
    ("aten.mv", torch.mv, [(3, 4), (4,)], "3 4"),
    ("aten.dot", torch.dot, [(4,), (4,)], "4"),
    ("aten.vdot", torch.vdot, [(4,), (4,)], "4"),
    ("aten.outer", torch.outer, [(3,), (4,)], "3 4"),
    ("aten.matmul", torch.matmul, [(4,), (4,)], "4"),
    ("aten.matmul", torch.matmul, [(3, 4), (4,)], "3 4"),
    ("aten.matmul", torch.matmul, [(4,), (2, 4, 5)], "2 4 5"),
    ("aten.matmul", torch.matmul, [(2, 3, 4), (4, 5)], "2 3 4 5"),
    ("aten.matmul", torch.matmul, [(2, 3, 4), (2, 4, 5)], "2 3 2*4 5"),
    ("aten.matmul", torch.matmul, [(6, 1, 3, 4), (2, 4, 5)], "2 3 4 5 6"),
    ("aten.einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 4), (2, 4, 5)], "2 3 2*4 5"),
    ("aten.einsum", lambda a, b: torch.einsum("ji, kj", a, b), [(3, 4), (5, 3)], "3 4 5"),
    ("aten.einsum", lambda a, b: torch.einsum("...Ij,kj->I...k", a, b), [(2, 3, 4), (5, 4)], "2 3 4 5"),
    ("aten.einsum", lambda a: torch.einsum("iij->ij", a), [(4, 4, 5)], "4 5"),  # a diagonal: both axes are one
    ("aten.embedding", lambda w, i: F.embedding(i, w), [(7, 4), buffer([[1, 2, 0], [3, 3, 1]])], "4"),
    ("aten._weight_norm", lambda v, g: torch._weight_norm(v, g, 0), [(3, 4, 5), (3, 1, 1)], "3 4 5"),
    ("aten._weight_norm", lambda v, g: torch._weight_norm(v, g, 1), [(3, 4), (1, 4)], "3 4"),
    ("aten._weight_norm_interface", aten._weight_norm_interface, [(3, 4), (3, 1)], "3 4"),
]

NORMS: list[Row] = [
    (
        "aten.batch_norm",
        lambda x, mean, var, w, b: F.batch_norm(x, mean, var, w, b),
        [(2, 3, 4, 5), buffer(3), buffer(3), (3,), (3,)],
        "2 3 4 5",
    ),
    ("aten.batch_norm", lambda x, mean, var: F.batch_norm(x, mean, var), [(2, 3), buffer(3), buffer(3)], "2 3"),
    ("aten.instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [(2, 3, 7), (3,), (3,)], "2 3 7"),
    ("aten.layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), [(2, 3, 4), (4,), (4,)], "2 3 4"),
    ("aten.layer_norm", lambda x, w: F.layer_norm(x, (3, 4), w), [(2, 3, 4), (3, 4)], "2 3 4"),
    ("aten.layer_norm", lambda x: F.layer_norm(x, (4,)), [(3, 4)], "3 4"),
    ("aten.rms_norm", lambda x, w: F.rms_norm(x, (4,), w), [(2, 3, 4), (4,)], "2 3 4"),
    ("aten.group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), [(5, 6, 7), (6,), (6,)], "3 3*2 5 7"),
    ("aten.group_norm", lambda x: F.group_norm(x, 1), [(5, 6, 7)], "5 6 7"),
    ("aten.softmax", lambda x: x.softmax(-1), [(3, 4)], "3 4"),
    ("aten.log_softmax", lambda x: x.log_softmax(0), [(3, 4)], "3 4"),
    ("aten._softmax", lambda x: aten._softmax(x, 1, False), [(3, 4)], "3 4"),
    ("aten._log_softmax", lambda x: aten._log_softmax(x, 1, False), [(3, 4)], "3 4"),
]

CONVOLUTIONS: list[Row] = [
    ("aten.conv1d", F.conv1d, [(2, 3, 8), (4, 3, 3), (4,)], "2 3 4"),
    ("aten.conv1d", lambda x, w: F.conv1d(x, w, groups=2), [(5, 6, 8), (4, 3, 3)], "5 2 2*2 2*3"),
    ("aten.conv2d", F.conv2d, [(2, 3, 6, 6), (4, 3, 3, 3), (4,)], "2 3 4"),
    ("aten.conv2d", F.conv2d, [(3, 6, 6), (4, 3, 3, 3)], "3 4"),  # no batch
    ("aten.conv2d", F.conv2d, [(2, 3, 5, 7), (4, 3, 1, 1)], "2 3 4 5 7"),  # kernel 1 does not look at neighbours
    ("aten.conv2d", lambda x, w: F.conv2d(x, w, stride=2), [(2, 3, 5, 7), (4, 3, 1, 1)], "2 3 4"),
    ("aten.conv2d", lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 5, 7), (4, 3, 1, 1)], "2 3 4"),
    ("aten.conv2d.padding", lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 6, 6), (4, 3, 3, 3)], "2 3 4"),
    ("aten.conv2d", lambda x, w, b: F.conv2d(x, w, b, groups=3), [(2, 3, 6, 6), (3, 1, 3, 3), (3,)], "2 3"),
    ("aten.conv2d", lambda x, w: F.conv2d(x, w, groups=3), [(2, 3, 6, 6), (12, 1, 3, 3)], "2 3 3*4"),
    ("aten.conv3d", F.conv3d, [(2, 3, 4, 4, 4), (5, 3, 2, 2, 2), (5,)], "2 3 5"),
    ("aten.conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, groups=2), [(5, 6, 4), (6, 2, 3)], "5 2 2*2 2*3"),
    ("aten.conv_transpose2d", F.conv_transpose2d, [(2, 3, 4, 4), (3, 5, 2, 2), (5,)], "2 3 5"),
    ("aten.conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 3, 4, 4), (3, 5, 1, 1)], "2 3 5"),
    (
        "aten.conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, dilation=2, output_padding=1),
        [(2, 3, 4, 4), (3, 5, 1, 1)],
        "2 3 5",
    ),
    ("aten.conv_transpose3d", F.conv_transpose3d, [(2, 3, 3, 3, 3), (3, 5, 2, 2, 2)], "2 3 5"),
]


@rows(LAYERS)
def test_layers(row):
    verify_row(row)


@rows(NORMS)
def test_norms(row):
    verify_row(row)


@rows(CONVOLUTIONS)
def test_convolutions(row):
    verify_row(row)


# ---------------------------------------------------------------------- attention

SDPA = "aten.scaled_dot_product_attention"
attend = F.scaled_dot_product_attention

# Queries [batch 2, heads 3, length 4, inner 5], keys [2, 3, 6, 5], values [2, 3, 6, 7]: inner axes of queries and keys
# are contracted, and so are the lengths of keys and values; both may vary over batch and heads.
ATTENTION: list[Row] = [
    (SDPA, attend, [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)], "2 3 4 7 2*3*5 2*3*6"),
    (SDPA, attend, [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7), (4, 6)], "2 3 4 6 7 2*3*5"),
    (SDPA, attend, [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7), (3, 1, 6)], "2 3 4 7 2*3*5 3*6"),
    (SDPA, lambda q, k, v: attend(q, k, v, is_causal=True), [(2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 7)], "2 3 7 2*3*5"),
    # Six query heads, three key heads: each key head has its own two query heads.
    (
        SDPA,
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        [(2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 7, 8)],
        "2 3 3*2 4 8 2*3*5 2*3*7",
    ),
    (
        SDPA,
        lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True),
        [(2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 7, 8), (6, 4, 7)],
        "2 3 3*2 4 8 2*3*5 3*7",
    ),
]


@rows(ATTENTION)
def test_attention(row):
    verify_row(row)


# ---------------------------------------------------------------------- recurrent

LSTM = [(5, 6, 3), (1, 6, 4), (1, 6, 4), (16, 3), (16, 4), (16,), (16,)]  # x [time, batch, features], h, c, weights
GRU = [(5, 6, 3), (1, 6, 4), (12, 3), (12, 4), (12,), (12,)]
RNN = [(5, 6, 3), (1, 6, 4), (4, 3), (4, 4), (4,), (4,)]


def lstm(
    layers: int = 1, bidirectional: bool = False, batch_first: bool = False, biases: bool = True
) -> Callable[..., Any]:
    """All three outputs; of a bidirectional one only the first, as a vector over the final states ties directions."""

    def run(x, h, c, *weights):
        outputs = torch.lstm(x, (h, c), weights, biases, layers, 0.0, False, bidirectional, batch_first)
        return outputs[0] if bidirectional or layers > 1 else outputs

    return run


def gated(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, h, *weights: operator(x, h, weights, True, 1, 0.0, False, False, False)


RECURRENT: list[Row] = [
    ("aten.lstm.input", lstm(), LSTM, "3 4 6"),
    ("aten.lstm.input", lstm(batch_first=True), [(6, 5, 3), *LSTM[1:]], "3 4 6"),
    ("aten.lstm.input", lstm(biases=False), LSTM[:-2], "3 4 6"),
    (
        "aten.lstm.input",
        lstm(layers=2),
        [(5, 6, 3), (2, 6, 4), (2, 6, 4), *LSTM[3:], (16, 4), (16, 4), (16,), (16,)],
        "3 4 4 6",
    ),
    ("aten.lstm.input", lstm(bidirectional=True), [(5, 6, 3), (2, 6, 4), (2, 6, 4), *LSTM[3:] * 2], "3 4 4 6"),
    # A projection from 4 cells to 2 hidden units; batch of 6.
    ("aten.lstm.input", lstm(), [(5, 6, 3), (1, 6, 2), (1, 6, 4), (16, 3), (16, 2), (16,), (16,), (2, 4)], "2 3 4 6"),
    ("aten.gru.input", gated(torch.gru), GRU, "3 4 6"),
    ("aten.rnn_tanh.input", gated(torch.rnn_tanh), RNN, "3 4 6"),
    ("aten.rnn_relu.input", gated(torch.rnn_relu), RNN, "3 4 6"),
]


@rows(RECURRENT)
def test_recurrent(row):
    verify_row(row)


# ---------------------------------------------------------------------- reductions and orders

# A reduced axis is held only by the argument, so it may vary over all axes that are not reduced.
REDUCTIONS: list[Row] = [
    ("aten.sum", lambda x: x.sum(1), [(3, 4, 5)], "3 5 3*5*4"),
    ("aten.sum", lambda x: x.sum((0, -1), keepdim=True), [(3, 4, 5)], "4 4*3 4*3*5"),
    ("aten.sum", lambda x: x.sum(), [(3, 4)], "3 3*4"),
    ("aten.mean", lambda x: x.mean(-1, keepdim=True), [(3, 4)], "3 3*4"),
    ("aten.mean", lambda x: x.mean(), [(3, 4)], "3 3*4"),
    ("aten.amax", lambda x: x.amax(1), [(3, 4)], "3 3*4"),
    ("aten.amin", lambda x: x.amin((0,)), [(3, 4)], "4*3 4"),
    ("aten.all", lambda x: (x < 0.6).all(1), [(3, 4)], "3 3*4"),
    ("aten.any", lambda x: (x > 0.6).any(1), [(3, 4)], "3 3*4"),
    ("aten.count_nonzero", lambda x: (x > 0).count_nonzero(1), [(3, 4)], "3 3*4"),
    ("aten.linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, dim=1), [(3, 4)], "3 3*4"),
    ("aten.linalg_vector_norm", torch.linalg.vector_norm, [(3, 4)], "3 3*4"),
    ("aten.logsumexp", lambda x: x.logsumexp(1), [(3, 4)], "3 3*4"),
    ("aten.nansum", lambda x: x.nansum(1), [(3, 4)], "3 3*4"),
    ("aten.norm", lambda x: aten.norm.ScalarOpt_dim(x, 2, [1], True), [(3, 4)], "3 3*4"),
    ("aten.norm", lambda x: aten.norm.Scalar(x, 2), [(3, 4)], "3 3*4"),
    ("aten.prod", lambda x: x.prod(1), [(3, 4)], "3 3*4"),
    ("aten.std", lambda x: x.std(1), [(3, 4)], "3 3*4"),
    ("aten.var", lambda x: x.var(1, correction=0), [(3, 4)], "3 3*4"),
    ("aten.std_mean", lambda x: torch.std_mean(x, 1), [(3, 4)], "3 3*4"),
    ("aten.var_mean", lambda x: torch.var_mean(x, 1, keepdim=True), [(3, 4)], "3 3*4"),
    ("aten.aminmax", lambda x: x.aminmax(dim=1), [(3, 4)], "3 3*4"),
    ("aten.aminmax", lambda x: x.aminmax(), [(3, 4)], "3 3*4"),
    ("aten.max", lambda x: x.max(1).values, [(3, 4)], "3 3*4"),
    ("aten.max", lambda x: x.max(1), [(3, 4)], "3"),  # positions are facts about the order
    ("aten.max", lambda x: x.max(), [(3, 4)], "3 3*4"),
    ("aten.max", lambda x, y: torch.max(x + 1, y), [(3, 4), (4,)], "3 4"),
    ("aten.min", lambda x: x.min(-1, keepdim=True)[0], [(3, 4)], "3 3*4"),
    ("aten.min", lambda x: x.min(1).indices, [(3, 4)], "3"),
    ("aten.min", lambda x, y: torch.min(x + 1, y), [(3, 4), (4,)], "3 4"),
    ("aten.median", lambda x: x.median(1).values, [(3, 5)], "3 3*5"),
    ("aten.median", lambda x: x.median(), [(3, 5)], "3 3*5"),
    ("aten.mode", lambda x: x.mode(1).values, [(3, 4)], "3 3*4"),
    ("aten.mode", lambda x: x.mode(1).indices, [(3, 4)], "3"),
]

ORDERS: list[Row] = [
    ("aten.argmax", lambda x: x.argmax(1), [(3, 4)], "3"),
    ("aten.argmax", lambda x: x.argmax() + 1, [(3, 4)], ""),
    ("aten.argmin", lambda x: x.argmin(0, keepdim=True), [(3, 4)], "4"),
    ("aten.cumsum", lambda x: x.cumsum(1), [(3, 4)], "3"),
    ("aten.cumprod", lambda x: x.cumprod(-1), [(3, 4)], "3"),
    ("aten.logcumsumexp", lambda x: x.logcumsumexp(0), [(3, 4)], "4"),
    ("aten.argsort", lambda x: x.argsort(1), [(3, 4)], "3"),
    ("aten.sort", lambda x: x.sort(-1), [(3, 4)], "3"),
    ("aten.sort", lambda x: x.sort(-1).values, [(3, 4)], "3 3*4"),  # whatever the order was, it is sorted now
    ("aten.topk", lambda x: x.topk(2, 1), [(3, 4)], "3"),
    ("aten.topk", lambda x: x.topk(2, 1).values, [(3, 4)], "3 3*4"),
    ("aten.tril", lambda x: x.tril(), [(2, 3, 4)], "2"),
    ("aten.triu", lambda x: x.triu(1), [(2, 3, 4)], "2"),
]


@rows(REDUCTIONS)
def test_reductions(row):
    verify_row(row)


@rows(ORDERS)
def test_orders(row):
    verify_row(row)


# ---------------------------------------------------------------------- looking up

ALIKE = torch.tensor([2, 0]).view(1, 2, 1).expand(3, 2, 5).clone()  # the same two indices everywhere

INDEX: list[Row] = [
    ("aten.index", lambda x, i: x[:, i], [(3, 4, 5), buffer([2, 0])], "3 5"),
    ("aten.index", lambda x, i: x[:, i], [(3, 4, 5), buffer([2, 2])], "2 3 5"),  # two copies of one element
    ("aten.index", lambda x, i: x[i], [(3, 4), buffer([[2, 0], [1, 1]])], "4"),
    ("aten.index", lambda x, i, j: x[i, :, j], [(3, 4, 5), buffer([2, 0]), buffer([1, 3])], "4"),
    ("aten.index", lambda x, i, j: x[:, i, j], [(3, 4, 5), buffer([[2], [0]]), buffer([1, 3])], "3"),
    ("aten.index_select", lambda x, i: x.index_select(1, i), [(3, 4, 5), buffer([2, 0])], "3 5"),
    ("aten.gather", lambda x, i: x.gather(1, i), [(3, 4, 5), ALIKE], "3 5"),
    ("aten.gather", lambda x, i: x.gather(1, i), [(3, 4, 5), ALIKE[:2]], "5"),  # fewer rows than there are
    ("aten.take_along_dim", lambda x, i: x.take_along_dim(i, 1), [(3, 4, 5), ALIKE], "3 5"),
    ("aten.take_along_dim", lambda x, i: x.take_along_dim(i, 1), [(3, 4, 5), ALIKE[:1, :, :1]], "3 5"),
    ("aten.take_along_dim", lambda x, i: x.take_along_dim(i), [(3, 4), buffer([7, 2])], ""),
    ("aten.one_hot", lambda x: F.one_hot(x.argmax(1), 4), [(3, 4)], "3"),
]


@rows(INDEX)
def test_index(row):
    verify_row(row)


# ---------------------------------------------------------------------- shape

SHAPES: list[Row] = [
    ("aten.view", lambda x: x.view(3, 2, 4), [(3, 8)], "2 3 4"),
    ("aten.view", lambda x: x.view(2, 6), [(4, 3)], "2 2 2*3"),  # 4 = 2·2', and 2'·3 makes the last axis
    ("aten._unsafe_view", lambda x: aten._unsafe_view(x, [3, 2, 4]), [(3, 8)], "2 3 4"),
    ("aten.reshape", lambda x: x.reshape(3, 20), [(3, 4, 5)], "3 4 4*5"),
    ("aten.reshape", lambda x: x.reshape(5, 6, 2), [(5, 4, 3)], "5"),  # 4·3 does not align with 6·2
    ("aten.flatten", lambda x: x.flatten(1), [(3, 4, 5)], "3 4 4*5"),
    ("aten.ravel", lambda x: x.ravel(), [(3, 4)], "3 3*4"),
    ("aten.unflatten", lambda x: x.unflatten(1, (2, -1)), [(3, 8)], "2 3 4"),
    ("aten.reshape_as", lambda x, y: x.reshape_as(y) + y, [(3, 8), (3, 2, 4)], "2 3 4"),
    ("aten.view_as", lambda x, y: x.view_as(y) + y, [(3, 8), (3, 2, 4)], "2 3 4"),
    ("aten.permute", lambda x: x.permute(2, 0, 1), [(3, 4, 5)], "3 4 5"),
    ("aten.transpose", lambda x: x.transpose(-1, 0), [(3, 4, 5)], "3 4 5"),
    ("aten.swapaxes", lambda x: x.swapaxes(0, 1), [(3, 4, 5)], "3 4 5"),
    ("aten.swapdims", lambda x: x.swapdims(0, 1), [(3, 4, 5)], "3 4 5"),
    ("aten.t", lambda x: x.t(), [(3, 4)], "3 4"),
    ("aten.numpy_T", lambda x: aten.numpy_T(x), [(3, 4, 5)], "3 4 5"),
    ("aten.mT", lambda x: aten.mT(x), [(3, 4, 5)], "3 4 5"),
    ("aten.movedim", lambda x: x.movedim(0, -1), [(3, 4, 5)], "3 4 5"),
    ("aten.movedim", lambda x: x.movedim((2, 0), (0, 1)), [(3, 4, 5)], "3 4 5"),
    ("aten.unsqueeze", lambda x: x.unsqueeze(-2), [(3, 4)], "3 4"),
    ("aten.squeeze", lambda x: x.squeeze(), [(1, 3, 1, 4)], "3 4"),
    ("aten.squeeze", lambda x: x.squeeze(2), [(1, 3, 1, 4)], "3 4"),
    ("aten.expand", lambda x: x.expand(5, 3, 4), [(3, 1)], "3 4 5"),  # 4 and 5: copies, free
    ("aten.broadcast_to", lambda x: x.broadcast_to(5, 3, 4), [(3, 1)], "3 4 5"),
    ("aten.repeat", lambda x: x.repeat(2, 1), [(3, 4)], "3 4 3*2"),
    ("aten.tile", lambda x: x.tile((2,)), [(3, 4)], "3 4 4*2"),
    ("aten.repeat_interleave.self_int", lambda x: x.repeat_interleave(2, 0), [(3, 4)], "3 4 3*2"),
    ("aten.repeat_interleave.self_int", lambda x: x.repeat_interleave(2), [(3, 4)], "3 3*4 3*4*2"),
    ("aten.cat", lambda *xs: torch.cat(xs), [(3, 4), (5, 4)], "3 4 5"),
    ("aten.cat", lambda x: torch.cat([x, x], 1), [(3, 4)], "3 4"),
    ("aten.concat", lambda *xs: torch.concat(xs, -1), [(4, 3), (4, 5)], "3 4 5"),
    ("aten.concatenate", lambda *xs: torch.concatenate(xs), [(3, 4), (5, 4), (6, 4)], "3 4 5 6"),
    ("aten.stack", lambda *xs: torch.stack(xs, 1), [(3, 4), (3, 4)], "3 4"),
    # Pieces are used apart: each has its own order, also along the axes that are not cut.
    ("aten.chunk", lambda x: x.chunk(2), [(6, 4)], "3 3 4 4"),
    ("aten.split", lambda x: x.split(2, 1), [(4, 5)], "2 2 4 4 4"),
    ("aten.split_with_sizes", lambda x: aten.split_with_sizes(x, [2, 3]), [(5, 4)], "2 3 4 4"),
    ("aten.tensor_split", lambda x: x.tensor_split([2]), [(5, 4)], "2 3 4 4"),
    ("aten.unbind", lambda x: x.unbind(1), [(3, 2, 4)], "3 3 4 4"),
    # The remainder is unused, so its axes vary over one another.
    ("aten.select", lambda x: x[1], [(2, 3, 4)], "3 4 3 3*4"),
    ("aten.select", lambda x: x.select(-1, -1), [(3, 4, 2)], "3 4 3 3*4"),
    ("aten.narrow", lambda x: x.narrow(0, -3, 3), [(5, 4)], "3 4 2 2*4"),
    ("aten.slice", lambda x: x[2:], [(5, 4)], "3 4 2 2*4"),
    ("aten.slice", lambda x: x[:-2], [(5, 4)], "3 4 2 2*4"),
    ("aten.slice", lambda x: x[::2], [(6, 4)], "3 4 3 3*4"),  # every second row
    ("aten.slice", lambda x: x[::2], [(5, 4)], "4"),  # 5 is not divisible: pinned
]

COPIES: list[Row] = [
    ("aten.alias", aten.alias, [(3, 4)], "3 4"),
    ("aten.alpha_dropout", lambda x: aten.alpha_dropout(x, 0.5, False), [(3, 4)], "3 4"),
    ("aten.feature_dropout", lambda x: aten.feature_dropout(x, 0.5, False), [(3, 4)], "3 4"),
    ("aten.dropout", lambda x: aten.dropout(x, 0.5, False), [(3, 4)], "3 4"),
    ("aten.dropout_", lambda x: aten.dropout_(x.exp(), 0.5, False), [(3, 4)], "3 4"),
    ("aten.clone", lambda x: x.clone(), [(3, 4)], "3 4"),
    ("aten.contiguous", lambda x: x.t().contiguous(), [(3, 4)], "3 4"),
    ("aten.detach", aten.detach, [(3, 4)], "3 4"),
    ("aten.detach_", lambda x: aten.detach_(x.exp()), [(3, 4)], "3 4"),
    ("aten.expand_as", lambda x, y: x.expand_as(y) + y, [(3, 1), (3, 4)], "3 4"),
    ("aten.expand_as", lambda x, y: x[:, :1].expand_as(y) * y, [(3, 2), (3, 4)], "3 4 3"),  # x[:, 1] is left over
    ("aten.hardswish", F.hardswish, [(3, 4)], "3 4"),
    ("aten.hardswish_", lambda x: F.hardswish(x.exp(), inplace=True), [(3, 4)], "3 4"),
    ("aten.lift_fresh_copy", aten.lift_fresh_copy, [(3, 4)], "3 4"),
    ("aten.to", lambda x: x.to(torch.float16), [(3, 4)], "3 4"),
    ("aten._to_copy", lambda x: aten._to_copy(x, dtype=torch.float16), [(3, 4)], "3 4"),
    ("aten.type_as", lambda x, y: x.type_as(y), [(3, 4), (5,)], "3 4 5"),  # y gives only its type
    ("aten.copy_", lambda x, y: x * x.exp().copy_(y), [(3, 4), (4,)], "3 4"),
    ("aten.masked_fill_", lambda x, y: x.exp().masked_fill_(y > 1, 0.0), [(3, 4), (4,)], "3 4"),
    ("aten.where", torch.where, [buffer([[True, False, True, True]]), (3, 4), (3, 1)], "3"),
    ("aten.where", lambda x, y: torch.where(x > 0, x, y), [(3, 4), (3, 1)], "3 4"),
    ("aten.prelu", F.prelu, [(2, 3, 4), (3,)], "2 3 4"),
    ("aten.prelu", F.prelu, [(2, 3, 4), (1,)], "2 3 4"),
    ("aten.prelu", F.prelu, [(2, 3, 4), ()], "2 3 4"),
    ("aten.glu", F.glu, [(3, 8)], "3 4"),
]

# A uniform tensor is independent of the axes of the tensor that gave its size.
UNIFORM: list[Row] = [
    ("aten.empty_like", lambda x: torch.empty_like(x).copy_(x), [(3, 4)], "3 4"),
    ("aten.new_empty", lambda x: x.new_empty(3, 4).copy_(x), [(3, 4)], "3 4"),
    ("aten.empty", lambda x: torch.empty(3, 4, dtype=x.dtype).copy_(x), [(3, 4)], "3 4"),
    ("aten.full", lambda x: torch.full((3, 4), 2.0, dtype=x.dtype).add_(x), [(3, 4)], "3 4"),
    ("aten.ones", lambda x: torch.ones(3, 4, dtype=x.dtype).mul_(x), [(3, 4)], "3 4"),
    ("aten.zeros", lambda x: torch.zeros(3, 4, dtype=x.dtype).add_(x), [(3, 4)], "3 4"),
    ("aten.fill_", lambda x: x + x.exp().fill_(2.0), [(3, 4)], "3 4"),
    ("aten.zero_", lambda x: x + x.exp().zero_(), [(3, 4)], "3 4"),
    ("aten.full_like", lambda x: x * torch.full_like(x, 2.0), [(3, 4)], "3 4"),
    ("aten.ones_like", lambda x: (x.sum(0), torch.ones_like(x)), [(3, 4)], "4*3 4 3 4"),
    ("aten.zeros_like", lambda x: (x.sum(0), torch.zeros_like(x)), [(3, 4)], "4*3 4 3 4"),
    ("aten.new_full", lambda x: x * x.new_full((5, 1, 4), 2.0), [(3, 4)], "3 4 5"),
    ("aten.new_ones", lambda x: x * x.new_ones(5, 1, 1), [(3, 4)], "3 4 5"),
    ("aten.new_zeros", lambda x: x + x.new_zeros(5, 1, 4), [(3, 4)], "3 4 5"),
]


@rows(SHAPES)
def test_shapes(row):
    verify_row(row)


@rows(COPIES)
def test_copies(row):
    verify_row(row)


@rows(UNIFORM)
def test_uniform(row):
    verify_row(row)


# ---------------------------------------------------------------------- space

IMAGE = [(2, 3, 4, 4)]
LINE = [(2, 3, 8)]
VOLUME = [(2, 3, 4, 4, 4)]

SPACE: list[Row] = [
    ("aten.adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), LINE, "2 3"),
    ("aten.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE, "2 3"),
    ("aten.adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 2), VOLUME, "2 3"),
    ("aten.avg_pool1d", lambda x: F.avg_pool1d(x, 2), LINE, "2 3"),
    ("aten.avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE, "2 3"),
    ("aten.avg_pool3d", lambda x: F.avg_pool3d(x, 2), VOLUME, "2 3"),
    ("aten.max_pool1d", lambda x: aten.max_pool1d(x, [2]), LINE, "2 3"),
    ("aten.max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE, "2 3"),
    ("aten.max_pool3d", lambda x: F.max_pool3d(x, 2), VOLUME, "2 3"),
    ("aten.adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2), LINE, "2 3"),
    ("aten.adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), IMAGE, "2 3"),
    ("aten.max_pool2d_with_indices", lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE, "2 3"),
    ("aten.upsample_nearest1d", lambda x: F.interpolate(x, scale_factor=2), LINE, "2 3"),
    ("aten.upsample_linear1d", lambda x: F.interpolate(x, 5, mode="linear"), LINE, "2 3"),
    ("aten.upsample_nearest2d", lambda x: F.interpolate(x, 8), IMAGE, "2 3"),
    ("aten.upsample_bilinear2d", lambda x: F.interpolate(x, 8, mode="bilinear"), IMAGE, "2 3"),
    ("aten.upsample_bicubic2d", lambda x: F.interpolate(x, 8, mode="bicubic"), IMAGE, "2 3"),
    ("aten._upsample_bilinear2d_aa", lambda x: F.interpolate(x, 3, mode="bilinear", antialias=True), IMAGE, "2 3"),
    ("aten._upsample_bicubic2d_aa", lambda x: F.interpolate(x, 3, mode="bicubic", antialias=True), IMAGE, "2 3"),
    ("aten.upsample_nearest3d", lambda x: F.interpolate(x, 8), VOLUME, "2 3"),
    ("aten.upsample_trilinear3d", lambda x: F.interpolate(x, 8, mode="trilinear"), VOLUME, "2 3"),
    (
        "aten.grid_sampler",
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        [(2, 3, 4, 5), (2, 6, 7, 2)],
        "2 3",
    ),
    (
        "aten.grid_sampler",
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        [*VOLUME, (2, 6, 6, 6, 3)],
        "2 3",
    ),
    ("aten.pad", lambda x: F.pad(x, (1, 2)), [(3, 4)], "2 3 4"),  # zeros are alike: two of them may change places
    ("aten.pad", lambda x: F.pad(x, (-1, 0)), [(3, 4)], "3 3 3"),  # 4 = 1 + 3, and the rows of the first part
    ("aten.pad", lambda x: F.pad(x, (1, 1), mode="reflect"), [(3, 4)], "3"),
    ("aten.pad", lambda x: F.pad(x, (1, 1, 0, 0), mode="circular"), [(2, 3, 4, 5)], "2 3 4"),
    ("aten.constant_pad_nd", lambda x: aten.constant_pad_nd(x, [0, 2], 1.0), [(3, 4)], "2 3 4"),
    ("aten.reflection_pad1d", lambda x: aten.reflection_pad1d(x, [1, 1]), [(2, 3, 4)], "2 3"),
    ("aten.reflection_pad2d", lambda x: aten.reflection_pad2d(x, [1, 1, 1, 1]), IMAGE, "2 3"),
    ("aten.replication_pad1d", lambda x: aten.replication_pad1d(x, [1, 1]), [(2, 3, 4)], "2 3"),
    ("aten.replication_pad2d", lambda x: aten.replication_pad2d(x, [1, 1, 1, 1]), IMAGE, "2 3"),
    ("aten.im2col", lambda x: F.unfold(x, 2), IMAGE, "2 3"),
    ("aten.col2im", lambda x: F.fold(x, (4, 4), 2), [(2, 12, 9)], "2 3"),
    ("aten.unfold", lambda x: x.unfold(1, 2, 2), [(3, 8, 4)], "3 4"),
    ("aten.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [(2, 12, 4, 4)], "2 3"),
    ("aten.pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), IMAGE, "2 3"),
    ("aten.channel_shuffle", lambda x: F.channel_shuffle(x, 2), [(5, 6, 7, 4)], "5 2 2*3 7 4"),
    ("aten.roll", lambda x: x.roll(1, 1), [(3, 4)], "3"),
    ("aten.roll", lambda x: x.roll(1), [(3, 4)], ""),
    ("aten.flip", lambda x: x.flip(0), [(3, 4)], "4"),
]


@rows(SPACE)
def test_space(row):
    verify_row(row)


# ---------------------------------------------------------------------- pointwise, by torch's tag

POINTWISE: list[Row] = [
    ("aten.add.Tensor", torch.add, [(3, 1, 5), (4, 5)], "3 4 5"),
    ("aten.add.Tensor", lambda x: x + x.t(), [(4, 4)], "4"),  # both axes are one
    ("aten.mul.Tensor", torch.mul, [(3, 4), ()], "3 4"),
    ("aten.mul.Tensor", lambda x: x * torch.arange(4), [(3, 4)], "3"),  # a constant that varies pins
    ("aten.sub.Tensor", torch.sub, [(3, 4), (3, 1)], "3 4"),
    ("aten.div.Tensor_mode", lambda x, y: torch.div(x, y, rounding_mode="floor"), [(3, 4), (4,)], "3 4"),
    ("aten.addcmul.default", torch.addcmul, [(3, 4), (3, 1), (4,)], "3 4"),
    ("aten.addcdiv.default", torch.addcdiv, [(4,), (3, 4), (3, 1)], "3 4"),
    ("aten.clamp.Tensor", lambda x, low: (x + 1).clamp(min=low), [(3, 4), (4,)], "3 4"),
    ("aten.clamp.default", lambda x: x.clamp(-0.5, 0.5), [(3, 4)], "3 4"),
    ("aten.lerp.Tensor", torch.lerp, [(3, 4), (3, 4), (4,)], "3 4"),
    ("aten.maximum.default", lambda x, y: torch.maximum(x + 1, y), [(3, 4), (4,)], "3 4"),
    ("aten.masked_fill.Scalar", lambda x, y: x.masked_fill(y > 1, 0.0), [(3, 4), (4,)], "3 4"),
    ("aten.pow.Tensor_Tensor", lambda x, y: x.abs() ** y, [(3, 4), (3, 1)], "3 4"),
    ("aten.atan2.default", torch.atan2, [(3, 4), (4,)], "3 4"),
    ("aten.gt.Tensor", lambda x, y: torch.gt(x + 1, y), [(3, 4), (4,)], "3 4"),
    ("aten.gelu.default", F.gelu, [(3, 4)], "3 4"),
    ("aten.hardtanh.default", F.hardtanh, [(3, 4)], "3 4"),
    ("aten.silu_.default", lambda x: F.silu(x.exp(), inplace=True), [(3, 4)], "3 4"),
    ("aten.softplus.default", F.softplus, [(3, 4)], "3 4"),
    ("aten.rsub.Scalar", lambda x: 1 - x, [(3, 4)], "3 4"),
    ("aten.add_.Tensor", lambda x, y: x.exp().add_(y), [(3, 4), (4,)], "3 4"),
]


def add_to_a_part(x: Tensor, y: Tensor) -> Tensor:
    result = x.exp()
    result[:, :2].add_(y)
    return result


def write_a_part(x: Tensor, y: Tensor) -> Tensor:
    result = x.new_zeros(3, 5)
    result[:, :2] = x
    result[:, 2:] = y
    return result


def write_a_part_of_zeros(x: Tensor, y: Tensor) -> Tensor:
    result = torch.zeros(3, 5, dtype=x.dtype)
    result[:, :2].copy_(x)
    result[:, 2:].copy_(y)
    return result


VIEWS: list[Row] = [
    ("aten.add_.Tensor", add_to_a_part, [(3, 5), (3, 2)], "3 2 3"),  # 5 = 2 + 3
    ("aten.copy_.default", write_a_part, [(3, 2), (3, 3)], "3 2 3"),
    ("aten.copy_.default", write_a_part_of_zeros, [(3, 2), (3, 3)], "3 2 3"),
    ("aten.relu_.default", lambda x: F.relu(x.exp().view(3, 2, 4), inplace=True), [(3, 8)], "2 3 4"),
]


@rows(POINTWISE)
def test_pointwise(row):
    verify_row(row)


@rows(VIEWS)
def test_writes_through_views(row):
    verify_row(row)


# ---------------------------------------------------------------------- what operators hold inside

# [3, 4] contracted with [3, 4]: the 4 may vary over the 3, unless something holds the 4 alone; then it is the reverse.
JOINTLY: list[Row] = [
    ("aten.exp.default", torch.exp, [(3, 4)], "3 3*4"),
    ("aten.softmax", lambda x: x.softmax(1), [(3, 4)], "3 3*4"),
    ("aten.softmax", lambda x: x.softmax(0), [(3, 4)], "4*3 4"),
    ("aten.layer_norm", lambda x: F.layer_norm(x, (4,)), [(3, 4)], "3 3*4"),
    ("aten.layer_norm", lambda x: F.layer_norm(x, (3, 4)), [(3, 4)], "3 3*4"),
    ("aten.layer_norm", lambda x, w: F.layer_norm(x, (4,), w), [(3, 4), (4,)], "3 4"),
    ("aten.group_norm", lambda x: F.group_norm(x, 3), [(5, 6)], "5 5*3 5*3*2"),
    ("aten.instance_norm", F.instance_norm, [(2, 3, 7)], "2 2*3 2*3*7"),
    ("aten.cat", lambda *xs: torch.cat(xs), [(3, 4), (5, 4)], "3 3*4 5 5*4"),
    ("aten.stack", lambda *xs: torch.stack(xs), [(3, 4), (3, 4)], "3 3*4 3 3*4"),
    ("aten._weight_norm", lambda v, g: torch._weight_norm(v, g, 0), [(3, 4), (3, 1)], "3 3*4"),
    # A running sum carries its rows along the pinned 4, and a shift moves rows from column to column: no 3 for each 4.
    ("aten.cumsum", lambda x: x.cumsum(1), [(3, 4)], "3"),
    ("aten.cumprod", lambda x: x.cumprod(1), [(3, 4)], "3"),
    ("aten.logcumsumexp", lambda x: x.logcumsumexp(1), [(3, 4)], "3"),
    ("aten.argsort", lambda x: x.argsort(1), [(3, 4)], "3"),
    ("aten.sort", lambda x: x.sort(1), [(3, 4)], "3"),
    ("aten.roll", lambda x: x.roll(1, 1), [(3, 4)], "3"),
    ("aten.flip", lambda x: x.flip(1), [(3, 4)], "3"),
    ("aten.avg_pool1d", lambda x: F.avg_pool1d(x, 3, 1, 1), [(3, 4)], "3"),
    ("aten.reflection_pad1d", lambda x: aten.reflection_pad1d(x, [1, -1]), [(3, 4)], "3"),
    # Every row meets every other: their inner axes are one.
    ("aten.matmul", lambda x: x @ x.t(), [(3, 4)], "3 4"),
    ("aten.mm", lambda x: x.mm(x.t()), [(3, 4)], "3 4"),
    ("aten.linear", lambda x: F.linear(x, x), [(3, 4)], "3 4"),
    ("aten.einsum", lambda x: torch.einsum("id,jd->ij", x, x), [(3, 4)], "3 4"),
    (SDPA, lambda x, v: attend(x, x, v), [(3, 4), (3, 5)], "3 4 5"),
    (SDPA, attend, [(3, 4, 5), (3, 6, 5), (3, 6, 7)], "3 3*4 3*5 3*6 3*7"),
]


@rows(JOINTLY)
def test_tensors_held_inside_operators(row):
    verify_row(row, jointly=True)


# ---------------------------------------------------------------------- the registry

REGISTERED = [
    *LAYERS,
    *NORMS,
    *CONVOLUTIONS,
    *ATTENTION,
    *RECURRENT,
    *REDUCTIONS,
    *ORDERS,
    *INDEX,
    *SHAPES,
    *COPIES,
    *UNIFORM,
    *SPACE,
]


def rule_of(operator: str) -> str | None:
    packet = ".".join(operator.split(".")[:2])
    return next((name for name in (operator, packet) if name in registered()), None)


def test_every_rule_has_a_row():
    assert set(registered()) - {rule_of(operator) for operator, *_ in REGISTERED} == set()


def test_every_row_belongs_to_a_rule():
    assert [operator for operator, *_ in REGISTERED if rule_of(operator) is None] == []


def test_pointwise_rows_need_no_rule():
    for operator, *_ in POINTWISE:
        _, packet, overload = operator.split(".")
        assert rule_of(operator) is None, f"{operator} has a rule: its row belongs to another table"
        assert lookup(getattr(getattr(aten, packet), overload)) is not None


def test_an_operator_has_one_rule():
    with pytest.raises(RuleError, match=r"'aten.linear' already has a rule"):
        rule(aten.linear, "... i, o i, o -> ... o")


def test_the_row_in_contributing_is_a_rule(monkeypatch):
    contributing = Path(__file__).parents[2] / "CONTRIBUTING.md"
    (row,) = re.findall(r"^rule\(.*\)$", contributing.read_text(encoding="utf-8"), re.MULTILINE)
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    exec(row, {"rule": rule, "aten": aten})
    verify_row(("aten.cdist", torch.cdist, [(3, 4), (5, 4)], "3 4 5"))


def test_a_malformed_row_is_refused_when_it_is_registered():
    with pytest.raises(RuleError, match="has no '->'"):
        rule(aten.trace, "n n")
    assert lookup(aten.trace.default) is None


def test_an_operator_without_a_rule_is_not_guessed():
    assert lookup(aten.linalg_inv.default) is None
    assert lookup(len) is None
