"""Rules of operators that look elements up by their position: the indexed axis is pinned, the others are kept."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import size_of
from hf_retarget.graph.call import Call, Result
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten


@rule(aten.index)
def index(call: Call) -> Result:
    """``x[i, :, j]``: indexed axes are pinned and replaced by those of the indices."""
    shape = call.shape("self")
    indices = list(call["indices"])
    indices += [None] * (len(shape) - len(indices))
    used = [dim for dim, value in enumerate(indices) if value is not None]
    if any(
        value is not None and value.constant is not None and value.constant.dtype is torch.bool for value in indices
    ):
        return _masked(call)
    call.mix(shape, used, "order")
    looked_up = call.broadcast(call.shape(indices[dim]) for dim in used)
    kept = [axis for dim, axis in enumerate(shape) if indices[dim] is None]
    together = used == list(range(used[0], used[-1] + 1))
    place = used[0] if together else 0
    return (*kept[:place], *looked_up, *kept[place:])


def _masked(call: Call) -> Result:
    # A mask may stand for several axes, and how many elements remain depends on its values: keep nothing.
    for shape in call.shapes:
        for axis in shape:
            call.pin(axis, "order")
    return tuple(call.pinned(size, "order") for size in call.sizes)


@rule(aten.index_select)
def index_select(call: Call) -> Result:
    """One axis is looked up, the others stay."""
    shape = list(call.shape("self"))
    dim = call["dim"] % len(shape)
    call.mix(tuple(shape), [dim], "order")
    (shape[dim],) = call.shape("index") or ((),)
    return tuple(shape)


@rule(aten.gather, aten.take_along_dim)
def gather(call: Call) -> Result:
    """The index has its own order along the looked-up axis and shares all the others."""
    shape = call.shape("self")
    where = call.shape("index" if "index" in call.arguments else "indices")
    if call["dim"] is None:
        for axis in shape:
            call.pin(axis, "order")
        return where
    dim = call["dim"] % len(shape)
    call.mix(shape, [dim], "order")
    result = []
    for i, (axis, position, size) in enumerate(zip(shape, where, call.sizes, strict=True)):
        if i == dim:
            result.append(position)
        elif size != size_of(axis):
            call.pin(axis, "order")  # gather may look at fewer rows than there are
            call.pin(position, "order")
            result.append(position)
        else:
            result.append(call.unify(axis, position))
    return tuple(result)


@rule(aten.one_hot)
def one_hot(call: Call) -> Result:
    """A class number becomes a pinned axis."""
    return (*call.shapes[0], call.pinned(call.sizes[-1], "order"))
