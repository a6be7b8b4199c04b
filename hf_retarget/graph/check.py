"""Verifies a permutation graph by running the model: f(x; πθ) = f(x; θ), in float64, on weights that hide nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hf_retarget.errors import TraceError
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import Group, PermutationGraph
from hf_retarget.graph.trace import Example, clear_caches, example_arguments

_ULP = 2.0**-52
_EFFECT = 1e3
"""A control must change the output by this many times what the permutation itself did."""


@dataclass(frozen=True)
class Control:
    """A negative control: one tensor of a group permuted without the others, which must change the output."""

    group: str
    tensor: str
    error: float
    effective: bool


@dataclass(frozen=True)
class CheckResult:
    """What a check has found.

    `error` is the largest deviation of an output over all drawn permutations, relative to the largest output;
    `noise_floor` is what a last-bit change of the weights does to the same output.
    """

    error: float
    noise_floor: float
    tolerance: float
    draws: int
    controls: tuple[Control, ...]
    seconds: float

    @property
    def invariant(self) -> bool:
        """Whether the outputs stayed the same, up to rounding."""
        return self.error <= max(self.tolerance, min(10 * self.noise_floor, 1e-4))

    @property
    def passed(self) -> bool:
        """Whether the outputs stayed the same and the check was able to tell."""
        powerful = not self.controls or any(control.effective for control in self.controls)
        return self.invariant and powerful

    @property
    def verdict(self) -> str:
        """One sentence."""
        figures = f"relative error {self.error:.1e}, noise floor {self.noise_floor:.1e}"
        if not self.invariant:
            return f"FAILED: the graph does not preserve the function ({figures}, tolerance {self.tolerance:.0e})."
        effective = sum(control.effective for control in self.controls)
        if not self.passed:
            return f"FAILED: none of {len(self.controls)} negative controls changed the output; the check cannot tell."
        return (
            f"passed: {self.draws} random permutation{'s' * (self.draws > 1)} kept the function ({figures}); "
            f"{effective} of {len(self.controls)} negative controls changed it."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self) | {"passed": self.passed, "verdict": self.verdict}


def check(
    model: nn.Module,
    graph: PermutationGraph,
    example_input: Example | None = None,
    *,
    draws: int = 2,
    controls: int | None = 8,
    tolerance: float = 1e-8,
    seed: int = 0,
) -> CheckResult:
    """Run the model on random weights, permuted and not, and compare.

    The model is not touched: a float64 copy gets random parameters and buffers, so that zero-initialised gammas, unit
    variances or empty position tables cannot hide a mistake. For `controls` groups (None: all) one tensor is permuted
    without the rest of its group.

    Example:
        >>> from torch import nn
        >>> from hf_retarget.graph.trace import trace
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.zeros(1, 4)
        >>> check(model, trace(model, x), x).passed
        True
    """
    began = time.perf_counter()
    probe = _Probe(model, example_input, seed)
    error = max(
        (probe.deviation(graph.apply(graph.random(seed + draw), probe.state)) for draw in range(draws)), default=0.0
    )
    noise = probe.noise()
    threshold = _EFFECT * max(error, noise, _ULP)
    found = tuple(_control(graph, probe, group, threshold) for group in _choose(graph, controls))
    return CheckResult(error, noise, tolerance, draws, found, time.perf_counter() - began)


# ---------------------------------------------------------------------- running the model


class _Probe:
    """A float64 copy of a model with random weights and a random input, and the output it gives."""

    def __init__(self, model: nn.Module, example_input: Example | None, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.twin = _double(model).eval()
        self.state = {name: self._randomise(name, value) for name, value in _untied(self.twin).items()}
        arguments = example_arguments(model, example_input)
        self.arguments: Any = pytree.tree_map_only(Tensor, self._random_input, arguments)
        self.output = self._run(self.state)
        self.scale = max((float(value.abs().max()) for value in self.output if value.numel()), default=0.0)
        if not self.scale or self.scale != self.scale or self.scale == float("inf"):
            raise TraceError(
                f"{type(model).__name__} gives {'only zeros' if not self.scale else self.scale} on random weights, "
                "so nothing can be verified; try another seed or example_input="
            )

    def _run(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        clear_caches(self.twin)
        positional, keywords = self.arguments
        with torch.no_grad(), _float64():
            output = functional_call(self.twin, dict(state), positional, keywords)
        return [value.double() for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]

    def deviation(self, state: Mapping[str, Tensor]) -> float:
        """The largest change of an output, relative to the largest output."""
        changed = self._run(self.state | dict(state))
        pairs = zip(changed, self.output, strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs if a.numel()) / self.scale

    def noise(self) -> float:
        """What a change of every weight in its last bit does."""
        return self.deviation(
            {
                name: value * (1 + _ULP * self._normal(value.shape)) if value.is_floating_point() else value
                for name, value in self.state.items()
            }
        )

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _random_input(self, example: Tensor) -> Tensor:
        return self._normal(example.shape) if example.is_floating_point() else example

    def _randomise(self, name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        if value.dim() > 1:
            # Scaled by what one output sums over, so that signals neither vanish nor explode through the layers.
            fan_in = value[0].numel() if value.shape[0] > 1 else 4
            return self._normal(value.shape) / fan_in**0.5
        if name.endswith(("bias", "mean")):
            return self._normal(value.shape) / 4
        return torch.rand(value.shape, generator=self.generator, dtype=torch.float64) + 0.5


def _untied(model: nn.Module) -> dict[str, Tensor]:
    # One name for each tensor: a functional call gives tied parameters the same value by itself.
    state: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        state.setdefault(id(value), (name, value.detach()))
    return dict(state.values())


def _double(model: nn.Module) -> nn.Module:
    # The weights of the copy are never read, since every run brings its own: untouched memory costs nothing.
    own = {id(value) for value in model.state_dict(keep_vars=True).values() if value.is_floating_point()}
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_to_double(parameter, id(parameter) in own), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _to_double(buffer, id(buffer) in own)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _to_double(value)
    return copy.deepcopy(model, memo)


def _to_double(tensor: Tensor, weightless: bool = False) -> Tensor:
    if weightless:
        return torch.empty(tensor.shape, dtype=torch.float64)
    tensor = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


class _Lift(TorchFunctionMode):
    """Carries hard casts to lower precision out in float64: they would drown the comparison in rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args, kwargs = pytree.tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype.is_floating_point else dtype, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def _float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Lift():
            yield
    finally:
        torch.set_default_dtype(default)


# ---------------------------------------------------------------------- negative controls


def _choose(graph: PermutationGraph, count: int | None) -> list[Group]:
    # A group that lives in one tensor only has no "others" that could be left behind.
    groups = [group for group in graph.groups if len({axis.tensor for axis in group.axes}) > 1]
    if count is None or count >= len(groups):
        return groups
    return [groups[i * len(groups) // count] for i in range(count)]


def _control(graph: PermutationGraph, probe: _Probe, group: Group, threshold: float) -> Control:
    # Some tensors cannot show it (the bias of the keys cancels in a softmax), so the heaviest three are tried.
    shifted = graph.identity()
    index = shifted[group.name].roll(1, -1)
    permutation = Permutation(shifted.fingerprint, {**shifted.indices, group.name: index})
    tensors = sorted({axis.tensor for axis in group.axes}, key=lambda name: (-probe.state[name].numel(), name))
    best = ("", -1.0)
    for name in tensors[:3]:
        alone = graph.apply(permutation, {name: probe.state[name]})
        best = max(best, (name, probe.deviation(alone)), key=lambda pair: pair[1])
        if best[1] > threshold:
            break
    return Control(group.name, best[0], best[1], best[1] > threshold)
