"""Walks a trace, applies the rules, and lays out the groups that come of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hf_retarget.errors import TraceError
from hf_retarget.graph.axes import Atom, Misaligned, Pin, pin, size_of
from hf_retarget.graph.call import Call, Shape, Value, constant_shape
from hf_retarget.graph.constants import constant_nodes
from hf_retarget.graph.families import settle
from hf_retarget.graph.groups import assemble
from hf_retarget.graph.permutation_graph import PermutationGraph, UnknownOperator
from hf_retarget.graph.rules import lookup

_PASS_THROUGH = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def build(model: nn.Module, program: ExportedProgram) -> PermutationGraph:
    """The permutation graph of a model, from its exported trace."""
    walk = Walk(model, program)
    walk.run()
    parameters = frozenset(name for name, _ in model.named_parameters())
    held = settle(walk.state, walk.held, walk.spaces)
    return assemble(walk.state, held, walk.unknown, walk.originals, parameters, walk.tied)


class Walk:
    """One pass over a trace: gives every tensor its axes."""

    def __init__(self, model: nn.Module, program: ExportedProgram) -> None:
        self.program = program
        self.originals: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(tensor), name) for name, tensor in self.originals.items()}
        self.tied = {name: canonical for name, canonical in names.items() if name != canonical}
        self.state: dict[str, Shape] = {}
        self.held: list[Shape] = []
        self.spaces: list[Shape] = []
        self.unknown: list[UnknownOperator] = []

    def run(self) -> None:
        """Walk the whole program."""
        module = self.program.graph_module
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        inputs = [self._input(node, specs[node.name]) for node in module.graph.nodes if node.op == "placeholder"]
        for output in pytree.tree_leaves(self._graph(module, inputs)):
            if isinstance(output, Value):
                for axis in output.shape:
                    pin(axis, Pin("output", "the model's output"))

    # ------------------------------------------------------------------ inputs

    def _input(self, node: fx.Node, spec: Any) -> Any:
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            return example
        name = self.tied.get(spec.target, spec.target)
        if spec.kind is InputKind.USER_INPUT:
            return self._record(
                tuple(_axis(size, Pin("input", f"the model's input '{node.name}'")) for size in example.shape)
            )
        persistent = spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent)
        if persistent and (example.is_floating_point() or example.is_complex()):
            if name not in self.state and node.users:
                self.state[name] = tuple(_axis(size) for size in example.shape)
            return self._record(self.state[name]) if name in self.state else None
        value = self.originals.get(name) if persistent else self.program.constants.get(name)
        if value is None:
            value = example.to("meta")
        return Value(constant=value.detach() if value.is_meta else value.detach().cpu().clone())

    def _record(self, shape: Shape) -> Value:
        self.held.append(shape)
        return Value(shape)

    # ------------------------------------------------------------------ nodes

    def _graph(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        foldable: set[fx.Node] | None = None
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "get_attr":
                target = getattr(module, str(node.target))
                values[node] = Value(constant=target.detach().cpu().clone()) if isinstance(target, Tensor) else target
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            else:
                if foldable is None:
                    foldable = self._constants(module, values)
                values[node] = self._node(node, values, foldable)
        return None

    def _constants(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> set[fx.Node]:
        known = {node for node, value in values.items() if not isinstance(value, Value) or value.constant is not None}
        constants = constant_nodes(module.graph, known)
        for node in known - constants:  # written to: what it was at first still counts
            value = values[node]
            if isinstance(value, Value) and value.constant is not None:
                values[node] = self._record(constant_shape(value.constant, Pin("constant", node.name)))
        return constants

    def _node(self, node: fx.Node, values: dict[fx.Node, Any], foldable: set[fx.Node]) -> Any:
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node in foldable:
            return _fold(node, args, kwargs)
        if getattr(node.target, "__name__", "") in _PASS_THROUGH:
            place = next(i for i, arg in enumerate(args) if isinstance(arg, fx.GraphModule))
            return self._graph(args[place], args[place + 1 :])
        if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(node.meta.get("val"))):
            return node.meta.get("val")
        return self._call(node, args, kwargs)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(node, _by_name(node.target, args, kwargs), _where(node), self.held, self.spaces)
        outputs = [self._record(shape) for shape in self._shapes(call)]
        return outputs if isinstance(node.meta["val"], (list, tuple)) else outputs[0]

    def _shapes(self, call: Call) -> list[Shape]:
        sizes = call.all_sizes
        rule = lookup(call.node.target)
        problem = ""
        if rule is not None:
            try:
                result = rule(call)
                shapes = result if isinstance(result, list) else [result]
                if [[size_of(axis) for axis in shape] for shape in shapes] == sizes:
                    return shapes
                problem = "its rule gives axes of other sizes"
            except Misaligned:
                return _pin_all(call, "misaligned")
            except TraceError:
                raise
            except Exception as error:  # a call that the rule's author did not think of: pin, and say so
                problem = f"its rule fails: {type(error).__name__}: {error}"
        node = call.node
        self.unknown.append(UnknownOperator(str(node.target), node.name, _module_of(node), problem))
        return _pin_all(call, "unknown operator")


def _axis(size: int, why: Pin | None = None) -> tuple[Atom, ...]:
    return () if size == 1 else (Atom(int(size), why),)


def _fold(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Value, lambda value: value.constant, (args, kwargs))
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return pytree.tree_map_only(Tensor, lambda tensor: Value(constant=tensor), result)


def _by_name(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(target, OpOverload):
        return {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    named: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return named


def _pin_all(call: Call, reason: str) -> list[Shape]:
    for shape in call.shapes:
        if shape:
            call.mix(shape, range(len(shape)), reason)
    return [tuple(call.pinned(size, reason) for size in sizes) for sizes in call.all_sizes]


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values())) if path), "")


def _where(node: fx.Node) -> str:
    module = _module_of(node)
    return f"{node.target} ({node.name}{', ' + module if module else ''})"
