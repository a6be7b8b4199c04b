"""The figures that every view of a permutation graph shows, computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hf_retarget.inspection.blocks import Repeat, repeated_blocks
from hf_retarget.inspection.roles import Role, roles

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph

_FORMAT = "hf-retarget/inspect/1"


@dataclass(frozen=True)
class GroupSummary:
    """One group: its role, its size, its axes, and the number of parameters it permutes."""

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
    """All axes that are pinned for one reason, and where the first of them is."""

    reason: str
    axes: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Summary:
    """The figures of one permutation graph."""

    model: str
    fingerprint: str
    tensors: int
    parameters: int
    share_on_one_free_axis: float
    share_on_two_free_axes: float
    groups: tuple[GroupSummary, ...]
    pinned: tuple[PinnedSummary, ...]
    unknown_operators: tuple[str, ...]
    tied: Mapping[str, str]
    repeats: tuple[Repeat, ...]

    @property
    def per_block(self) -> int:
        """How many groups have one permutation for each head or convolution group."""
        return sum(group.role.is_per_block for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for ``hf-retarget inspect --json``."""
        document = {"format": _FORMAT} | asdict(self)
        del document["repeats"]
        return document


def summarise(graph: PermutationGraph, model: str) -> Summary:
    """The figures of one graph; `model` is the name under which they are shown."""
    role_of = roles(graph)
    permutes: Counter[str] = Counter()
    for name in graph.parameters:
        for block in graph.layouts[name].blocks:
            elements = math.prod(factor.size for factor in block.factors)
            permutes.update(
                dict.fromkeys((factor.group for factor in block.factors if factor.group is not None), elements)
            )
    groups = (
        GroupSummary(
            group.name,
            role_of[group.name],
            group.size,
            group.blocks,
            group.outer,
            tuple(map(str, group.axes)),
            permutes[group.name],
        )
        for group in graph.groups
    )
    return Summary(
        model=model,
        fingerprint=graph.fingerprint,
        tensors=len(graph.layouts),
        parameters=sum(math.prod(graph.layouts[name].shape) for name in graph.parameters),
        share_on_one_free_axis=graph.share(1),
        share_on_two_free_axes=graph.share(2),
        groups=tuple(groups),
        pinned=_summarise_pinned(graph),
        unknown_operators=tuple(dict.fromkeys(map(str, graph.unknown_operators))),
        tied=dict(graph.tied),
        repeats=repeated_blocks(graph),
    )


def _summarise_pinned(graph: PermutationGraph) -> tuple[PinnedSummary, ...]:
    axes: dict[str, dict[str, None]] = {}
    where: dict[str, str] = {}
    for pinned in graph.pinned:
        axes.setdefault(pinned.reason, {})[str(pinned.axis)] = None
        where.setdefault(pinned.reason, pinned.where)
    ordered = sorted(axes, key=lambda reason: -len(axes[reason]))
    return tuple(PinnedSummary(reason, tuple(axes[reason]), where[reason]) for reason in ordered)
