"""Turns the axes a walk has found into named groups and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from hf_retarget.graph.axes import Atom
from hf_retarget.graph.call import Shape
from hf_retarget.graph.families import Path, outers, paths
from hf_retarget.graph.layout import Axis, Block, Factor, Layout
from hf_retarget.graph.permutation_graph import Group, PermutationGraph, PinnedAxis, UnknownOperator


def assemble(
    state: Mapping[str, Shape],
    held: Sequence[Shape],
    unknown: Sequence[UnknownOperator],
    originals: Mapping[str, Tensor],
    parameters: frozenset[str],
    tied: Mapping[str, str],
) -> PermutationGraph:
    """The permutation graph of a finished walk.

    `state` has the axes of the model's own tensors, `held` those of all tensors that count, `originals` the state dict.
    """
    own = {name: list(paths(state[name])) for name in originals if name in state}
    everything = [path for shape in held for path in paths(shape)]
    varies_over = outers([path for each in own.values() for path in each], everything)
    groups = _groups(own, varies_over)
    names = {atom: group.name for atom, group in groups.items()}
    layouts = {
        name: Layout(
            tuple(tensor.shape),
            tuple(_block(path, names, varies_over) for path in own[name]) if name in own else (_unused(tensor),),
        )
        for name, tensor in originals.items()
        if name not in tied
    }
    return PermutationGraph(
        groups=tuple(groups.values()),
        layouts=layouts,
        parameters=parameters,
        pinned=tuple(_pinned(own, originals, tied)),
        unknown_operators=tuple(unknown),
        tied=dict(tied),
    )


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
    # A group is named after the first module that writes to it: the first tensor that has it as axis 0.
    blocked = {outer for atom in axes for outer in varies_over[atom]}
    used: Counter[str] = Counter()
    names = {}
    for atom, its_axes in axes.items():
        first = next((axis for axis in its_axes if axis.dim == 0), next(iter(its_axes)))
        name = _module(first.tensor)
        if atom in blocked:
            name += "/blocks"
        elif varies_over[atom]:
            name += "/inner"
        used[name] += 1
        names[atom] = name if used[name] == 1 else f"{name}#{used[name]}"
    return names


def _module(tensor: str) -> str:
    owner = (
        tensor.partition(".parametrizations.")[0].rpartition(".")[0]
        if ".parametrizations." not in tensor
        else (tensor.partition(".parametrizations.")[0])
    )
    return owner or tensor


def _block(path: Path, names: Mapping[Atom, str], varies_over: Mapping[Atom, list[Atom]]) -> Block:
    factors = []
    for position, place in enumerate(path.places):
        outer = tuple(path.partner(position, each) for each in varies_over.get(place.atom, ()))
        factors.append(Factor(place.atom.size, place.stride, place.dim, names.get(place.atom), outer))  # type: ignore[arg-type]
    return Block(path.offset, _merge_pinned(factors))


def _merge_pinned(factors: list[Factor]) -> tuple[Factor, ...]:
    # Neighbouring pinned factors need not be told apart, unless one of them says which row of a permutation applies.
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


def _unused(tensor: Tensor) -> Block:
    return Block(0, (Factor(tensor.numel(), 1, 0),) if tensor.numel() > 1 else ())


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
