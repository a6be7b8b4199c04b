"""How two bases are related: of one lineage, drifted apart, or independent. Their weights tell, without gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hf_retarget.document import RelationFacts

LINEAGE, DRIFTED, INDEPENDENT = "same lineage", "drifted", "independent"

RELATED = 0.5
"""Cosine of the bases' weights from which they are of one lineage. In our trials it was 0.97 or more between a base and
what was trained on from it, and below 0.2 (mostly 0.02) between bases that were trained apart."""

NEAR = 0.7
"""Distance of the bases, in lengths of the fine-tuning, up to which a plain addition keeps 97 % of it: on all 10 of our
pairs, with the head refitted. Beyond, the more the bases have drifted apart, the less is kept (docs/method.md)."""


@dataclass
class _Sums:
    """Of two bases A and C and a fine-tuning B of A."""

    old: float = 0.0
    new: float = 0.0
    product: float = 0.0
    tuning: float = 0.0

    def add(self, old: Tensor, tuned: Tensor, new: Tensor) -> None:
        a, b, c = (each.double().flatten() for each in (old, tuned, new))
        self.old += float(a @ a)
        self.new += float(c @ c)
        self.product += float(a @ c)
        self.tuning += float((b - a).square().sum())

    @property
    def cosine(self) -> float:
        return self.product / max(math.sqrt(self.old * self.new), 1e-30)

    @property
    def drift(self) -> float | None:
        distance = max(self.old + self.new - 2 * self.product, 0.0)
        return math.sqrt(distance / self.tuning) if self.tuning else None


def measure_relation(
    old: Mapping[str, Tensor], tuned: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Iterable[str]
) -> RelationFacts:
    """The relation of two bases, given the old base, the tuned model, the new base, and the tensors to look at.

    Example:
        >>> import torch
        >>> old, tuned, new = ({"w": torch.tensor([1.0, 0.0, each])} for each in (0.0, 0.5, 0.1))
        >>> measure_relation(old, tuned, new, ["w"]).word
        'same lineage'
    """
    whole, tensors = _Sums(), {}
    for name in names:
        one = _Sums()
        one.add(old[name], tuned[name], new[name])
        tensors[name] = (one.cosine, one.drift)
        for field in vars(whole):
            setattr(whole, field, getattr(whole, field) + getattr(one, field))
    return RelationFacts(whole.cosine, whole.drift, _name(whole.cosine, whole.drift), tensors)


def _name(cosine: float, drift: float | None) -> str:
    if cosine < RELATED:
        return INDEPENDENT
    return LINEAGE if drift is not None and drift <= NEAR else DRIFTED
