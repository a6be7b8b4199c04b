"""Rules of operators that only rearrange or index: views, permutations, splits, concatenations, lookups."""

from __future__ import annotations

from math import prod

import torch

from hf_retarget.graph.axes import Product, Shape, flat, size_of
from hf_retarget.graph.call import Call, Result
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
    """Distributes the factors over the new axes, run by run, and pins only those that cannot be aligned."""
    old, sizes = list(call.shapes[0]), list(call.sizes)
    new: list[Product] = []
    while old or sizes:
        axes, taken = [old.pop(0)] if old else [], [sizes.pop(0)] if sizes else []
        while (have := prod(map(size_of, axes))) != (want := prod(taken)):
            if have < want:
                axes.append(old.pop(0))
            else:
                taken.append(sizes.pop(0))
        new += call.regroup(axes, taken)
    return tuple(new)


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
    """Moves axes to new positions."""
    shape = call.shape("self")
    ints = [[value] if isinstance(value, int) else list(value) for value in (call["source"], call["destination"])]
    source, target = ([dim % len(shape) for dim in dims] for dims in ints)
    rest = iter(axis for dim, axis in enumerate(shape) if dim not in source)
    moved = dict(zip(target, source, strict=True))
    return tuple(shape[moved[dim]] if dim in moved else next(rest) for dim in range(len(shape)))


@rule(aten.unsqueeze, aten.squeeze)
def squeeze(call: Call) -> Result:
    """Adds or drops axes of one element; the others keep their order."""
    kept = iter(axis for axis in call.shape("self") if flat(axis))
    return tuple(() if size == 1 else next(kept) for size in call.sizes)


@rule(aten.repeat, aten.tile)
def repeat(call: Call) -> Result:
    """The new axis is copies × original."""
    sizes = call.sizes
    shape = call.shape("self")
    shape = ((),) * (len(sizes) - len(shape)) + shape
    return tuple((*call.fresh(size // size_of(axis)), *axis) for axis, size in zip(shape, sizes, strict=True))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Result:
    """The new axis is original × copies."""
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
    """A new axis with one index per tensor."""
    dim = call["dim"] % len(call.sizes)
    shapes = [call.shape(value) for value in call["tensors"]]
    return call.concatenate([(*shape[:dim], (), *shape[dim:]) for shape in shapes], dim)


def _pieces(call: Call, shape: Shape, dim: int, lengths: list[int]) -> list[Shape]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [call.narrow(shape, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


@rule(aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split)
def split(call: Call) -> Result:
    """Cuts one axis into consecutive pieces of the outputs' lengths."""
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
    """A run of indices, possibly with a step: every k-th index is a column of a product `… × k`."""
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


# ---- indexing: the indexed axis is pinned, the others are kept


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
    # A mask may index several axes, and the number of remaining elements depends on its values: keep nothing.
    for shape in call.shapes:
        for axis in shape:
            call.pin(axis, "order")
    return tuple(call.pinned(size, "order") for size in call.sizes)


@rule(aten.index_select)
def index_select(call: Call) -> Result:
    """One axis is indexed, the others are kept."""
    shape = list(call.shape("self"))
    dim = call["dim"] % len(shape)
    call.mix(tuple(shape), [dim], "order")
    (shape[dim],) = call.shape("index") or ((),)
    return tuple(shape)


@rule(aten.gather, aten.take_along_dim)
def gather(call: Call) -> Result:
    """The index has its own order along the indexed axis, and shares all others."""
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
            call.pin(axis, "order")  # gather may use fewer rows than there are
            call.pin(position, "order")
            result.append(position)
        else:
            result.append(call.unify(axis, position))
    return tuple(result)


@rule(aten.one_hot)
def one_hot(call: Call) -> Result:
    """A class number becomes a pinned axis."""
    return (*call.shapes[0], call.pinned(call.sizes[-1], "order"))
