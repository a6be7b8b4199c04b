"""Finds the part of a trace that depends on nothing that is ever permuted, so that it can simply be computed."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "poisson")


def constant_nodes(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """All nodes, `known` ones included, whose value is constant and stays so.

    A tensor that starts as a constant but is later written to (zeros, then `copy_` of an activation into a part of
    it) is none, and neither are its other views.
    """
    tainted: set[fx.Node] = set()
    while True:
        constants, bases = _spread(graph, known, tainted)
        written = {
            base
            for node in graph.nodes
            if node not in constants
            for target in _written(node)
            for base in bases[target]
            if base in constants
        }
        if not written:
            return constants
        tainted |= {node for node, of in bases.items() if of & written} | written


def _spread(
    graph: fx.Graph, known: set[fx.Node], tainted: set[fx.Node]
) -> tuple[set[fx.Node], dict[fx.Node, set[fx.Node]]]:
    constants = set(known) - tainted
    bases: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if (
            node.op == "call_function"
            and node not in tainted
            and _computable(node)
            and all(n in constants for n in inputs)
        ):
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
    # Only of pointwise operators is it certain that their result is new memory.
    target = node.target
    return not (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable)


def _written(node: fx.Node) -> list[fx.Node]:
    if isinstance(node.target, OpOverload):
        inputs = [node.args[0]] if node.target._schema.is_mutable and node.args else []
        return [each for each in inputs if isinstance(each, fx.Node)]
    inside = [_submodule(each) for each in node.all_input_nodes if each.op == "get_attr"]
    mutable = any(_written(each) for module in inside if module is not None for each in module.graph.nodes)
    return list(node.all_input_nodes) if mutable else []


def _submodule(node: fx.Node) -> fx.GraphModule | None:
    module = getattr(node.graph.owning_module, str(node.target), None)
    return module if isinstance(module, fx.GraphModule) else None
