"""What a graph tells about modules: the groups they read and write, the role of each group, and repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph

T = TypeVar("T")

# Reasons of axes that every kernel or position table has, which are not worth showing.
_UNREMARKABLE = frozenset({"spatial", "constant", "order", "unused"})


class Role(str, Enum):
    """The role of a group; the value is its label."""

    STREAM = "residual stream"
    INNER = "inner"
    SEGMENT = "concatenated"
    HEADS = "heads"
    PER_HEAD = "per head"
    CONV_GROUPS = "convolution groups"
    PER_CONV_GROUP = "per convolution group"

    @property
    def is_outer(self) -> bool:
        """Whether groups with this role contain others."""
        return self in (Role.HEADS, Role.CONV_GROUPS)

    @property
    def is_per_block(self) -> bool:
        """Whether groups with this role have one permutation per head or convolution group."""
        return self in (Role.PER_HEAD, Role.PER_CONV_GROUP)

    @property
    def family(self) -> str:
        """The family of roles that share colours: ``stream``, ``inner``, ``segment`` or ``head``."""
        return self.name.lower() if self in (Role.STREAM, Role.INNER, Role.SEGMENT) else "head"


# ---- what tensors read and write


class PinnedSide(NamedTuple):
    """A side of a tensor with fixed order: the reason, and its length."""

    reason: str
    size: int

    def __str__(self) -> str:
        return f"pinned {self.reason} of {self.size}"


@dataclass(frozen=True)
class Flow:
    """How a tensor, or a module with several, acts on groups.

    A weight reads the groups of its input side and writes those of its output side, either of which may be pinned;
    norms, biases and tables touch groups without connecting them.
    """

    reads: tuple[str | PinnedSide, ...] = ()
    writes: tuple[str | PinnedSide, ...] = ()
    touches: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups in this flow, without duplicates."""
        return _unique(each for each in (*self.reads, *self.writes, *self.touches) if isinstance(each, str))

    @property
    def pins(self) -> list[PinnedSide]:
        """The pinned sides."""
        return [each for each in (*self.reads, *self.writes) if isinstance(each, PinnedSide)]

    @property
    def leads(self) -> bool:
        """Whether it connects an input side with an output side."""
        return bool(self.reads and self.writes)


def flows(graph: PermutationGraph) -> dict[str, Flow]:
    """The flow of every tensor. Dimension 0 of a weight is its output side, as in ``nn.Linear`` and ``nn.Conv2d``."""
    reasons = {(pinned.axis.tensor, pinned.axis.dim): pinned.reason for pinned in reversed(graph.pinned)}
    found = {}
    for tensor, layout in graph.layouts.items():
        writes: list[str | PinnedSide] = []
        reads: list[str | PinnedSide] = []
        for dim, size in enumerate(layout.shape):
            factors = (factor for block in layout.blocks for factor in block.factors)
            names = [factor.group for factor in factors if factor.dim == dim and factor.group is not None]
            reason = reasons.get((tensor, dim), "unused")
            pinned = not names and size > 1 and reason not in _UNREMARKABLE
            (reads if dim else writes).extend([PinnedSide(reason, size)] if pinned else names)
        flow = Flow(_unique(reads), _unique(writes))
        found[tensor] = flow if flow.leads else Flow(touches=flow.groups)
    return found


def join(parts: Sequence[Flow]) -> Flow:
    """Join the flows of a module's tensors; groups that are read or written do not count as touched."""
    reads = _unique(each for part in parts for each in part.reads)
    writes = _unique(each for part in parts for each in part.writes)
    touches = (name for part in parts for name in part.touches if name not in reads and name not in writes)
    return Flow(reads, writes, _unique(touches))


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


# ---- the role of each group


def roles(graph: PermutationGraph) -> dict[str, Role]:
    """The role of every group, by name.

    Roles are only for display. They are inferred from layouts and module paths, where a gate that reaches beyond its
    block looks like a residual stream: additions and products act on axes in the same way.
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
        for block in layout.blocks if len(layout.shape) >= 3 else ():
            inner = [factor for factor in block.factors if factor.outer]
            if any(block.factors[place].dim == 0 for factor in inner if factor.dim > 0 for place in factor.outer):
                found.update(factor.group for factor in inner if factor.group is not None)
    return found


def _segments(graph: PermutationGraph) -> set[str]:
    # Groups that follow one another along the input side of a weight, as after a concatenation.
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


def home(tensors: Iterable[str]) -> str:
    """The innermost module that contains all these tensors, with a trailing dot; empty for the model itself.

    Example:
        >>> home(["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"])
        'blocks.0.mlp.'
    """
    modules = [tensor.split(".")[:-1] for tensor in tensors]
    pairs = zip(min(modules), max(modules), strict=False)  # a prefix of the first and the last is common to all
    return "".join(f"{part}." for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- repeated blocks


@dataclass(frozen=True)
class Repeat:
    """Consecutive similar blocks, such as ``blocks.0`` to ``blocks.11``, and the groups of each."""

    blocks: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def hidden(self) -> frozenset[str]:
        """The groups of all blocks but the first, which represents them."""
        return frozenset(name for names in self.groups[1:] for name in names)

    def __str__(self) -> str:
        return f"{self.blocks[0]} … {self.blocks[-1]}"


def repeated_blocks(graph: PermutationGraph, shortest: int = 3) -> tuple[Repeat, ...]:
    """Find all runs of at least `shortest` similar blocks, in order and not nested."""
    homes = {group.name: home(axis.tensor for axis in group.axes) for group in graph.groups}

    def search(parent: str, tensors: Sequence[str]) -> list[Repeat]:
        children: dict[str, list[str]] = {}
        for name in tensors:
            child, dot, _ = name[len(parent) :].partition(".")
            if dot:
                children.setdefault(parent + child, []).append(name)
        found: list[Repeat] = []
        patterns = [(block, *_pattern(graph, homes, block, names)) for block, names in children.items()]
        for _, alike in groupby(patterns, key=lambda each: (each[0].rstrip("0123456789"), each[1])):
            blocks, _, groups = zip(*alike, strict=True)
            if blocks[0][-1].isdigit() and len(blocks) >= shortest and groups[0]:
                found.append(Repeat(blocks, groups))
            else:
                found += [each for block in blocks for each in search(f"{block}.", children[block])]
        return found

    return tuple(search("", list(graph.layouts)))


def _pattern(
    graph: PermutationGraph, homes: dict[str, str], block: str, tensors: Sequence[str]
) -> tuple[Any, tuple[str, ...]]:
    # Two blocks are similar if they have the same tensors with the same layouts, the same outside groups, and their own
    # groups in the same places. Returns the pattern and the block's own groups.
    names = tuple(name for name, module in homes.items() if module.startswith(f"{block}."))
    own: dict[str | None, int] = {name: number for number, name in enumerate(names)}

    def describe(tensor: str) -> tuple[Any, ...]:
        parts = [
            (part.offset, [(*factor[:3], own.get(factor.group, factor.group), factor.outer) for factor in part.factors])
            for part in graph.layouts[tensor].blocks
        ]
        return (tensor.removeprefix(block), graph.layouts[tensor].shape, parts)

    return [describe(tensor) for tensor in tensors], names
