"""Rules of attention: scaled dot products and softmax."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import size_of
from hf_retarget.graph.call import Call, Result
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention)
def attention(call: Call) -> Result:
    """Queries and keys share their inner axis, values bring their own; the scores hold queries × keys."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    if call["is_causal"]:
        call.pin((*query[-2], *key[-2]), "order")
    if call["enable_gqa"]:
        # Each key head serves a run of query heads: (h r) queries against h keys.
        heads, shared = size_of(query[-3]), size_of(key[-3])
        outer, repeat = call.regroup([query[-3]], [shared, heads // shared])
        query = (*query[:-3], outer, repeat, *query[-2:])
        key, value = ((*side[:-2], (), *side[-2:]) for side in (key, value))
    length = call.unify(key[-2], value[-2])
    call.unify(query[-1], key[-1])
    batch = call.broadcast([query[:-2], key[:-2], value[:-2]])
    scores = (*batch, query[-2], length)
    if call["attn_mask"] is not None:
        bias = call.shape("attn_mask")
        if call["enable_gqa"] and len(bias) > 2:
            split = call.regroup([bias[-3]], [size_of(outer), size_of(repeat)] if bias[-3] else [1, 1])
            bias = (*bias[:-3], *split, *bias[-2:])
        scores = call.broadcast([scores, bias])
        batch = scores[:-2]
    call.hold(scores)
    call.hold(scores[:-1])
    call.span((*scores, query[-1]))
    call.span((*scores, value[-1]))
    if call["enable_gqa"]:
        batch = (*batch[:-2], (*batch[-2], *batch[-1]))
    return (*batch, query[-2], value[-1])


@rule(aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax)
def softmax(call: Call) -> Result:
    """Equivariant along its axis; the sums hold all the others."""
    shape = call.shapes[0]
    dim = call["dim"] % len(shape)
    call.hold((*shape[:dim], *shape[dim + 1 :]))
    return shape
