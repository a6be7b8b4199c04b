"""The permutation graph of a port: derived, verified, and with groups held still where the target keeps a table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_retarget.errors import PortError
from hf_retarget.graph import Block, Factor, Layout, PermutationGraph, PinnedAxis
from hf_retarget.graph.trace import trace
from hf_retarget.graph.verify import Verification
from hf_retarget.graph.verify import verify as verify_graph


@dataclass(frozen=True)
class Derived:
    """A graph, what verified it, and the groups it had to give up."""

    graph: PermutationGraph
    check: Verification | None
    held: tuple[str, ...]


def derive_graph(model: nn.Module, input_size: tuple[int, int, int], *, verify: bool = True) -> Derived:
    """Trace a model for images of this size, and verify the graph; one that does not hold is an error."""
    example = torch.zeros(2, *input_size)  # two, so that the batch is not mistaken for an axis of one element
    graph = trace(model, example)
    result = verify_graph(model, graph, example) if verify else None
    if result is not None and not result.passed:
        raise PortError(
            f"the permutation graph of {type(model).__name__} cannot be trusted: {result.verdict} "
            "Please report the model; --no-check goes on at your own risk"
        )
    held = find_tables(graph, model)
    return Derived(without(graph, held) if held else graph, result, held)


def find_tables(graph: PermutationGraph, model: nn.Module) -> tuple[str, ...]:
    """The groups that act on a fixed table, such as the periods of rotary positions.

    The ported net has the target's tables, so the delta must stay in their order. BatchNorm's statistics are no such
    tables, since they are estimated anew; nor is a buffer whose numbers are all the same.
    """
    statistics = {
        f"{where}.{name}" if where else name
        for where, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_buffers(recurse=False)
    }
    found: set[str] = set()
    for name, buffer in model.named_buffers():
        fixed = buffer.is_floating_point() and name not in statistics and name in graph.layouts
        if fixed and bool((buffer != buffer.flatten()[:1]).any()):
            found |= {factor.group for block in graph.layouts[name].blocks for factor in block.factors if factor.group}
    return tuple(group.name for group in graph.groups if group.name in found)


def without(graph: PermutationGraph, names: Collection[str]) -> PermutationGraph:
    """The same graph with some groups pinned; blocks that one of them permuted stay in order and keep their insides."""
    pinned = [
        PinnedAxis(axis, "constant", "a table that the target keeps")
        for group in graph.groups
        if group.name in names
        for axis in group.axes
    ]
    groups = tuple(
        replace(group, outer=tuple(None if each in names else each for each in group.outer))
        for group in graph.groups
        if group.name not in names
    )
    layouts = {
        name: Layout(layout.shape, tuple(_still(block, names) for block in layout.blocks))
        for name, layout in graph.layouts.items()
    }
    return replace(graph, groups=groups, layouts=layouts, pinned=(*graph.pinned, *pinned))


def _still(block: Block, names: Collection[str]) -> Block:
    def still(factor: Factor) -> Factor:
        return factor._replace(group=None, outer=()) if factor.group in names else factor

    return block._replace(factors=tuple(map(still, block.factors)))
