"""Rules of operators that reduce axes, or depend on the order along one."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import Shape
from hf_retarget.graph.call import Call, Result
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten


def _dims(call: Call, rank: int) -> set[int]:
    dims = call.get("dim", call.get("dims"))
    if dims is None or dims == []:
        return set(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])} if rank else set()


def _reduced(call: Call, shape: Shape) -> Shape:
    dims = _dims(call, len(shape))
    if call.get("keepdim"):
        return tuple(() if dim in dims else axis for dim, axis in enumerate(shape))
    return tuple(axis for dim, axis in enumerate(shape) if dim not in dims)


@rule(
    aten.all,
    aten.amax,
    aten.amin,
    aten.any,
    aten.count_nonzero,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.mean,
    aten.nansum,
    aten.norm,
    aten.prod,
    aten.std,
    aten.sum,
    aten.var,
)
def reduce(call: Call) -> Result:
    """Reductions do not depend on the order of the reduced axes."""
    return _reduced(call, call.shapes[0])


@rule(aten.std_mean, aten.var_mean, aten.aminmax)
def reduce_twice(call: Call) -> Result:
    """Two reductions of the same axes."""
    return [_reduced(call, call.shapes[0])] * 2


@rule(aten.max, aten.min, aten.median, aten.mode)
def extremum(call: Call) -> Result:
    """A reduction, but the *position* of the extremum depends on the order."""
    if len(call.tensors) == 2:
        return call.broadcast(call.shapes)
    shape = call.shapes[0]
    if call.get("dim") is None:
        return ()
    if _positions_used(call):
        call.mix(shape, [call["dim"]], "order")
    return [_reduced(call, shape)] * 2


def _positions_used(call: Call) -> bool:
    return any(user.args[1] == 1 and user.users for user in call.node.users)


@rule(aten.argmax, aten.argmin)
def position(call: Call) -> Result:
    """A position along an axis depends on its order."""
    shape = call.shapes[0]
    if shape:
        call.mix(shape, _dims(call, len(shape)), "order")
    return _reduced(call, shape)


@rule(aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.argsort)
def running(call: Call) -> Result:
    """Depends on the order along one axis."""
    shape = call.shapes[0]
    call.mix(shape, [call["dim"]], "order")
    return shape


@rule(aten.sort, aten.topk)
def ranked(call: Call) -> Result:
    """Sorts one axis; the positions that are also returned refer to its old order."""
    shape = call.shapes[0]
    dim = call["dim"] % len(shape)
    call.hold((*shape[:dim], *shape[dim + 1 :]))
    if _positions_used(call):
        call.pin(shape[dim], "order")
    return [(*shape[:dim], call.pinned(call.sizes[dim], "order"), *shape[dim + 1 :])] * 2


@rule(aten.tril, aten.triu)
def triangle(call: Call) -> Result:
    """Keeps a triangle of the last two axes."""
    shape = call.shapes[0]
    call.mix(shape, [-1, -2], "order")
    return shape
