"""Builds the permutation graph from a trace: walks the trace, applies the rules, and lays out the groups."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hf_retarget.errors import TraceError
from hf_retarget.graph.axes import Atom, Misaligned, Pin, Shape, axis_of, pin, size_of
from hf_retarget.graph.call import Call, Value, constant_shape
from hf_retarget.graph.families import Path, outers, paths, settle
from hf_retarget.graph.permutation import Axis, Block, Factor, Layout
from hf_retarget.graph.permutation_graph import Group, PermutationGraph, PinnedAxis, UnknownOperator
from hf_retarget.graph.rules import lookup

_PASS_THROUGH = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "poisson")


def build(model: nn.Module, program: ExportedProgram) -> PermutationGraph:
    """The permutation graph of a model, from its exported trace."""
    walk = _Walk(model, program)
    walk.run()
    held = settle(walk.state, walk.held, walk.spaces)
    own = {name: list(paths(walk.state[name])) for name in walk.originals if name in walk.state}
    everything = [path for shape in held for path in paths(shape)]
    varies_over = outers([path for each in own.values() for path in each], everything)
    groups = _groups(own, varies_over)
    names = {atom: group.name for atom, group in groups.items()}
    layouts = {
        name: Layout(
            tuple(tensor.shape),
            tuple(_block(path, names, varies_over) for path in own[name])
            if name in own
            else (Block(0, (Factor(tensor.numel(), 1, 0),) if tensor.numel() > 1 else ()),),  # unused
        )
        for name, tensor in walk.originals.items()
        if name not in walk.tied
    }
    return PermutationGraph(
        groups=tuple(groups.values()),
        layouts=layouts,
        parameters=frozenset(name for name, _ in model.named_parameters()),
        pinned=tuple(_pinned(own, walk.originals, walk.tied)),
        unknown_operators=tuple(walk.unknown),
        tied=walk.tied,
    )


# ---- walking a trace


class _Walk:
    """One pass over a trace, which assigns axes to every tensor."""

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
            why = Pin("input", f"the model's input '{node.name}'")
            return self._record(tuple(axis_of(int(size), why) for size in example.shape))
        persistent = spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent)
        if persistent and (example.is_floating_point() or example.is_complex()):
            if name not in self.state and node.users:
                self.state[name] = tuple(axis_of(int(size)) for size in example.shape)
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
        constants = _constant_nodes(module.graph, known)
        for node in known - constants:  # written to later, but used before with its first value
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
        module = _module_of(node)
        where = f"{node.target} ({node.name}{', ' + module if module else ''})"
        call = Call(node, _by_name(node.target, args, kwargs), where, self.held, self.spaces)
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
            except Exception as error:  # a call that the rule does not cover: pin and report it
                problem = f"its rule fails: {type(error).__name__}: {error}"
        node = call.node
        self.unknown.append(UnknownOperator(str(node.target), node.name, _module_of(node), problem))
        return _pin_all(call, "unknown operator")


def _fold(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Value, lambda value: value.constant, (args, kwargs))
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return pytree.tree_map_only(Tensor, lambda tensor: Value(constant=tensor), result)


def _by_name(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(target, OpOverload):
        return {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


def _pin_all(call: Call, reason: str) -> list[Shape]:
    for shape in call.shapes:
        if shape:
            call.mix(shape, range(len(shape)), reason)
    return [tuple(call.pinned(size, reason) for size in sizes) for sizes in call.all_sizes]


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values())) if path), "")


# ---- constant folding: the part of a trace that does not depend on anything that may be permuted


def _constant_nodes(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """All nodes, including `known`, whose value is constant throughout.

    A tensor that starts as a constant but is later written to (zeros, then `copy_` of an activation into a part of it)
    does not count, nor do its other views.
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
        steady = node not in tainted and constants.issuperset(inputs)
        if steady and node.op == "call_function" and _computable(node):
            constants.add(node)
        # A view shares memory with its input, and any operator may be a view; only pointwise ones surely are not.
        target = node.target
        pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
        new = pointwise and not target._schema.is_mutable
        bases[node] = {node} if new else {node}.union(*(bases[n] for n in inputs))
    return constants, bases


def _computable(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, Tensor) for value in values) and not any(word in str(node.target) for word in _RANDOM)


def _written(node: fx.Node) -> list[fx.Node]:
    if isinstance(node.target, OpOverload):
        inputs = [node.args[0]] if node.target._schema.is_mutable and node.args else []
        return [each for each in inputs if isinstance(each, fx.Node)]
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    attributes = [getattr(node.graph.owning_module, name, None) for name in names]
    inside = [module for module in attributes if isinstance(module, fx.GraphModule)]
    mutable = any(_written(each) for module in inside for each in module.graph.nodes)
    return list(node.all_input_nodes) if mutable else []


# ---- groups and layouts


def _groups(own: Mapping[str, Sequence[Path]], varies_over: Mapping[Atom, list[Atom]]) -> dict[Atom, Group]:
    axes: dict[Atom, dict[Axis, None]] = {}
    for tensor, blocks in own.items():
        for path in blocks:
            for place in path.places:
                if place.atom.pin is None:
                    axes.setdefault(place.atom, {})[Axis(tensor, place.dim)] = None
    names = _names(axes, varies_over)
    return {
        atom: Group(
            name=names[atom],
            size=atom.size,
            blocks=tuple(outer.size for outer in varies_over[atom]),
            outer=tuple(names.get(outer) for outer in varies_over[atom]),
            nesting=tuple(
                tuple(varies_over[atom].index(above) for above in varies_over.get(outer, ()))
                for outer in varies_over[atom]
            ),
            axes=tuple(axes[atom]),
        )
        for atom in axes
    }


def _names(axes: Mapping[Atom, Mapping[Axis, None]], varies_over: Mapping[Atom, list[Atom]]) -> dict[Atom, str]:
    # A group is named after the first module that outputs it: the first tensor that has it as axis 0.
    blocked = {outer for atom in axes for outer in varies_over[atom]}
    used: Counter[str] = Counter()
    names = {}
    for atom, its_axes in axes.items():
        first = next((axis for axis in its_axes if axis.dim == 0), next(iter(its_axes)))
        owner, parametrized, _ = first.tensor.partition(".parametrizations.")
        name = (owner if parametrized else owner.rpartition(".")[0]) or first.tensor
        if atom in blocked:
            name += "/blocks"
        elif varies_over[atom]:
            name += "/inner"
        used[name] += 1
        names[atom] = name if used[name] == 1 else f"{name}#{used[name]}"
    return names


def _block(path: Path, names: Mapping[Atom, str], varies_over: Mapping[Atom, list[Atom]]) -> Block:
    factors = []
    for position, place in enumerate(path.places):
        outer = tuple(path.partner(position, each) for each in varies_over.get(place.atom, ()))
        factors.append(Factor(place.atom.size, place.stride, place.dim, names.get(place.atom), outer))  # type: ignore[arg-type]
    return Block(path.offset, _merge_pinned(factors))


def _merge_pinned(factors: list[Factor]) -> tuple[Factor, ...]:
    # Merge neighbouring pinned factors, unless one of them addresses the rows of a permutation.
    needed = {place for factor in factors for place in factor.outer}
    merged: list[Factor] = []
    moved: dict[int, int] = {}
    previous_mergeable = False
    for place, factor in enumerate(factors):
        mergeable = factor.group is None and place not in needed
        if mergeable and previous_mergeable and merged[-1].stride == factor.size * factor.stride:
            merged[-1] = Factor(merged[-1].size * factor.size, factor.stride, merged[-1].dim)
        else:
            merged.append(factor)
        moved[place] = len(merged) - 1
        previous_mergeable = mergeable
    return tuple(factor._replace(outer=tuple(moved[place] for place in factor.outer)) for factor in merged)


def _pinned(
    own: Mapping[str, Sequence[Path]], originals: Mapping[str, Tensor], tied: Mapping[str, str]
) -> list[PinnedAxis]:
    found: dict[PinnedAxis, None] = {}
    for name, tensor in originals.items():
        for path in own.get(name, ()):
            for place in path.places:
                if place.atom.pin is not None:
                    found[PinnedAxis(Axis(name, place.dim), *place.atom.pin)] = None
        if name not in own and name not in tied:
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    found[PinnedAxis(Axis(name, dim), "unused" if tensor.is_floating_point() else "constant")] = None
    return list(found)
