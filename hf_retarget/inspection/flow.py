"""What each tensor does to the groups: it reads some, writes others, or only rides along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_retarget.graph import Layout, PermutationGraph

# Every kernel and every position table has such axes; drawing them would say nothing about the model.
_UNREMARKABLE = frozenset({"spatial", "constant", "order", "unused"})


@dataclass(frozen=True)
class Flow:
    """The groups that a weight reads (its input side) and writes (its output side), and those that norms, biases
    and tables touch without leading from one group to another. The pinned sides hold (reason, size)."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    pinned_reads: tuple[tuple[str, int], ...] = ()
    pinned_writes: tuple[tuple[str, int], ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Every group in this flow, once."""
        return unique((*self.reads, *self.writes, *self.touches))

    @property
    def leads(self) -> bool:
        """Whether something leads from an input side to an output side."""
        return bool((self.reads or self.pinned_reads) and (self.writes or self.pinned_writes))


def unique(items: Iterable[str]) -> tuple[str, ...]:
    """The items without repetition, in order.

    Example:
        >>> unique(["b", "a", "b"])
        ('b', 'a')
    """
    return tuple(dict.fromkeys(items))


def flows(graph: PermutationGraph) -> dict[str, Flow]:
    """The flow of every tensor, by name.

    A weight's dimension 0 is its output side, as in ``nn.Linear`` and ``nn.Conv2d``.
    """
    reasons: dict[tuple[str, int], str] = {}
    for pinned in graph.pinned:
        reasons.setdefault((pinned.axis.tensor, pinned.axis.dim), pinned.reason)
    return {name: _flow(name, layout, reasons) for name, layout in graph.layouts.items()}


def join(parts: Iterable[Flow]) -> Flow:
    """One flow for several tensors of one module: a group that is read or written is not also touched."""
    parts = list(parts)
    reads = unique(name for part in parts for name in part.reads)
    writes = unique(name for part in parts for name in part.writes)
    touches = unique(name for part in parts for name in part.touches)
    return Flow(
        reads,
        writes,
        tuple(name for name in touches if name not in reads and name not in writes),
        tuple(dict.fromkeys(side for part in parts for side in part.pinned_reads)),
        tuple(dict.fromkeys(side for part in parts for side in part.pinned_writes)),
    )


def _flow(tensor: str, layout: Layout, reasons: dict[tuple[str, int], str]) -> Flow:
    by_dim: dict[int, list[str]] = {dim: [] for dim in range(len(layout.shape))}
    for block in layout.blocks:
        for factor in block.factors:
            if factor.group is not None:
                by_dim[factor.dim].append(factor.group)
    pinned = {
        dim: (reasons[tensor, dim], layout.shape[dim])
        for dim, names in by_dim.items()
        if not names and layout.shape[dim] > 1 and reasons.get((tensor, dim), "unused") not in _UNREMARKABLE
    }
    reads = unique(name for dim, names in by_dim.items() if dim > 0 for name in names)
    writes = unique(by_dim.get(0, ()))
    pinned_reads = tuple(side for dim, side in pinned.items() if dim > 0)
    pinned_writes = tuple(side for dim, side in pinned.items() if dim == 0)
    leads = Flow(reads, writes, (), pinned_reads, pinned_writes)
    return leads if leads.leads else Flow(touches=leads.groups)
