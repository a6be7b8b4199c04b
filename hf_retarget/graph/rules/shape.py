"""Rules of operators that only rearrange: views, permutations, cuts and concatenations."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import Product, flat, size_of
from hf_retarget.graph.call import Call, Result, Shape
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten


@rule(
    aten._unsafe_view,
    aten.flatten,
    aten.ravel,
    aten.reshape,
    aten.reshape_as,
    aten.unflatten,
    aten.view,
    aten.view_as,
)
def reshape(call: Call) -> Result:
    """Deals the factors out anew, run by run, so that what cannot be aligned is pinned and nothing else."""
    old, sizes = list(call.shapes[0]), list(call.sizes)
    new: list[Product] = []
    while old or sizes:
        axes, taken = [old.pop(0)] if old else [], [sizes.pop(0)] if sizes else []
        have, want = _count(axes), _product(taken)
        while have != want:
            if have < want:
                axes.append(old.pop(0))
                have = _count(axes)
            else:
                taken.append(sizes.pop(0))
                want = _product(taken)
        new += call.regroup(axes, taken)
    return tuple(new)


def _count(axes: list[Product]) -> int:
    return size_of(atom for axis in axes for atom in axis)


def _product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


@rule(aten.permute)
def permute(call: Call) -> Result:
    """Reorders the axes."""
    shape = call.shape("self")
    return tuple(shape[dim] for dim in call["dims"])


@rule(aten.transpose, aten.swapaxes, aten.swapdims)
def transpose(call: Call) -> Result:
    """Swaps two axes."""
    shape = list(call.shape("self"))
    a, b = [value for value in call.arguments.values() if isinstance(value, int)]
    if shape:
        shape[a], shape[b] = shape[b], shape[a]
    return tuple(shape)


@rule(aten.t, aten.numpy_T, aten.mT)
def reverse(call: Call) -> Result:
    """Swaps the last two axes, or reverses them all."""
    shape = call.shapes[0]
    if call.node.target is aten.mT.default:
        return (*shape[:-2], shape[-1], shape[-2])
    return shape[::-1]


@rule(aten.movedim)
def movedim(call: Call) -> Result:
    """Moves some axes to new places."""
    shape = call.shape("self")
    ints = [[value] if isinstance(value, int) else list(value) for value in (call["source"], call["destination"])]
    source, target = ([dim % len(shape) for dim in dims] for dims in ints)
    rest = iter(axis for dim, axis in enumerate(shape) if dim not in source)
    moved = dict(zip(target, source, strict=True))
    return tuple(shape[moved[dim]] if dim in moved else next(rest) for dim in range(len(shape)))


@rule(aten.unsqueeze, aten.squeeze)
def squeeze(call: Call) -> Result:
    """Adds or drops axes of one element: those that remain keep their order."""
    kept = iter(axis for axis in call.shape("self") if flat(axis))
    return tuple(() if size == 1 else next(kept) for size in call.sizes)


@rule(aten.expand, aten.broadcast_to)
def expand(call: Call) -> Result:
    """Repeats axes of one element; all copies are alike, so the new axis is free."""
    sizes = call.sizes
    shape = call.shape("self")
    shape = ((),) * (len(sizes) - len(shape)) + shape
    return tuple(axis if flat(axis) else call.fresh(size) for axis, size in zip(shape, sizes, strict=True))


@rule(aten.repeat, aten.tile)
def repeat(call: Call) -> Result:
    """Copies × what is copied."""
    sizes = call.sizes
    shape = call.shape("self")
    shape = ((),) * (len(sizes) - len(shape)) + shape
    return tuple((*call.fresh(size // size_of(axis)), *axis) for axis, size in zip(shape, sizes, strict=True))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Result:
    """What is copied × copies."""
    shape = list(call.shape("self"))
    dim = call["dim"]
    if dim is None:
        shape, dim = [tuple(atom for axis in shape for atom in axis)], 0
    shape[dim] = (*shape[dim], *call.fresh(call["repeats"]))
    return tuple(shape)


@rule(aten.cat, aten.concat, aten.concatenate)
def cat(call: Call) -> Result:
    """One axis becomes a sum."""
    shapes = [shape for shape in (call.shape(value) for value in call["tensors"]) if len(shape) == len(call.sizes)]
    return call.concatenate(shapes, call["dim"] % len(call.sizes))


@rule(aten.stack)
def stack(call: Call) -> Result:
    """A new axis whose every index is one tensor."""
    dim = call["dim"] % len(call.sizes)
    shapes = [call.shape(value) for value in call["tensors"]]
    return call.concatenate([(*shape[:dim], (), *shape[dim:]) for shape in shapes], dim)


def _pieces(call: Call, shape: Shape, dim: int, lengths: list[int]) -> list[Shape]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [call.narrow(shape, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


@rule(aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split)
def split(call: Call) -> Result:
    """Cuts one axis into consecutive pieces, as long as the outputs say."""
    shape = call.shapes[0]
    dim = call["dim"] % len(shape)
    return _pieces(call, shape, dim, [sizes[dim] for sizes in call.all_sizes])


@rule(aten.unbind)
def unbind(call: Call) -> Result:
    """Cuts one axis into single indices and drops it."""
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    pieces = _pieces(call, shape, dim, [1] * size_of(shape[dim]))
    return [(*piece[:dim], *piece[dim + 1 :]) for piece in pieces]


@rule(aten.select)
def select(call: Call) -> Result:
    """One index of one axis."""
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    piece = call.narrow(shape, dim, call["index"] % size_of(shape[dim]), 1)
    return (*piece[:dim], *piece[dim + 1 :])


@rule(aten.narrow)
def narrow(call: Call) -> Result:
    """A run of indices."""
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    return call.narrow(shape, dim, call["start"] % size_of(shape[dim]), call["length"])


@rule(aten.slice)
def slice_(call: Call) -> Result:
    """A run of indices, possibly with a step: every k-th index is one column of a product `… × k`."""
    shape = call.shape("self")
    dim = (call["dim"] or 0) % len(shape)
    size, length, step = size_of(shape[dim]), call.sizes[dim], call["step"]
    start = call["start"] or 0
    start = max(start + size if start < 0 else start, 0)
    if step == 1:
        return call.narrow(shape, dim, start, length)
    if start >= step or size % step or length != size // step:
        call.mix(shape, [dim])
        return (*shape[:dim], call.pinned(length), *shape[dim + 1 :])
    rows, columns = call.regroup([shape[dim]], [length, step])
    piece = call.narrow((*shape[:dim], rows, columns, *shape[dim + 1 :]), dim + 1, start, 1)
    return (*piece[: dim + 1], *piece[dim + 2 :])
