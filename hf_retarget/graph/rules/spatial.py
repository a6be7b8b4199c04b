"""Rules of operators that move through space: pooling, resampling, padding, patches."""

from __future__ import annotations

from math import prod

import torch

from hf_retarget.graph.axes import Product, Shape, leaves, size_of, sum_of
from hf_retarget.graph.call import Call, Result
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten

rule(aten.adaptive_avg_pool1d, "... W -> ... X")
rule(aten.adaptive_avg_pool2d, "... H W -> ... Y X")
rule(aten.adaptive_avg_pool3d, "... D H W -> ... Z Y X")
rule(aten.avg_pool1d, "... W -> ... X")
rule(aten.avg_pool2d, "... H W -> ... Y X")
rule(aten.avg_pool3d, "... D H W -> ... Z Y X")
rule(aten.max_pool1d, "... W -> ... X")
rule(aten.max_pool2d, "... H W -> ... Y X")
rule(aten.max_pool3d, "... D H W -> ... Z Y X")
rule(aten.adaptive_max_pool1d, "... W -> ... X, ... X")
rule(aten.adaptive_max_pool2d, "... H W -> ... Y X, ... Y X")
rule(aten.max_pool2d_with_indices, "... H W -> ... Y X, ... Y X")
rule(aten.upsample_nearest1d, "n c W -> n c X")
rule(aten.upsample_linear1d, "n c W -> n c X")
rule(aten.upsample_nearest2d, "n c H W -> n c Y X")
rule(aten.upsample_bilinear2d, "n c H W -> n c Y X")
rule(aten._upsample_bilinear2d_aa, "n c H W -> n c Y X")
rule(aten.upsample_bicubic2d, "n c H W -> n c Y X")
rule(aten._upsample_bicubic2d_aa, "n c H W -> n c Y X")
rule(aten.upsample_nearest3d, "n c D H W -> n c Z Y X")
rule(aten.upsample_trilinear3d, "n c D H W -> n c Z Y X")
rule(aten.im2col, "... c H W -> ... (c K) P", K=lambda call: prod(call["kernel_size"]))
rule(aten.col2im, "... (c K) P -> ... c H W", K=lambda call: prod(call["kernel_size"]))
rule(aten.pixel_shuffle, "... (c K) H W -> ... c Y X", K=lambda call: call["upscale_factor"] ** 2)
rule(aten.pixel_unshuffle, "... c H W -> ... (c K) Y X", K=lambda call: call["downscale_factor"] ** 2)
rule(aten.channel_shuffle, "n (g c) ... -> n (c g) ...", g=lambda call: call["groups"])


@rule(aten.pad, aten.constant_pad_nd)
def pad(call: Call) -> Result:
    """Padding with a constant makes a sum of old and new; any other padding depends on the order of neighbours."""
    shape = list(call.shape("self"))
    constant = call.get("mode", "constant") == "constant"
    for back in range(len(call["pad"]) // 2):
        dim = len(shape) - 1 - back
        before, after = call["pad"][2 * back : 2 * back + 2]
        if before < 0 or after < 0:
            length = size_of(shape[dim]) + min(before, 0) + min(after, 0)
            shape = list(call.narrow(tuple(shape), dim, max(-before, 0), length))
        before, after = max(before, 0), max(after, 0)
        if before or after:
            shape[dim] = _padded(call, tuple(shape), dim, before, after, constant)
    return tuple(shape)


def _padded(call: Call, shape: Shape, dim: int, before: int, after: int, constant: bool) -> Product:
    axis = shape[dim]
    if not constant or all(leaf.pin is not None for leaf in leaves(axis)):
        call.mix(shape, [dim])
        return call.pinned(before + size_of(axis) + after)
    return (sum_of([part for part, n in ((call.fresh(before), before), (axis, 1), (call.fresh(after), after)) if n]),)


@rule(aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d)
def mirror(call: Call) -> Result:
    """Padding that copies neighbours: every axis that grows is pinned."""
    shape = call.shape("self")
    call.mix(shape, range(len(shape) - len(call["padding"]) // 2, len(shape)))
    return tuple(
        axis if size_of(axis) == size else call.pinned(size) for axis, size in zip(shape, call.sizes, strict=True)
    )


@rule(aten.grid_sampler)
def grid_sampler(call: Call) -> Result:
    """Samples an image or a volume at given positions."""
    flat_image = len(call.shape("input")) == 4
    return call.relate("n c H W, n Y X P -> n c Y X" if flat_image else "n c D H W, n Z Y X P -> n c Z Y X")


@rule(aten.unfold)
def unfold(call: Call) -> Result:
    """Windows along one axis, as a new last axis."""
    shape = list(call.shape("self"))
    dim = call["dimension"] % len(shape)
    call.mix(tuple(shape), [dim])
    shape[dim] = call.pinned(call.sizes[dim])
    return (*shape, call.pinned(call.sizes[-1]))


@rule(aten.roll, aten.flip)
def move(call: Call) -> Result:
    """Shifts or reverses some axes; by default, all of them."""
    shape = call.shape("self")
    if shape:
        call.mix(shape, call["dims"] or range(len(shape)))
    return shape
