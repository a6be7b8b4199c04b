"""Rules of recurrent layers: the gates are pinned, the hidden units of each layer and direction are one group."""

from __future__ import annotations

import torch

from hf_retarget.graph.axes import Product, size_of, sum_of
from hf_retarget.graph.call import Call, Result, Shape, Value
from hf_retarget.graph.rules.registry import rule

aten = torch.ops.aten

_GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}


@rule(*_GATES)
def recurrent(call: Call) -> Result:
    """Layer by layer, direction by direction: hidden units are shared by both weight matrices and the state."""
    gates = _GATES[call.node.target]  # type: ignore[index]
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    weights = list(call["params"])
    each = len(weights) // (call["num_layers"] * directions)
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
            units, cells = _cell(call, own, features, gates, projected=_projected(call, each))
            hidden.append(units)
            for kind, state in enumerate(start):
                axis = call.unify(cells if kind else units, state[-1])
                batch = [call.unify(data[1 - moment], state[0])] if len(data) == 3 else []
                call.hold((*batch, axis))
                finals[kind].append(((), *batch, axis))
        features = hidden[0] if directions == 1 else (sum_of(hidden),)
    return [(*data[:-1], features), *(call.concatenate(rows, 0) for rows in finals)]


def _projected(call: Call, each: int) -> bool:
    return each == (5 if call["has_biases"] else 3)


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
