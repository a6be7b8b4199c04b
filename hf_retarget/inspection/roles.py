"""Which part a group plays: residual stream, inner group, heads, or the inside of each head."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hf_retarget.inspection.flow import flows
from hf_retarget.inspection.paths import home

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph


class Role(str, Enum):
    """The part that a group plays; the value is the word people read."""

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


def roles(graph: PermutationGraph) -> dict[str, Role]:
    """The role of every group, by name.

    Roles are for people to read, and nothing is computed from them. They are read off layouts and module paths, where a
    gate that reaches beyond its block looks like a residual stream: an addition and a product move axes alike.
    """
    in_convolutions = _groups_inside_convolutions(graph)
    segments = _segments(graph)
    writers = _writers(graph)
    inside: dict[str, list[str]] = {}
    for group in graph.groups:
        for outer in group.outer:
            if outer is not None:
                inside.setdefault(outer, []).append(group.name)

    def role(group: Group) -> Role:
        if group.blocks:
            return Role.PER_CONV_GROUP if group.name in in_convolutions else Role.PER_HEAD
        if group.name in inside:
            return Role.CONV_GROUPS if in_convolutions.intersection(inside[group.name]) else Role.HEADS
        if len(writers.get(group.name, ())) > 1 and not _confined(group):
            return Role.STREAM
        return Role.SEGMENT if group.name in segments else Role.INNER

    return {group.name: role(group) for group in graph.groups}


def _writers(graph: PermutationGraph) -> dict[str, list[str]]:
    writers: dict[str, list[str]] = {}
    for tensor, flow in flows(graph).items():
        for name in flow.writes:
            writers.setdefault(name, []).append(tensor)
    return writers


def _groups_inside_convolutions(graph: PermutationGraph) -> set[str]:
    # A grouped convolution stores [blocks × outputs, inputs, kernel …]: its input side is addressed by the
    # blocks of its output side. Attention has no such tensor.
    found: set[str] = set()
    for layout in graph.layouts.values():
        if len(layout.shape) < 3:
            continue
        for block in layout.blocks:
            inputs = [factor for factor in block.factors if factor.dim > 0 and factor.outer]
            if any(block.factors[place].dim == 0 for factor in inputs for place in factor.outer):
                found.update(factor.group for factor in block.factors if factor.outer and factor.group is not None)
    return found


def _segments(graph: PermutationGraph) -> set[str]:
    # Groups that lie behind one another along the input side of a weight: what a concatenation leaves.
    found: set[str] = set()
    for layout in graph.layouts.values():
        for dim in range(1, len(layout.shape)):
            own = {
                factor.group
                for block in layout.blocks
                for factor in block.factors
                if factor.dim == dim and factor.group is not None
            }
            together = any(
                sum(factor.dim == dim and factor.size > 1 for factor in block.factors) > 1 for block in layout.blocks
            )
            found |= own if len(own) > 1 and not together else set()
    return found


def _confined(group: Group) -> bool:
    # A gate (squeeze-and-excitation, GLU) also writes its group twice, but stays within one block of a stack,
    # say blocks.3; a residual stream runs through several.
    module = home(axis.tensor for axis in group.axes)
    in_a_block = any(part[-1:].isdigit() for part in module.split("."))
    below = [next(filter(str.isdigit, axis.tensor[len(module) :].split(".")), None) for axis in group.axes]
    return in_a_block and len(set(below) - {None}) < 2
