"""Verifies a permutation graph by running the model: f(x; πθ) = f(x; θ), in float64, on random weights.

A verified graph is cached, so that each architecture is traced and verified only once.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path, constants
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hf_retarget.errors import PermutationError, TensorMismatchError, TraceError
from hf_retarget.files import hash_file, load_record, save_record
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import Group, PermutationGraph
from hf_retarget.graph.trace import Example, clear_caches, copy_model, example_arguments

_ULP = 2.0**-52
_MOST_NOISE = 1e-6
"""The highest noise floor taken into account."""
_EFFECT = 1e3
"""A control must change the output this many times as much as the permutation itself."""


@dataclass(frozen=True)
class NegativeControl:
    """One tensor of a group permuted without the others, which must change the output."""

    group: str
    tensor: str
    error: float
    effective: bool
    silent: bool = False
    """Whether the tensor has no influence: even other random values do not change the output, so it proves nothing."""


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of running a model with permuted weights.

    `error` is the largest deviation of any output tensor over all drawn permutations, relative to the largest element
    of that tensor; `noise_floor` is the deviation caused by changing the last bit of the weights.
    """

    error: float
    noise_floor: float
    tolerance: float
    draws: int
    controls: tuple[NegativeControl, ...]
    seconds: float

    def __repr__(self) -> str:
        return f"Verification({self.verdict!r})"

    @property
    def invariant(self) -> bool:
        """Whether the outputs stayed the same, up to rounding."""
        return self.error <= max(self.tolerance, min(10 * self.noise_floor, _MOST_NOISE))

    @property
    def passed(self) -> bool:
        """Whether the outputs stayed the same, and would have changed if the graph were wrong."""
        return self.invariant and not self.doubtful and (not self.controls or any(c.effective for c in self.controls))

    @property
    def doubtful(self) -> tuple[NegativeControl, ...]:
        """Controls that should have changed the output but did not."""
        return tuple(control for control in self.controls if not control.effective and not control.silent)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        figures = f"relative error {self.error:.1e}, noise floor {self.noise_floor:.1e}"
        if not self.invariant:
            return f"FAILED: the graph does not preserve the function ({figures}, tolerance {self.tolerance:.0e})."
        effective = sum(control.effective for control in self.controls)
        if not self.passed:
            named = f", first '{self.doubtful[0].tensor}' of group '{self.doubtful[0].group}'" if self.doubtful else ""
            return (
                f"FAILED: {len(self.controls) - effective} of {len(self.controls)} negative controls "
                f"did not change the output{named}, so the verification is inconclusive."
            )
        return (
            f"passed: {self.draws} random permutation{'s' * (self.draws > 1)} kept the function ({figures}); "
            f"{effective} of {len(self.controls)} negative controls changed it."
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self) | {"passed": self.passed, "verdict": self.verdict}


def verify(
    model: nn.Module,
    graph: PermutationGraph,
    example_input: Example | None = None,
    *,
    draws: int = 2,
    controls: int | None = 8,
    tolerance: float = 1e-8,
    seed: int = 0,
) -> Verification:
    """Run the model on random weights with and without permutation, and compare the outputs.

    The model is not changed: a float64 copy gets random parameters and buffers, so that zero-initialised gammas, unit
    variances or empty position tables cannot hide an error. For `controls` groups (None: all) one tensor is permuted
    without the rest of its group, which must change the output.

    Example:
        >>> from torch import nn
        >>> from hf_retarget.graph.trace import trace
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.zeros(1, 4)
        >>> verify(model, trace(model, x), x).passed
        True
    """
    began = time.perf_counter()
    probe = _Probe(model, example_input, seed)
    error = max(
        (probe.deviation(graph.apply(_moving(graph, seed + draw), probe.state)) for draw in range(draws)), default=0.0
    )
    noise = probe.noise()
    threshold = _EFFECT * max(error, noise, _ULP)
    found = tuple(_control(graph, probe, group, threshold) for group in _choose(graph, controls))
    return Verification(error, noise, tolerance, draws, found, time.perf_counter() - began)


def load_graph(path: str | Path, model: nn.Module, example_input: Example | None = None) -> PermutationGraph:
    """Read a graph from a file, which may be anybody's; raise PermutationError unless it keeps the model's function."""
    graph = PermutationGraph.load(path)
    problem = "it is the graph of another model"
    if graph.shapes.keys() == model.state_dict().keys():
        try:
            checked = verify(model, graph, example_input, controls=0)  # tensors that are pinned harm nobody
            problem = "" if checked.passed else checked.verdict
        except TensorMismatchError as error:
            problem = str(error)
    if problem:
        raise PermutationError(f"'{path}' cannot be used with this {type(model).__name__}: {problem}")
    return graph


# ---------------------------------------------------------------------- running the model


class _Probe:
    """A float64 copy of a model with random weights, a random input, and its output."""

    def __init__(self, model: nn.Module, example_input: Example | None, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.twin = _double(model).eval()
        self.parameters = {name for name, _ in self.twin.named_parameters()}
        own: dict[int, tuple[str, Tensor]] = {}  # one name per tensor: functional_call handles tied parameters
        for name, value in self.twin.state_dict(keep_vars=True).items():
            own.setdefault(id(value), (name, value.detach()))
        self.state = {name: self.randomise(name, value) for name, value in own.values()}
        arguments = example_arguments(model, example_input)
        self.arguments: Any = pytree.tree_map_only(
            Tensor, lambda each: self._normal(each.shape) if each.is_floating_point() else each, arguments
        )
        self.output = self._run(self.state)
        self.scales = [float(value.abs().max()) if value.numel() else 0.0 for value in self.output]
        finite = all(bool(torch.isfinite(value).all()) for value in self.output)
        if not any(self.scales) or not finite:
            what = "only zeros" if finite else "NaN or infinite values"
            raise TraceError(
                f"{type(model).__name__} outputs {what} on random weights, "
                "so nothing can be verified; try another seed or example_input="
            )

    def _run(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        clear_caches(self.twin)
        positional, keywords = pytree.tree_map_only(Tensor, Tensor.clone, self.arguments)  # some models write to them
        fresh = {name: value if name in self.parameters else value.clone() for name, value in state.items()}
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad(), _Lift():
                output = functional_call(self.twin, fresh, positional, keywords)
        except Exception as error:  # whatever the model's own code raises
            reason = f"{type(error).__name__}: {error}".strip(": ")
            raise TraceError(
                f"{type(self.twin).__name__} cannot be run in float64 on this example input: {reason}"
            ) from error
        finally:
            torch.set_default_dtype(default)
        found = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
        return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each.double() for each in found]

    def deviation(self, state: Mapping[str, Tensor]) -> float:
        """The largest change of any output tensor, relative to its largest element."""
        changed = self._run(self.state | dict(state))
        errors = [
            float((new - old).abs().max()) / (scale or 1.0)
            for new, old, scale in zip(changed, self.output, self.scales, strict=True)
            if old.numel()
        ]
        return max((error if error == error else float("inf") for error in errors), default=0.0)

    def noise(self) -> float:
        """The deviation caused by changing the last bit of every weight."""
        return self.deviation(
            {
                name: value * (1 + _ULP * self._normal(value.shape)) if value.is_floating_point() else value
                for name, value in self.state.items()
            }
        )

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).double()  # four times faster so

    def randomise(self, name: str, value: Tensor) -> Tensor:
        """New random values for one tensor."""
        if value.is_complex():
            return torch.complex(self.randomise(name, value.real), self.randomise(name, value.imag))
        if not value.is_floating_point() or (not value.dim() and name not in self.parameters):
            return value  # a scalar buffer has no axis, and may have to satisfy conditions such as min < max
        if value.dim() > 1:
            # Scaled by fan-in, so that signals neither vanish nor explode through the layers.
            fan_in = value[0].numel() if value.shape[0] > 1 else 4
            return self._normal(value.shape) / math.sqrt(fan_in)
        if name.endswith(("bias", "mean")):
            return self._normal(value.shape) / 4
        return torch.rand(value.shape, generator=self.generator, dtype=torch.float64) + 0.5


def _double(model: nn.Module) -> nn.Module:
    # The weights of the copy are never read, since every run brings its own: untouched memory costs nothing. Scalar
    # buffers keep their value.
    own = {id(value) for value in model.state_dict(keep_vars=True).values() if value.dim() or value.requires_grad}

    def to_double(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
        precise = torch.complex128 if tensor.is_complex() else torch.float64
        if id(tensor) in own:
            return torch.empty(tensor.shape, dtype=precise)
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=precise)
        return tensor.detach().to("cpu", precise, copy=True)

    return copy_model(model, to_double)


class _Lift(TorchFunctionMode):
    """Replaces explicit casts to lower precision by float64, as rounding would spoil the comparison."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args, kwargs = pytree.tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype.is_floating_point else dtype, (args, kwargs or {})
        )
        return func(*args, **kwargs)


# ---------------------------------------------------------------------- negative controls


def _moving(graph: PermutationGraph, seed: int) -> Permutation:
    # In a small group, a random permutation is often the identity, which proves nothing.
    drawn = graph.random(seed)
    indices = {}
    for name, index in drawn.indices.items():
        still = (index == torch.arange(index.shape[-1])).all(-1, keepdim=True)
        indices[name] = torch.where(still, index.roll(1, -1), index)
    return Permutation(drawn.fingerprint, indices)


def _choose(graph: PermutationGraph, count: int | None) -> list[Group]:
    # A group that occurs in a single tensor has no other tensors to leave unpermuted.
    groups = [group for group in graph.groups if len({axis.tensor for axis in group.axes}) > 1]
    if count is None or count >= len(groups):
        return groups
    return [groups[i * len(groups) // count] for i in range(count)]


def _control(graph: PermutationGraph, probe: _Probe, group: Group, threshold: float) -> NegativeControl:
    # Some tensors have no effect (the bias of the keys cancels in a softmax), so the largest three are tried.
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
    effective = best[1] > threshold
    silent = not effective and all(
        probe.deviation({name: probe.randomise(name, probe.state[name])}) <= threshold for name in tensors[:3]
    )
    return NegativeControl(group.name, *best, effective, silent)


# ---- the cache of verified graphs


def recall_graph(key: Mapping[str, Any]) -> tuple[PermutationGraph, Verification] | None:
    """The graph cached under a key, or None if it is absent or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, PermutationError):
        plain, graph, about = _place(key)
        facts = load_record(about)
        if facts["graph"] == hash_file(graph) and facts["key"] == plain:
            found = facts["verification"]
            controls = tuple(NegativeControl(**each) for each in found.pop("controls"))
            return PermutationGraph.load(graph), Verification(**found, controls=controls)
    return None


def keep_graph(key: Mapping[str, Any], graph: PermutationGraph, verification: Verification) -> None:
    """Cache a verified graph, unless the cache cannot be written."""
    with suppress(OSError, ValueError):  # the Hub client raises ValueError for folders that are files
        plain, path, about = _place(key)
        graph.save(path)
        facts = {name: value for name, value in verification.to_json().items() if name not in ("passed", "verdict")}
        save_record(about, {"key": plain, "graph": hash_file(path), "verification": facts})


def _place(key: Mapping[str, Any]) -> tuple[dict[str, Any], Path, Path]:
    """The complete key, and the paths of the graph and its verification."""
    plain = {**json.loads(json.dumps(key)), "rules": _hash_rules()}
    name = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
    folder = cached_assets_path("hf-retarget", namespace="graphs", subfolder=name, assets_dir=constants.HF_ASSETS_CACHE)
    return plain, folder / "graph.json", folder / "verification.json"


@cache
def _hash_rules() -> str:
    """A hash of the code that derives and verifies graphs, so that changes to it invalidate the cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
