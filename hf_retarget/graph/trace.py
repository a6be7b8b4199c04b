"""Traces a model with torch.export, on a weightless copy, so that the caller's model is not changed."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hf_retarget.errors import TraceError
from hf_retarget.graph.build import build
from hf_retarget.graph.permutation_graph import PermutationGraph

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""An input to trace with: one tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


def trace(model: nn.Module, example_input: Example | None = None) -> PermutationGraph:
    """Derive which axes of a model may be permuted together without changing its function.

    The model itself is not changed: mode, devices, caches and gradients are kept. Weights are not copied, and may be on
    the meta device. For a timm model, the example input is made from its configuration.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> trace(model, torch.zeros(1, 4)).groups[0].size
        8
    """
    return build(model, export(model, example_input))


def export(model: nn.Module, example_input: Example | None = None) -> ExportedProgram:
    """Export a weightless copy of the model in evaluation mode."""
    arguments, keywords = example_arguments(model, example_input)
    twin = _weightless(model).eval()
    try:
        with _quietly(), torch.enable_grad():
            try:
                return torch.export.export(twin, arguments, keywords, strict=False)
            except GuardOnDataDependentSymNode:
                with _Decisions(_decisions(model, arguments, keywords)):
                    return torch.export.export(_weightless(model).eval(), arguments, keywords, strict=False)
    except Exception as error:  # whatever the model's own code raises
        raise TraceError(_explain(twin, error, arguments, keywords)) from error


def example_arguments(model: nn.Module, example_input: Example | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments on the CPU, by default made from timm's configuration."""
    if example_input is None:
        example_input = _timm_example(model)
    on_cpu = pytree.tree_map_only(
        Tensor, lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t.detach().cpu(), example_input
    )
    if isinstance(on_cpu, Mapping):
        return (), dict(on_cpu)
    return (on_cpu if isinstance(on_cpu, tuple) else (on_cpu,)), {}


def _timm_example(model: nn.Module) -> Tensor:
    config = getattr(model, "pretrained_cfg", None)
    if not config or "input_size" not in config:
        raise TraceError(
            f"no example input for {type(model).__name__}: it has no timm configuration to make one from; "
            "pass example_input=, one tensor, a tuple or a mapping as the model's forward expects it"
        )
    channels, height, width = config["input_size"]
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = getattr(model, "in_chans", None) or first or channels
    patches = getattr(model, "patch_embed", None)
    height, width = getattr(patches, "img_size", None) or (height, width)
    # Two images, so that the batch does not count as an axis of one element.
    return torch.zeros(2, int(channels), int(height), int(width))


def _weightless(model: nn.Module) -> nn.Module:
    """A copy whose parameters and floating-point buffers take no physical memory.

    `torch.empty` only reserves memory. Unlike a tensor on the meta device it is a real CPU tensor, which can be
    combined with constants. Other buffers are copied, because their values may matter (indices, masks).
    """
    state = model.state_dict(keep_vars=True).values()
    weights = {id(value) for value in state if value.is_floating_point()} | set(map(id, model.parameters()))

    def empty_or_copy(tensor: Tensor) -> Tensor:
        if id(tensor) in weights or tensor.is_meta:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().cpu().clone()

    twin = copy_model(model, empty_or_copy)
    clear_caches(twin)
    return twin


def copy_model(model: nn.Module, copy_tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with every tensor replaced by the result of `copy_tensor`.

    This includes tensors that are plain attributes of modules: they may be non-leaves, which `deepcopy` refuses.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        # Without gradients, attention layers would take a fused path that hides their structure.
        memo[id(parameter)] = nn.Parameter(copy_tensor(parameter), requires_grad=parameter.is_floating_point())
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in (*model.buffers(), *attributes):
        if id(tensor) not in memo:
            memo[id(tensor)] = copy_tensor(tensor)
    return copy.deepcopy(model, memo)


def clear_caches(model: nn.Module) -> None:
    """Empty the caches in which modules keep values derived from their weights (such as attention_bias_cache)."""
    for module in model.modules():
        for name, value in vars(module).items():
            own = not name.startswith("_") and isinstance(value, dict)
            if own and value and all(isinstance(item, Tensor) for item in value.values()):
                value.clear()


class _Decisions(TorchFunctionMode):
    """Records, or dictates, the outcome of every `if tensor:` in a model.

    Export runs on tensors without values and cannot decide, even if the outcome depends only on shapes.
    """

    def __init__(self, dictated: Sequence[bool] | None = None) -> None:
        super().__init__()
        self.taken: list[bool] = []
        self._dictated = iter(dictated) if dictated is not None else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            decision = func(*args) if self._dictated is None else next(self._dictated)
            self.taken.append(decision)
            return decision
        return func(*args, **(kwargs or {}))


def _decisions(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[bool]:
    # A decision that depends only on shapes is the same for every input; otherwise, there is no single graph.
    if any(parameter.is_meta for parameter in model.parameters()):
        twin = _weightless(model)
        nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in twin.parameters())) / 10, twin.parameters())
    else:
        twin = copy.deepcopy(model).cpu()
    taken = []
    for scale in (None, 1.0, -1.0):

        def draw(example: Tensor, scale: float | None = scale) -> Tensor:
            return example if scale is None or not example.is_floating_point() else scale * torch.rand_like(example)

        positional, named = pytree.tree_map_only(Tensor, draw, (arguments, keywords))
        decisions = _Decisions()
        with torch.no_grad(), decisions:
            twin.eval()(*positional, **named)
        taken.append(decisions.taken)
    if any(other != taken[0] for other in taken):
        raise RuntimeError("its branches depend on the input (an `if` on a tensor), so there is no single graph")
    return taken[0]


@contextmanager
def _quietly() -> Iterator[None]:
    # A failed export logs the whole graph before it raises; our error is more concise.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _explain(model: nn.Module, error: Exception, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    given = ", ".join(_describe(value) for value in pytree.tree_leaves((arguments, keywords)))
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = _failing_module(model, error)
    return (
        f"{type(model).__name__} cannot be exported with the example input {given}: "
        f"{type(error).__name__} in {place}: {first}. Check the example's shape, or pass example_input="
    )


def _describe(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _failing_module(model: nn.Module, error: Exception) -> str:
    # The innermost module whose forward is on the stack of the error.
    names = {id(module): name for name, module in model.named_modules()}
    place, frame = "", error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if id(owner) in names:
            place = f"'{names[id(owner)]}' ({type(owner).__name__})" if names[id(owner)] else type(owner).__name__
        frame = frame.tb_next
    return place or type(model).__name__
