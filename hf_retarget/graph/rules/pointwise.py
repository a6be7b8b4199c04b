"""Rules of elementwise operators, apart from those that torch tags as pointwise."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import flat
from hf_retarget.graph.call import Call, Result
from hf_retarget.graph.rules.registry import pointwise, rule

aten = torch.ops.aten


@rule(
    aten.alias,
    aten.alpha_dropout,
    aten.broadcast_to,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.detach_,
    aten.dropout,
    aten.dropout_,
    aten.expand,
    aten.expand_as,
    aten.feature_dropout,
    aten.hardswish,
    aten.hardswish_,
    aten.lift_fresh_copy,
    aten.to,
    aten.type_as,
    aten._to_copy,
)
def keep(call: Call) -> Result:
    """The axes of the first tensor; others only provide a type, a device or a size.

    If an axis of one element is expanded, all copies are equal, so the new axis is free.
    """
    shape = call.shapes[0]
    sizes = call.sizes
    shape = ((),) * (len(sizes) - len(shape)) + shape
    return tuple(axis if flat(axis) else call.fresh(size) for axis, size in zip(shape, sizes, strict=True))


rule(aten.copy_, aten.masked_fill_, aten.where)(pointwise)  # torch does not tag all of these overloads


@rule(
    aten.empty,
    aten.empty_like,
    aten.fill_,
    aten.full,
    aten.full_like,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.zero_,
    aten.zeros,
    aten.zeros_like,
)
def uniform(call: Call) -> Result:
    """A uniform tensor has free axes; an in-place fill keeps the axes."""
    if str(call.node.target.overloadpacket).endswith("_"):  # type: ignore[union-attr]
        return call.shapes[0]
    return tuple(call.fresh(size) for size in call.sizes)


@rule(aten.prelu)
def prelu(call: Call) -> Result:
    """One slope for all, or one for each index of the second axis."""
    slope = call.shape("weight")
    return call.relate("n c ..., c -> n c ...") if slope and slope[0] else call.shape("self")


@rule(aten.glu)
def glu(call: Call) -> Result:
    """One half gates the other, so both halves share their axis."""
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    half = call.sizes[dim]
    return call.broadcast([call.narrow(shape, dim, 0, half), call.narrow(shape, dim, half, half)])
