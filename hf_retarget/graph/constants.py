"""Finds the part of a trace that depends on nothing that is ever permuted, so that it can simply be computed."""

from __future__ import annotations

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "poisson")


def constant_nodes(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """All nodes whose value follows from the `known` constants alone.

    A tensor that starts as a constant but is later written to (zeros, then `copy_` of an activation into a part of
    it) is none, and neither are its other views.
    """
    tainted: set[fx.Node] = set()
    while True:
        constants, bases = _spread(graph, known, tainted)
        written = {
            base
            for node in graph.nodes
            if _writes(node) and node not in constants
            for base in bases.get(node.args[0], ())  # type: ignore[arg-type]
            if base in constants
        }
        if not written:
            return constants - known
        tainted |= {node for node, of in bases.items() if of & written} | written


def _spread(
    graph: fx.Graph, known: set[fx.Node], tainted: set[fx.Node]
) -> tuple[set[fx.Node], dict[fx.Node, set[fx.Node]]]:
    constants = set(known) - tainted
    bases: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and node not in tainted and _computable(node) and all(n in constants for n in inputs):
            constants.add(node)
        # A view shares memory with its input; without asking which operators are views, assume that all may be.
        bases[node] = {node}.union(*(bases[n] for n in inputs)) if _may_alias(node) else {node}
    return constants, bases


def _computable(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, Tensor) for value in values) and not any(word in str(node.target) for word in _RANDOM)


def _may_alias(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns) or str(node.target).startswith(
        ("aten.reshape", "aten.flatten", "aten.contiguous", "aten.expand_as", "aten.to.", "aten.view_as", "aten.unflatten", "aten.dropout")
    )


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable and bool(node.all_input_nodes)
