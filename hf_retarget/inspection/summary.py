"""The figures that every view of a permutation graph shows, computed once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hf_retarget.inspection.folding import Run, repeated_blocks
from hf_retarget.inspection.roles import Role, roles

if TYPE_CHECKING:
    from hf_retarget.graph import Group, PermutationGraph

_FORMAT = "hf-retarget/inspect/1"


@dataclass(frozen=True)
class GroupSummary:
    """One group: its role, its size, and how much of the model it reaches."""

    name: str
    role: Role
    size: int
    blocks: tuple[int, ...]
    outer: tuple[str | None, ...]
    axes: tuple[str, ...]
    parameters: int

    @property
    def size_text(self) -> str:
        """The size as people write it: ``192``, or ``3 × 64`` for three heads of 64."""
        return " × ".join(map(str, (*self.blocks, self.size)))

    @property
    def outer_text(self) -> str:
        """The groups that permute the blocks themselves; 'pinned' where their order is fixed."""
        return ", ".join("pinned" if name is None else name for name in self.outer)


@dataclass(frozen=True)
class PinnedSummary:
    """All axes that are pinned for one reason, with one of them as an example."""

    reason: str
    axes: tuple[str, ...]
    where: str

    @property
    def count(self) -> int:
        """How many axes."""
        return len(self.axes)


@dataclass(frozen=True)
class Summary:
    """What a permutation graph says about a model."""

    model: str
    fingerprint: str
    tensors: int
    parameters: int
    share_one: float
    share_two: float
    groups: tuple[GroupSummary, ...]
    pinned: tuple[PinnedSummary, ...]
    unknown_operators: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    runs: tuple[Run, ...]

    @property
    def per_block(self) -> int:
        """How many groups have one permutation for each head or convolution group."""
        return sum(group.role.is_per_block for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for ``hf-retarget inspect --json``."""
        groups = [asdict(group) | {"role": group.role.value} for group in self.groups]
        return {
            "format": _FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "share_on_one_free_axis": self.share_one,
            "share_on_two_free_axes": self.share_two,
            "groups": groups,
            "pinned": [asdict(pinned) for pinned in self.pinned],
            "unknown_operators": list(self.unknown_operators),
            "tied": dict(self.tied),
        }


def summarise(graph: PermutationGraph, model: str) -> Summary:
    """The figures of one graph; `model` is the name under which they are shown."""
    role_of = roles(graph)
    touched = _parameters_touched(graph)
    return Summary(
        model=model,
        fingerprint=graph.fingerprint,
        tensors=len(graph.layouts),
        parameters=sum(math.prod(graph.layouts[name].shape) for name in graph.parameters),
        share_one=graph.share(1),
        share_two=graph.share(2),
        groups=tuple(_group(group, role_of[group.name], touched.get(group.name, 0)) for group in graph.groups),
        pinned=_pinned(graph),
        unknown_operators=tuple(dict.fromkeys(str(unknown) for unknown in graph.unknown_operators)),
        tied=tuple(graph.tied.items()),
        runs=repeated_blocks(graph),
    )


def _group(group: Group, role: Role, parameters: int) -> GroupSummary:
    axes = tuple(str(axis) for axis in group.axes)
    return GroupSummary(group.name, role, group.size, group.blocks, group.outer, axes, parameters)


def _parameters_touched(graph: PermutationGraph) -> dict[str, int]:
    touched: dict[str, int] = {}
    for name in graph.parameters:
        for block in graph.layouts[name].blocks:
            elements = math.prod(factor.size for factor in block.factors)
            for group in {factor.group for factor in block.factors if factor.group is not None}:
                touched[group] = touched.get(group, 0) + elements
    return touched


def _pinned(graph: PermutationGraph) -> tuple[PinnedSummary, ...]:
    axes: dict[str, list[str]] = {}
    where: dict[str, str] = {}
    for pinned in graph.pinned:
        axes.setdefault(pinned.reason, []).append(str(pinned.axis))
        where.setdefault(pinned.reason, pinned.where)
    ordered = sorted(axes, key=lambda reason: -len(set(axes[reason])))
    return tuple(PinnedSummary(reason, tuple(dict.fromkeys(axes[reason])), where[reason]) for reason in ordered)
