"""Random programs: the permutations of a graph must not change the result, whatever a model does with its parameters.

Hypothesis draws a program of a few operators on a few small parameters, and shrinks one that fails. A program is a list
of expressions: `t[0]`, `t[1]` … are the parameters, then the results so far. What no later step uses is contracted to a
number, alone or with parameters, in one of four ways, which differ in what may vary over what.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hf_retarget as rt

LARGEST = 600  # elements
ENDS = ("jointly", "separately", "halves", "cubed")


def write(x: Tensor, y: Tensor, dim: int, start: int, operator: str) -> Tensor:
    """A copy of x, part of which is written to in place."""
    result = x.clone()
    getattr(result.narrow(dim, start, y.shape[dim]), operator)(y)
    return result


@dataclass(frozen=True)
class Program:
    """The shapes of the parameters, the steps, and how each result that is left over is contracted."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[str, ...]
    ends: tuple[str, ...]

    def run(self, parameters: list[Tensor]) -> list[Tensor]:
        """All results that no later step uses."""
        t = list(parameters)
        for step in self.steps:
            t.append(eval(step, {"t": t, "torch": torch, "F": F, "write": write}))
        used = {int(number) for step in self.steps for number in re.findall(r"t\[(\d+)\]", step)}
        return [value for number, value in enumerate(t) if number not in used]


class Model(nn.Module):
    """A program as a model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in program.shapes)
        self.weights = nn.ParameterList()
        for result, end in zip(program.run(list(self.parameters_)), program.ends, strict=False):
            self.weights.extend(nn.Parameter(torch.randn(shape)) for shape in self.needed(result, end))

    @staticmethod
    def needed(result: Tensor, end: str) -> list[tuple[int, ...]]:
        shape, rank = tuple(result.shape), result.dim()
        axes = [tuple(size if i == dim else 1 for i, size in enumerate(shape)) for dim in range(rank)]
        halves = [(*shape[: rank // 2], *[1] * (rank - rank // 2)), shape[rank // 2 :]]
        return {"jointly": [shape], "separately": axes, "halves": halves, "cubed": []}[end]

    def forward(self, x: Tensor) -> Tensor:
        total, weights = 0, list(self.weights)
        for result, end in zip(self.program.run(list(self.parameters_)), self.program.ends, strict=False):
            result = result**3 if end == "cubed" else result
            for _ in self.needed(result, end):
                result = result * weights.pop(0)
            total = total + result.sum()
        return total * x.sum()


# ---------------------------------------------------------------------- steps


def any_dim(draw: st.DrawFn, x: Tensor) -> int:
    return draw(st.integers(0, x.dim() - 1))


def partner(draw: st.DrawFn, t: list[Tensor], fits) -> int:
    """The number of a tensor that fits; hypothesis drops the program if there is none."""
    numbers = [number for number, y in enumerate(t) if fits(y)]
    assume(numbers)
    return draw(st.sampled_from(numbers))


def alike_but_for(x: Tensor, dim: int):
    return lambda y: (
        y.dim() == x.dim() and all(a == b or i == dim for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)))
    )


def multiply_to(x: Tensor, transposed: bool):
    def fits(y: Tensor) -> bool:
        if y.dim() < 2 or x.shape[-1] != (y.shape[-1] if transposed else y.shape[-2]):
            return False
        lead = (x.shape[:-2], y.shape[:-2])
        return all(a == b or 1 in (a, b) for a, b in zip(reversed(lead[0]), reversed(lead[1]), strict=False))

    return fits


def broadcasts_with(x: Tensor):
    return lambda y: all(a == b or 1 in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape), strict=False))


def pointwise(draw, t, i):
    return f"t[{i}].{draw(st.sampled_from(['tanh', 'sigmoid', 'sin']))}()"


def combine(draw, t, i):
    return f"t[{i}] {draw(st.sampled_from('+*'))} t[{partner(draw, t, broadcasts_with(t[i]))}]"


def times_constant(draw, t, i):
    dim = any_dim(draw, t[i])
    size = t[i].shape[dim]
    values = draw(
        st.sampled_from(
            [[2.0] * size, [1.0 + k for k in range(size)], [1.0] * (size // 2) + [2.0] * (size - size // 2)]
        )
    )
    return f"t[{i}] * torch.tensor({values}, dtype=t[{i}].dtype).view({[size] + [1] * (t[i].dim() - 1 - dim)})"


def multiply(draw, t, i):
    return f"t[{i}] @ t[{partner(draw, t, multiply_to(t[i], False))}]"


def multiply_transposed(draw, t, i):
    return f"t[{i}] @ t[{partner(draw, t, multiply_to(t[i], True))}].transpose(-1, -2)"


def permute(draw, t, i):
    return f"t[{i}].permute({draw(st.permutations(range(t[i].dim())))})"


def merge(draw, t, i):
    assume(t[i].dim() > 1)
    start = draw(st.integers(0, t[i].dim() - 2))
    return f"t[{i}].flatten({start}, {start + 1})"


def divide(draw, t, i):
    dim = any_dim(draw, t[i])
    outer = [n for n in range(2, t[i].shape[dim]) if t[i].shape[dim] % n == 0]
    assume(outer)
    return f"t[{i}].unflatten({dim}, ({draw(st.sampled_from(outer))}, -1))"


def narrow(draw, t, i):
    dim = any_dim(draw, t[i])
    assume(t[i].shape[dim] > 1)
    length = draw(st.integers(1, t[i].shape[dim] - 1))
    return f"t[{i}].narrow({dim}, {draw(st.integers(0, t[i].shape[dim] - length))}, {length})"


def every_second(draw, t, i):
    dim = any_dim(draw, t[i])
    assume(t[i].shape[dim] > 3)
    return f"t[{i}][{':, ' * dim}{draw(st.integers(0, 1))}::2]"


def select(draw, t, i):
    dim = any_dim(draw, t[i])
    assume(t[i].dim() > 1)
    return f"t[{i}].select({dim}, {draw(st.integers(0, t[i].shape[dim] - 1))})"


def combine_chunks(draw, t, i):
    dim, count = any_dim(draw, t[i]), draw(st.sampled_from([2, 3]))
    assume(t[i].shape[dim] % count == 0)
    a, b = draw(st.permutations(range(count)))[:2]
    return f"(lambda c: c[{a}] {draw(st.sampled_from('+*'))} c[{b}])(t[{i}].chunk({count}, {dim}))"


def combine_rows(draw, t, i):
    dim = any_dim(draw, t[i])
    assume(t[i].dim() > 1 and 1 < t[i].shape[dim] < 5)
    a, b = draw(st.permutations(range(t[i].shape[dim])))[:2]
    return f"(lambda c: c[{a}] {draw(st.sampled_from('+*'))} c[{b}])(t[{i}].unbind({dim}))"


def concatenate(draw, t, i):
    dim = any_dim(draw, t[i])
    return f"torch.cat([t[{i}], t[{partner(draw, t, alike_but_for(t[i], dim))}]], {dim})"


def stack(draw, t, i):
    j = partner(draw, t, lambda y: y.shape == t[i].shape)
    return f"torch.stack([t[{i}], t[{j}]], {draw(st.integers(0, t[i].dim()))})"


def expand(draw, t, i):
    return f"t[{i}].unsqueeze(0).expand({[draw(st.integers(2, 3)), *t[i].shape]})"


def repeat(draw, t, i):
    dim = any_dim(draw, t[i])
    if draw(st.booleans()):
        return f"t[{i}].repeat_interleave(2, {dim})"
    return f"t[{i}].repeat({[2 if n == dim else 1 for n in range(t[i].dim())]})"


def pad(draw, t, i):
    return f"F.pad(t[{i}], ({draw(st.integers(0, 2))}, {draw(st.integers(0, 2))}))"


def reduce(draw, t, i):
    assume(t[i].dim() > 1)
    name = draw(st.sampled_from(["sum", "mean", "amax", "logsumexp"]))
    return f"t[{i}].{name}({any_dim(draw, t[i])}, keepdim={draw(st.booleans())})"


def normalise(draw, t, i):
    if draw(st.booleans()):
        return f"t[{i}].softmax({any_dim(draw, t[i])})"
    return f"F.layer_norm(t[{i}].exp(), ({t[i].shape[-1]},), eps=0.1)"


def group_norm(draw, t, i):
    assume(t[i].dim() > 1)
    groups = [n for n in range(1, t[i].shape[1] + 1) if t[i].shape[1] % n == 0]
    return f"F.group_norm(t[{i}], {draw(st.sampled_from(groups))}, eps=0.1)"


def along(draw, t, i):
    name = draw(st.sampled_from(["cumsum({})", "flip({})", "roll(1, {})"]))
    return f"t[{i}].{name.format(any_dim(draw, t[i]))}"


def look_up(draw, t, i):
    dim = any_dim(draw, t[i])
    indices = draw(st.lists(st.integers(0, t[i].shape[dim] - 1), min_size=1, max_size=3))
    return f"t[{i}].index_select({dim}, torch.tensor({indices}))"


def write_part(draw, t, i):
    dim = any_dim(draw, t[i])
    fits = alike_but_for(t[i], dim)
    j = partner(draw, t, lambda y: fits(y) and y.shape[dim] < t[i].shape[dim])
    start = draw(st.integers(0, t[i].shape[dim] - t[j].shape[dim]))
    return f"write(t[{i}], t[{j}], {dim}, {start}, '{draw(st.sampled_from(['add_', 'copy_', 'mul_']))}')"


def convolve(draw, t, i):
    assume(t[i].dim() == 3)
    _, channels, length = t[i].shape

    def fits(y: Tensor) -> bool:
        if y.dim() != 3 or y.shape[2] > length or channels % y.shape[1]:
            return False
        return y.shape[0] % (channels // y.shape[1]) == 0

    j = partner(draw, t, fits)
    return f"F.conv1d(t[{i}], t[{j}], groups={channels // t[j].shape[1]})"


def pool(draw, t, i):
    assume(t[i].dim() > 1)
    return f"F.{draw(st.sampled_from(['avg', 'max']))}_pool1d(t[{i}].flatten(0, -2), 3, 1, 1)"


STEPS = [
    pointwise,
    combine,
    times_constant,
    multiply,
    multiply_transposed,
    permute,
    merge,
    divide,
    narrow,
    every_second,
    select,
    combine_chunks,
    combine_rows,
    concatenate,
    stack,
    expand,
    repeat,
    pad,
    reduce,
    normalise,
    group_norm,
    along,
    look_up,
    write_part,
    convolve,
    pool,
]


@st.composite
def programs(draw: st.DrawFn, longest: int) -> Program:
    sizes = st.sampled_from([2, 3, 4, 6])
    shapes = draw(st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    t = [torch.rand(shape) for shape in shapes]
    steps = []
    for _ in range(draw(st.integers(1, longest))):
        step = draw(st.sampled_from(STEPS))(draw, t, draw(st.integers(0, len(t) - 1)))
        result = eval(step, {"t": t, "torch": torch, "F": F, "write": write})
        assume(0 < result.numel() <= LARGEST and 0 < result.dim() < 6)
        t.append(result)
        steps.append(step)
    ends = draw(st.lists(st.sampled_from(ENDS), min_size=len(t), max_size=len(t)))
    return Program(tuple(shapes), tuple(steps), tuple(ends))


def verify(program: Program) -> None:
    torch.manual_seed(0)
    model, x = Model(program), torch.ones(2)
    graph = rt.trace(model, x)
    assert [str(unknown) for unknown in graph.unknown_operators] == []
    try:
        result = rt.verify(model, graph, x, controls=0)
    except rt.TraceError:  # only zeros
        return
    assert result.error <= max(1e-8, 1e3 * result.noise_floor), (result.verdict, [str(group) for group in graph])


SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=100, suppress_health_check=SLOW_TO_DRAW)
@given(program=programs(longest=4))
def test_a_random_program_keeps_its_value(program):
    verify(program)


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=SLOW_TO_DRAW, derandomize=False)
@given(program=programs(longest=8))
def test_many_long_random_programs_keep_their_values(program):
    verify(program)


# Programs that once failed.
FOUND = [
    # Rows that meet all other rows have one inner axis, also where rows are used apart.
    ([(3, 4)], ["t[0] @ t[0].t()", "(lambda c: c[1] * c[2])(t[0].unbind(0))"]),
    ([(2, 3, 4)], ["t[0] @ t[0].transpose(-1, -2)", "(lambda c: c[1] * c[2])(t[0].chunk(3, 1))"]),
    ([(4, 3, 2)], ["F.conv1d(t[0], t[0])"]),
    # Parts along two axes have elements in common.
    ([(6, 2, 3)], ["t[0].select(2, 2)", "t[0].select(1, 0)"]),
    ([(2, 3, 2)], ["(lambda c: c[1] + c[0])(t[0].unbind(2))", "t[0].select(0, 0)"]),
    ([(4, 2, 2)], ["t[0].select(1, 0)", "t[0][0::2]"]),
    ([(4, 2, 4)], ["t[0][0::2]", "t[0].select(0, 3)"]),
    (
        [(2, 4, 2)],
        [
            "t[0].narrow(0, 1, 1)",
            "(lambda c: c[0] * c[3])(t[0].unbind(1))",
            "t[0] @ t[2].transpose(-1, -2)",
            "t[1].flip(2)",
        ],
    ),
    # The first rows of a sum lie inside a product inside it.
    (
        [(2, 2), (2,), (6, 5)],
        ["t[0].flatten()", "torch.cat([t[3], t[1]])", "t[4].view(6, 1) * t[2]", "t[5].narrow(0, 0, 2)"],
    ),
    # A pinned axis that is mixed with itself: nothing varies along it.
    ([(2, 6)], ["t[0].index_select(0, torch.tensor([1, 0]))", "t[1] * t[0]"]),
    ([(3, 4)], ["F.avg_pool1d(t[0], 3, 1, 1)", "t[1] + t[0]"]),
    ([(3, 4)], ["t[0].cumsum(1)"]),
    ([(3, 4)], ["t[0].roll(1, 1)", "t[0] * t[1]"]),
    # An axis that occurs twice, (2 × 3) · (2 × 3), is regrouped as 2 · (3 × 2 × 3): which 3 belongs to which 2?
    ([(6, 2)], ["t[0] @ t[0].t()", "t[1] * t[1]", "t[2].reshape(2, 18)"]),
    ([(6, 6)], ["t[0].repeat(1, 2)", "t[0] @ t[0]", "t[1].reshape(6, 4, 3)", "F.pad(t[3], (2, 2))"]),
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("shapes", "steps"), FOUND)
def test_programs_that_once_failed(shapes, steps, end):
    verify(Program(tuple(shapes), tuple(steps), (end,) * 9))
