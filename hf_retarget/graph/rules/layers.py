"""Rules of layers: linear, products, convolutions, normalisations, attention, recurrent layers."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import Product, Shape, size_of, sum_of
from hf_retarget.graph.call import Call, Result, Value
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten

rule(aten.linear, "... i, o i, o -> ... o")
rule(aten.bilinear, "... i, ... j, o i j, o -> ... o")
rule(aten.mm, "n k, k m -> n m")
rule(aten.bmm, "b n k, b k m -> b n m")
rule(aten.mv, "n k, k -> n")
rule(aten.dot, "k, k ->")
rule(aten.vdot, "k, k ->")
rule(aten.outer, "n, m -> n m")
rule(aten.embedding, "V c, ... -> ... c")


@rule(aten.batch_norm, aten.instance_norm)
def batch_norm(call: Call) -> Result:
    """One mean and variance for each index of the second axis and, for instance norm, of the first."""
    shape = call.shape("input")
    call.hold(shape[1:2] if call.node.target is aten.batch_norm.default else shape[:2])
    return call.relate("n c ..., c, c, c, c -> n c ...")


@rule(aten.addmm, aten.baddbmm)
def add_product(call: Call) -> Result:
    """A matrix product plus a tensor that broadcasts."""
    first, left, right = call.tensors
    product = call.relate("... n k, ... k m -> ... n m", [left, right])
    return call.broadcast([product, call.shape(first)])  # type: ignore[list-item]


@rule(aten.matmul)
def matmul(call: Call) -> Result:
    """A matrix product, with either side possibly a vector, leading axes broadcast."""
    left, right = call.shapes
    row = "n k" if len(left) > 1 else "k"
    column = "k m" if len(right) > 1 else "k"
    out = " ".join(row.split()[:-1] + column.split()[1:])
    lead = ["... " if len(side) > 2 else "" for side in (left, right)]
    return call.relate(f"{lead[0]}{row}, {lead[1]}{column} -> {'... ' if any(lead) else ''}{out}")


@rule(aten.einsum)
def einsum(call: Call) -> Result:
    """The equation is already a signature, apart from spaces."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    if not arrow:  # implicit output: all letters that occur once, in alphabetical order
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        )
    signature = ", ".join(_spelled(term) for term in left.split(",")) + " -> " + _spelled(right)
    return call.relate(signature, list(call["tensors"]))


def _spelled(term: str) -> str:
    # Letters of either case are free here, unlike in signatures, so every letter gets a new name.
    return " ".join("..." if letter == "." else f"x{ord(letter)}" for letter in term.replace("...", "."))


_CONVOLUTIONS = {
    aten.conv1d: 1,
    aten.conv2d: 2,
    aten.conv3d: 3,
    aten.conv_transpose1d: 1,
    aten.conv_transpose2d: 2,
    aten.conv_transpose3d: 3,
}


@rule(*_CONVOLUTIONS)
def convolution(call: Call) -> Result:
    """All convolutions; those with a kernel of size one and no stride keep the spatial axes."""
    rank = _CONVOLUTIONS[call.node.target.overloadpacket]  # type: ignore[union-attr]
    transposed = "transpose" in str(call.node.target)
    weight = call.shape("weight")
    kernel, space = " ".join("JKL"[:rank]), " ".join("UVW"[:rank])
    if _passes_space_through(call, weight, rank):
        space = out = " ".join("uvw"[:rank])
    else:
        out = " ".join("XYZ"[:rank])
    batch = "n " if len(call.shape("input")) == rank + 2 else ""
    filters = f"(g i) o {kernel}" if transposed else f"(g o) i {kernel}"
    return call.relate(
        f"{batch}(g i) {space}, {filters}, (g o) -> {batch}(g o) {out}",
        [call["input"], call["weight"], call["bias"]],
        g=call["groups"],
        **{"o" if transposed else "i": size_of(weight[1])},
    )


def _passes_space_through(call: Call, weight: Shape, rank: int) -> bool:
    if any(axis for axis in weight[2:]):
        return False
    once, none = [1, [1], [1] * rank], [0, [0], [0] * rank, "valid", "same"]
    return call["stride"] in once and call["padding"] in none and call.get("output_padding", 0) in none


@rule(aten.layer_norm, aten.rms_norm)
def layer_norm(call: Call) -> Result:
    """Normalises the last axes jointly; they stay free, and the statistics hold the others."""
    shape = call.shape("input")
    lead = len(shape) - len(call["normalized_shape"])
    call.hold(shape[:lead])
    affine = [call.shape(name) for name in ("weight", "bias") if call.get(name) is not None]
    return (*shape[:lead], *call.broadcast([shape[lead:], *affine]))


@rule(aten.group_norm)
def group_norm(call: Call) -> Result:
    """Normalises each group of the second axis; both groups and the members of each may be permuted."""
    shape = call.shape("input")
    groups, _ = call.regroup([shape[1]], [call["num_groups"], size_of(shape[1]) // call["num_groups"]])
    call.hold((shape[0], groups))
    return call.relate(
        "n (g c) ..., (g c), (g c) -> n (g c) ...", [call["input"], call["weight"], call["bias"]], g=call["num_groups"]
    )


@rule(aten._weight_norm, aten._weight_norm_interface)
def weight_norm(call: Call) -> Result:
    """A direction `v` and a length `g` for each index of one axis."""
    v, g = call.shape("v"), call.shape("g")
    shape = call.broadcast([v, g])
    return shape if call.node.target is aten._weight_norm.default else [shape, g]


# ---- attention


@rule(aten.scaled_dot_product_attention)
def attention(call: Call) -> Result:
    """Queries and keys share their inner axis, values have their own; the scores hold queries × keys."""
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


# ---- recurrent layers: the gates are pinned, the hidden units of each layer and direction are one group

_GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}


@rule(*_GATES)
def recurrent(call: Call) -> Result:
    """For each layer and direction, hidden units are shared by both weight matrices and the state."""
    gates = _GATES[call.node.target]  # type: ignore[index]
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    weights = list(call["params"])
    each = len(weights) // (call["num_layers"] * directions)
    projected = each == (5 if call["has_biases"] else 3)
    data = call.shape("input")
    moment = 1 if call["batch_first"] and len(data) == 3 else 0
    call.mix(data, [moment], "order")
    features = data[-1]
    finals: list[list[Shape]] = [[] for _ in states]
    for layer in range(call["num_layers"]):
        hidden = []
        for direction in range(directions):
            row = layer * directions + direction
            own = weights[row * each : (row + 1) * each]
            start = [call.narrow(call.shape(state), 0, row, 1)[1:] for state in states]
            units, cells = _cell(call, own, features, gates, projected)
            hidden.append(units)
            for kind, state in enumerate(start):
                axis = call.unify(cells if kind else units, state[-1])
                batch = [call.unify(data[1 - moment], state[0])] if len(data) == 3 else []
                call.hold((*batch, axis))
                finals[kind].append(((), *batch, axis))
        features = hidden[0] if directions == 1 else (sum_of(hidden),)
    return [(*data[:-1], features), *(call.concatenate(rows, 0) for rows in finals)]


def _cell(call: Call, weights: list[Value], features: Product, gates: int, projected: bool) -> tuple[Product, Product]:
    from_input, from_hidden = call.shape(weights[0]), call.shape(weights[1])
    call.unify(features, from_input[1])
    gate_axes = [from_input[0], from_hidden[0]]
    gate_axes += [call.shape(weight)[0] for weight in weights[2 : len(weights) - projected]]
    cells: Product = ()
    for axis in gate_axes:
        gate, unit = call.regroup([axis], [gates, size_of(axis) // gates])
        call.pin(gate, "order")
        cells = call.unify(cells, unit)
    units = cells
    if projected:
        out, inner = call.shape(weights[-1])
        call.unify(cells, inner)
        units = out
    return call.unify(units, from_hidden[1]), cells
