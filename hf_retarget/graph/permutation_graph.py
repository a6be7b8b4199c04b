"""The permutation graph of a model: which axes may be permuted together, and how that acts on its tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_retarget.errors import GraphMismatchError, PermutationError, TensorMismatchError
from hf_retarget.files import write_text
from hf_retarget.graph.permutation import Axis, Block, Factor, Layout, Permutation
from hf_retarget.names import GRAPH, PERMUTATION
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

_MOST = 1 << 26  # neurons of a group, more than any model has
_FORMAT = "hf-retarget/permutation-graph/1"


@dataclass(frozen=True)
class Group:
    """All axes that share one permutation.

    `blocks` is empty for an ordinary group. For per-head or per-group freedom it contains the number of blocks
    (several numbers if blocks are nested), and `outer` names, for each of them, the group that permutes the
    blocks themselves, or None if their order is pinned.
    """

    name: str
    size: int
    blocks: tuple[int, ...] = ()
    outer: tuple[str | None, ...] = ()
    nesting: tuple[tuple[int, ...], ...] = ()
    """For each entry of `outer`: the earlier entries that address its own blocks."""
    axes: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this group's index tensor in a `Permutation`."""
        return (*self.blocks, self.size)

    def __str__(self) -> str:
        return f"{self.name} ({'×'.join(map(str, self.shape))})"


@dataclass(frozen=True)
class PinnedAxis:
    """An axis, or part of one, whose order must not change, and why."""

    axis: Axis
    reason: str
    """One of 'input', 'output', 'spatial', 'constant', 'unknown operator', 'misaligned', 'order', 'unused'."""
    where: str = ""
    """The operator and module that pinned it."""


@dataclass(frozen=True)
class UnknownOperator:
    """An operator without a rule, which pinned all axes it touched."""

    operator: str
    node: str
    module: str
    problem: str = ""
    """Why its rule, if it has one, does not cover this call."""

    def __str__(self) -> str:
        place = f"node {self.node}, {self.module}" if self.module else f"node {self.node}"
        what = f"'{self.operator}' ({place})"
        what = f"{what}: {self.problem}" if self.problem else f"No axis rule for {what}"
        return f"{what}; its axes stay pinned. See CONTRIBUTING.md to add one."


@dataclass(frozen=True)
class PermutationGraph:
    """The groups of a model and the layouts by which they act on its parameters and persistent buffers.

    Example:
        >>> import hf_retarget as rt, timm
        >>> model = timm.create_model("test_resnet")
        >>> graph = rt.trace(model)
        >>> permuted = graph.apply(graph.random(seed=0), model.state_dict())
    """

    groups: tuple[Group, ...]
    layouts: Mapping[str, Layout]
    parameters: frozenset[str] = frozenset()
    pinned: tuple[PinnedAxis, ...] = ()
    unknown_operators: tuple[UnknownOperator, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    # ------------------------------------------------------------------ looking

    def __getitem__(self, name: str) -> Group:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def _by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters and persistent buffers, tied ones under each name."""
        own = {name: layout.shape for name, layout in self.layouts.items()}
        return own | {name: own[other] for name, other in self.tied.items()}

    def share(self, free_axes: int) -> float:
        """The share of parameters that lie on at least `free_axes` free axes."""
        total = lying = 0
        for block in [block for name in self.parameters for block in self.layouts[name].blocks]:
            elements = math.prod(factor.size for factor in block.factors)
            free = {factor.dim for factor in block.factors if factor.group is not None}
            total += elements
            lying += elements if len(free) >= free_axes else 0
        return lying / total if total else 0.0

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines how permutations act; reasons and names of operators are ignored."""
        acting = {key: value for key, value in self.to_json().items() if key in ("groups", "layouts", "tied")}
        return hashlib.sha256(json.dumps(acting, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PermutationGraph) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        blocked = sum(bool(group.blocks) for group in self.groups)
        lines = [
            f"PermutationGraph({len(self.groups)} groups, {blocked} of them per block; "
            f"{self.share(1):.2%} of the parameters on a free axis, {self.share(2):.2%} on two)"
        ]
        lines += [f"  {group}: {len(group.axes)} axes" for group in self.groups[:12]]
        if len(self.groups) > 12:
            lines.append(f"  … and {len(self.groups) - 12} more")
        lines += [f"  {unknown}" for unknown in self.unknown_operators[:3]]
        return "\n".join(lines)

    # ------------------------------------------------------------------ permutations

    def identity(self) -> Permutation:
        """The permutation that moves nothing."""
        indices = {group.name: torch.arange(group.size).expand(group.shape).clone() for group in self.groups}
        return Permutation(self.fingerprint, indices)

    def random(self, seed: int) -> Permutation:
        """A permutation drawn uniformly from all that the graph allows, determined by the seed."""
        generator = torch.Generator().manual_seed(seed)
        indices = {group.name: torch.rand(group.shape, generator=generator).argsort(-1) for group in self.groups}
        return Permutation(self.fingerprint, indices)

    def apply(self, permutation: Permutation, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Permuted copies of `tensors`: weights, gradients or deltas, all or only some of them."""
        return dict(self.apply_each(permutation, tensors.items()))

    def apply_each(
        self, permutation: Permutation, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """What `apply` returns, tensor by tensor, for models that do not fit into memory twice."""
        self._own(permutation)
        for name, tensor in tensors:
            yield name, self._permute(name, tensor, permutation)

    def invert(self, permutation: Permutation) -> Permutation:
        """The permutation that undoes `permutation`."""
        self._own(permutation)
        indices = {}
        for group in self.groups:
            outer, index = self._old_positions(group, permutation.indices)
            inverse = torch.empty_like(index)
            inverse[(*outer, index)] = torch.arange(group.size).expand_as(index)
            indices[group.name] = inverse
        return Permutation(self.fingerprint, indices)

    def compose(self, first: Permutation, second: Permutation) -> Permutation:
        """The permutation that acts like `first`, followed by `second`."""
        self._own(first)
        self._own(second)
        indices = {group.name: self.compose_group(group, first.indices, second.indices) for group in self.groups}
        return Permutation(self.fingerprint, indices)

    def compose_group(self, group: Group, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
        """The index of one group in `compose`; groups that `second` lacks are not permuted by it."""
        outer, index = self._old_positions(group, second)
        return first[group.name][(*outer, index)]

    def _old_positions(self, group: Group, indices: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        # For every new position in the group: the old positions of its blocks, and of the element in them.
        grid = torch.meshgrid(*(torch.arange(size) for size in group.shape), indexing="ij")
        outer = []
        for place, name in enumerate(group.outer):
            if name is None or name not in indices:
                outer.append(grid[place])
            else:
                address = (*(grid[i] for i in group.nesting[place]), grid[place])
                outer.append(indices[name][address])
        return outer, indices.get(group.name, grid[-1])

    def _permute(self, name: str, tensor: Tensor, permutation: Permutation) -> Tensor:
        layout = self.layouts.get(self.tied.get(name, name))
        if layout is None:
            raise TensorMismatchError(
                f"'{name}' is not a parameter or persistent buffer of the traced model; "
                f"it has {len(self.layouts)} of them, the first is '{next(iter(self.layouts), None)}'"
            )
        try:
            return layout.permute(tensor, permutation.indices)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"'{name}' {error}; was it taken from another model?") from None

    def _own(self, permutation: Permutation) -> None:
        if permutation.fingerprint != self.fingerprint:
            raise GraphMismatchError(
                f"this permutation was made for graph {permutation.fingerprint[:12]}, "
                f"but it is used with graph {self.fingerprint[:12]}; trace the model it was made for"
            )
        if unknown := next((name for name in permutation.indices if name not in self._by_name), None):
            raise PermutationError(f"the permutation has a group '{unknown}' that the graph does not have")
        for group in self.groups:
            index = permutation.indices.get(group.name)
            if index is None or tuple(index.shape) != group.shape:
                found = "is missing" if index is None else f"has shape {list(index.shape)}"
                raise PermutationError(f"the index of group '{group.name}' {found}; expected {list(group.shape)}")
            if index.is_floating_point() or not bool((index.sort(-1).values == torch.arange(group.size)).all()):
                raise PermutationError(
                    f"the index of group '{group.name}' is not a permutation of 0 … {group.size - 1}"
                )

    # ------------------------------------------------------------------ files

    def to_json(self) -> dict[str, Any]:
        """Convert the graph to JSON values."""
        return {
            "format": _FORMAT,
            "groups": [asdict(group) for group in self.groups],
            "layouts": dict(self.layouts),
            "parameters": sorted(self.parameters),
            "pinned": [asdict(pinned) for pinned in self.pinned],
            "unknown_operators": [asdict(unknown) for unknown in self.unknown_operators],
            "tied": dict(self.tied),
        }

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        write_text(path, json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PermutationGraph:
        """Read what `save` wrote."""
        try:
            document = read_json(path, MAX_DOCUMENT_BYTES)
        except (OSError, ValueError) as error:
            raise PermutationError(f"cannot read a permutation graph from '{path}': {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise PermutationError(f'\'{path}\' is not a permutation graph (no "format": "{_FORMAT}")')
        try:
            graph = TypeAdapter(cls).validate_json(json.dumps(document), strict=True)
            if len(document) <= len(fields(cls)):  # fields with defaults may not be missing, either
                raise ValueError("a part is missing")
            graph._check_sizes()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise PermutationError(f"'{path}' is damaged: {first['msg']} (in '{where}')") from error
        except ValueError as error:
            raise PermutationError(f"'{path}' is damaged: {error}") from error
        return graph

    def _check_sizes(self) -> None:
        """Raise ValueError for errors that would otherwise only show when the graph is used."""
        named = {axis.tensor for group in self.groups for axis in group.axes} | self.parameters | {*self.tied.values()}
        if unknown := named - self.layouts.keys():
            raise ValueError(f"it has no layout of '{min(unknown)}'")
        known = {None, *self._by_name}
        for group in self.groups:
            if not known.issuperset(group.outer) or min(group.shape) < 1 or math.prod(group.shape) > _MOST:
                raise ValueError(f"group '{group.name}' has impossible sizes")
        for name, layout in self.layouts.items():
            size = math.prod(layout.shape)
            for offset, factors in layout.blocks:
                numbers = (offset, *layout.shape, *(number for factor in factors for number in factor[:3]))
                last = offset + sum((factor.size - 1) * factor.stride for factor in factors)
                if min(numbers) < 0 or last >= size or not all(self._fits(factor, factors) for factor in factors):
                    raise ValueError(f"the layout of '{name}' is impossible")

    def _fits(self, factor: Factor, factors: tuple[Factor, ...]) -> bool:
        """Whether a factor has the sizes of its group."""
        group = self._by_name.get(factor.group or "")
        if factor.group is None or group is None or not all(0 <= each < len(factors) for each in factor.outer):
            return factor.group is None and not factor.outer
        return group.shape == (*(factors[each].size for each in factor.outer), factor.size)


# ---- tables that must not be permuted


def pin_tables(graph: PermutationGraph, model: nn.Module) -> tuple[PermutationGraph, tuple[str, ...]]:
    """Pin the groups that act on fixed tables of the model; return the graph and the names of these groups."""
    held = find_tables(graph, model)
    return pin_groups(graph, held) if held else graph, held


def find_tables(graph: PermutationGraph, model: nn.Module) -> tuple[str, ...]:
    """The groups that act on a fixed table, such as the periods of rotary embeddings.

    A ported model has the new base's tables, so the delta must keep their order. BatchNorm statistics do not count, as
    they are re-estimated, nor do uniform buffers.
    """
    statistics = {
        f"{where}.{name}" if where else name
        for where, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_buffers(recurse=False)
    }
    found: set[str] = set()
    for name, buffer in model.named_buffers():
        fixed = buffer.is_floating_point() and name not in statistics and name in graph.layouts
        if fixed and bool((buffer != buffer.flatten()[:1]).any()):
            found |= {factor.group for block in graph.layouts[name].blocks for factor in block.factors if factor.group}
    return tuple(group.name for group in graph.groups if group.name in found)


def pin_groups(graph: PermutationGraph, names: Collection[str]) -> PermutationGraph:
    """The same graph with some groups pinned; the inner groups of blocks that they permuted are kept."""
    pinned = [
        PinnedAxis(axis, "constant", "a table that the new base keeps")
        for group in graph.groups
        if group.name in names
        for axis in group.axes
    ]
    groups = tuple(
        replace(group, outer=tuple(None if each in names else each for each in group.outer))
        for group in graph.groups
        if group.name not in names
    )

    def still(factor: Factor) -> Factor:
        return factor._replace(group=None, outer=()) if factor.group in names else factor

    layouts = {
        name: Layout(layout.shape, tuple(Block(offset, tuple(map(still, each))) for offset, each in layout.blocks))
        for name, layout in graph.layouts.items()
    }
    return replace(graph, groups=groups, layouts=layouts, pinned=(*graph.pinned, *pinned))


# ---- reusing permutations


def load_permutation(path: str | Path, graph: PermutationGraph) -> Permutation:
    """Read a permutation for a graph, from a file or the folder of a port; the number of classes may differ.

    A permutation of another graph is returned unchanged: applying it raises an error.
    """
    path = Path(path)
    if path.is_dir():
        path /= PERMUTATION
        if not path.is_file():
            raise PermutationError(
                f"'{path.parent}' has no permutation; give a port that matched (as --method fgmt does)"
            )
    permutation = Permutation.load(path)
    beside = path.with_name(GRAPH)
    if permutation.fingerprint != graph.fingerprint and beside.is_file():
        made_for = PermutationGraph.load(beside)
        if made_for.fingerprint == permutation.fingerprint and _act_alike(made_for, graph):
            return Permutation(graph.fingerprint, permutation.indices)
    return permutation


def _act_alike(one: PermutationGraph, other: PermutationGraph) -> bool:
    """Whether permutations act alike in two graphs: equal groups, and layouts that differ only in pinned sizes."""
    if one.groups != other.groups or one.tied != other.tied or one.layouts.keys() != other.layouts.keys():
        return False
    pairs = [(layout, other.layouts[name]) for name, layout in one.layouts.items()]
    return all(ours == theirs or _permuted_parts(ours) == _permuted_parts(theirs) for ours, theirs in pairs)


def _permuted_parts(layout: Layout) -> list[Any]:
    # A factor's stride may depend on the size of a pinned factor behind it; what it permutes does not.
    return [
        (
            np.unravel_index(block.offset, layout.shape),
            [(each.dim, each.group, each.outer, each.size if each.group else None) for each in block.factors],
        )
        for block in layout.blocks
    ]
