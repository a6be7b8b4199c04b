"""Which part a group plays (residual stream, inner group, heads …), read off the weights that read and write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from hf_retarget.inspection.blocks import home

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph

T = TypeVar("T")

# Every kernel and every position table has such axes; they are not worth showing.
_UNREMARKABLE = frozenset({"spatial", "constant", "order", "unused"})


class Role(str, Enum):
    """The part that a group plays; the value is what people read."""

    STREAM = "residual stream"
    INNER = "inner"
    SEGMENT = "concatenated"
    HEADS = "heads"
    PER_HEAD = "per head"
    CONV_GROUPS = "convolution groups"
    PER_CONV_GROUP = "per convolution group"

    @property
    def is_outer(self) -> bool:
        """Whether groups with this role carry others inside."""
        return self in (Role.HEADS, Role.CONV_GROUPS)

    @property
    def is_per_block(self) -> bool:
        """Whether groups with this role have one permutation for each head or convolution group."""
        return self in (Role.PER_HEAD, Role.PER_CONV_GROUP)

    @property
    def family(self) -> str:
        """The roles that share colours: ``stream``, ``inner``, ``segment`` or ``head``."""
        return self.name.lower() if self in (Role.STREAM, Role.INNER, Role.SEGMENT) else "head"


@dataclass(frozen=True)
class Flow:
    """What a tensor, or a module with several, does to the groups.

    A weight reads the groups of its input side and writes those of its output side; norms, biases and tables touch
    groups without leading from one to another. The pinned sides hold (reason, size).
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    pinned_reads: tuple[tuple[str, int], ...] = ()
    pinned_writes: tuple[tuple[str, int], ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Every group in this flow, once."""
        return _unique((*self.reads, *self.writes, *self.touches))

    @property
    def leads(self) -> bool:
        """Whether something leads from an input side to an output side."""
        return bool((self.reads or self.pinned_reads) and (self.writes or self.pinned_writes))


def flows(graph: PermutationGraph) -> dict[str, Flow]:
    """The flow of every tensor. Dimension 0 of a weight is its output side, as in ``nn.Linear`` and ``nn.Conv2d``."""
    reasons = {(pinned.axis.tensor, pinned.axis.dim): pinned.reason for pinned in reversed(graph.pinned)}
    found = {}
    for tensor, layout in graph.layouts.items():
        groups: tuple[list[str], list[str]] = ([], [])  # output side, input side
        pinned: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for dim, size in enumerate(layout.shape):
            factors = (factor for block in layout.blocks for factor in block.factors)
            names = [factor.group for factor in factors if factor.dim == dim and factor.group is not None]
            groups[dim > 0].extend(names)
            reason = reasons.get((tensor, dim), "unused")
            if not names and size > 1 and reason not in _UNREMARKABLE:
                pinned[dim > 0].append((reason, size))
        flow = Flow(_unique(groups[1]), _unique(groups[0]), (), _unique(pinned[1]), _unique(pinned[0]))
        found[tensor] = flow if flow.leads else Flow(touches=flow.groups)
    return found


def join(parts: Iterable[Flow]) -> Flow:
    """The flow of a module with several tensors: a group that is read or written is not also touched."""
    parts = list(parts)
    reads = _unique(name for part in parts for name in part.reads)
    writes = _unique(name for part in parts for name in part.writes)
    return Flow(
        reads,
        writes,
        _unique(name for part in parts for name in part.touches if name not in reads and name not in writes),
        _unique(side for part in parts for side in part.pinned_reads),
        _unique(side for part in parts for side in part.pinned_writes),
    )


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def roles(graph: PermutationGraph) -> dict[str, Role]:
    """The role of every group, by name.

    Roles are for people to read; nothing is computed from them. They are read off layouts and module paths, where a
    gate that reaches beyond its block looks like a residual stream: an addition and a product move axes alike.
    """
    in_convolutions = _groups_inside_convolutions(graph)
    segments = _segments(graph)
    writers = Counter(name for flow in flows(graph).values() for name in flow.writes)
    outer_in_convolutions = {name for group in graph.groups if group.name in in_convolutions for name in group.outer}
    outer = {name for group in graph.groups for name in group.outer}

    def role(group: Group) -> Role:
        if group.blocks:
            return Role.PER_CONV_GROUP if group.name in in_convolutions else Role.PER_HEAD
        if group.name in outer:
            return Role.CONV_GROUPS if group.name in outer_in_convolutions else Role.HEADS
        if writers[group.name] > 1 and not _confined(group):
            return Role.STREAM
        return Role.SEGMENT if group.name in segments else Role.INNER

    return {group.name: role(group) for group in graph.groups}


def _groups_inside_convolutions(graph: PermutationGraph) -> set[str]:
    # A grouped convolution stores [blocks × outputs, inputs, kernel …]: its input side is addressed by the
    # blocks of its output side. Attention has no such tensor.
    found: set[str] = set()
    for layout in graph.layouts.values():
        if len(layout.shape) < 3:
            continue
        for block in layout.blocks:
            inner = [factor for factor in block.factors if factor.outer]
            if any(block.factors[place].dim == 0 for factor in inner if factor.dim > 0 for place in factor.outer):
                found.update(factor.group for factor in inner if factor.group is not None)
    return found


def _segments(graph: PermutationGraph) -> set[str]:
    # Groups that lie behind one another along the input side of a weight: what a concatenation leaves.
    found: set[str] = set()
    for layout in graph.layouts.values():
        for dim in range(1, len(layout.shape)):
            along = [[factor for factor in block.factors if factor.dim == dim] for block in layout.blocks]
            own = {factor.group for factors in along for factor in factors if factor.group is not None}
            if len(own) > 1 and all(sum(factor.size > 1 for factor in factors) <= 1 for factors in along):
                found |= own
    return found


def _confined(group: Group) -> bool:
    # A gate (squeeze-and-excitation, GLU) also writes its group twice, but stays within one block of a stack, such as
    # blocks.3; a residual stream runs through several.
    module = home(axis.tensor for axis in group.axes)
    in_a_block = any(part[-1:].isdigit() for part in module.split("."))
    below = {next(filter(str.isdigit, axis.tensor[len(module) :].split(".")), None) for axis in group.axes}
    return in_a_block and len(below - {None}) < 2
