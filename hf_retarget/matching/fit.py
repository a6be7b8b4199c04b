"""Quality of a permutation: cosines between the permuted source and the target, in total and by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_retarget.graph.permutation import Permutation, gather
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.matching.objective import Stacks, Tensors


@dataclass(frozen=True)
class GroupFit:
    """One group: its size, the share of its neurons that were moved, and how well its tensors agree.

    `before` and `after` are cosines over all tensors with an axis of the group, for the identity and for the whole
    permutation; None if there is nothing to compare. Neighbouring groups share tensors, and so the credit.
    """

    name: str
    neurons: int
    moved: float
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class Fit:
    """The objective of a permutation: ⟨target, source⟩, ⟨target, π source⟩, and that of a perfect match."""

    identity: float
    matched: float
    perfect: float
    groups: tuple[GroupFit, ...]


class Cosines(NamedTuple):
    """The similarity of both sides at one step, on which the method relies."""

    before: float | None
    """With the identity."""
    unseen: float | None
    """With the previous step's permutation, found without these gradients."""
    after: float | None
    """With this step's permutation, found with them."""


def cosines(
    target: Tensors, source: Tensors, graph: PermutationGraph, permutations: Sequence[Permutation]
) -> list[float | None]:
    """The cosines of a set of tensors, as a vector, to another as it is and permuted; None if one of them is zero."""
    rest = (graph.apply_each(each, source.items()) for each in permutations)
    dots = [math.fsum(_dot(target[name], each) for name, each in some) for some in (source.items(), *rest)]
    norms = [math.sqrt(math.fsum(_dot(each, each) for each in side.values())) for side in (target, source)]
    return [_share(each, math.prod(norms)) for each in dots]


def measure_fit(stacks: Stacks, permutation: Permutation) -> Fit:
    """Measure how well a permutation fits stacks, in one pass over them."""
    weights = stacks.weights()
    total = [stacks.constant, stacks.constant, abs(stacks.constant)]
    groups: dict[str, list[float]] = {}
    for piece in stacks.pieces.values():
        weight, source = weights[piece.tensor], piece.source
        values = (
            weight * piece.value(source),
            weight * piece.value(gather(source, piece.factors, dict(permutation.indices))),
            weight * math.prod(piece.norms),
        )
        for sums in (total, *(groups.setdefault(name, [0.0] * 3) for name in piece.groups)):
            for place, value in enumerate(values):
                sums[place] += value
    fits = tuple(_group(name, index, groups.get(name)) for name, index in permutation.indices.items())
    return Fit(total[0], total[1], total[2], fits)


def _group(name: str, index: Tensor, sums: list[float] | None) -> GroupFit:
    before, after, perfect = sums or (0.0, 0.0, 0.0)
    moved = float((index != torch.arange(index.shape[-1])).float().mean()) if index.numel() else 0.0
    return GroupFit(name, index.numel(), moved, _share(before, perfect), _share(after, perfect))


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.detach().flatten().float(), other.detach().flatten().float()))


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole > 0 and math.isfinite(part / whole) else None
