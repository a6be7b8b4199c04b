"""The objective: Σ ⟨target, π source⟩ over all tensors and steps, stored as two stacks.

The steps of a trajectory are another axis that is never permuted, like the axes of a kernel. So each block of a tensor
is stored as a *piece*: its groups' axes first, and everything else (kernel × steps) as one last axis. As both sides
share that axis, it may be rotated freely: compression keeps the directions with the most energy. What is lost is
orthogonal to what is kept, so for any permutation the objective is off by at most ‖a⊥‖·‖b⊥‖.

Where a single group acts on a piece, its inner products are those of pairs of neurons, whatever the other groups do.
If they take less room than some steps, they are added up instead: exact, and of the same size for any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.graph.permutation import Block, Factor
from hf_retarget.graph.permutation_graph import PermutationGraph

Tensors = Mapping[str, Tensor]

_PAIRS = 4
"""Inner products of pairs of neurons may take as much memory as this many pairs of gradients."""


@dataclass(frozen=True)
class Compression:
    """How much of the last axis of a piece to keep.

    `energy` is the share of the squared norm, `sizes` the maximum size of one side of the stacks, in multiples of the
    model.
    """

    energy: float = 0.999
    sizes: float = 1.0


@dataclass
class Piece:
    """A block of a tensor: both sides as `[groups' axes …, rest]`, in parts that are concatenated on demand."""

    tensor: str
    factors: tuple[Factor, ...]
    each: int
    """The length of the last axis per step."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    products: Tensor | None = None
    """The inner products of all pairs of neurons, in place of both sides, which are then only their numbers."""
    squares: tuple[float, float] = (0.0, 0.0)
    """The squared norms of both sides, if there are products."""

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add both sides of a step."""
        size = len(target)
        if not self.targets and len(self.factors) == 1 and size <= 2 * _PAIRS * self.each:
            self.products = torch.zeros(size, size)
            self.targets, self.sources = [torch.arange(size)], [torch.arange(size)]
        if self.products is None:
            self.targets.append(target)
            self.sources.append(source)
            return
        self.products.addmm_(target, source.T)
        ours, theirs = self.squares
        self.squares = ours + float(target.norm()) ** 2, theirs + float(source.norm()) ** 2

    @property
    def norms(self) -> tuple[float, float]:
        """The norms of both sides."""
        if self.products is not None:
            return math.sqrt(self.squares[0]), math.sqrt(self.squares[1])
        return float(self.target.norm()), float(self.source.norm())

    def value(self, source: Tensor) -> float:
        """The contribution to the objective if `source` is the permuted source."""
        if self.products is not None:
            return float(self.products.gather(1, source[:, None]).double().sum())
        return float(torch.dot(self.target.flatten(), source.flatten()))

    @property
    def target(self) -> Tensor:
        """The target's side."""
        return _whole(self.targets)

    @property
    def source(self) -> Tensor:
        """The source's side."""
        return _whole(self.sources)

    def take_source(self) -> Tensor:
        """Take the source's side out of the piece, until it is put back."""
        source, self.sources = self.source, []
        return source

    @property
    def elements(self) -> int:
        """The number of elements of both sides."""
        parts = (*self.targets, *self.sources) if self.products is None else (self.products,)
        return sum(part.numel() for part in parts)

    @property
    def groups(self) -> set[str]:
        """The groups of this piece's axes."""
        return {factor.group for factor in self.factors if factor.group is not None}

    def positions(self, group: str) -> list[int]:
        """The positions of the axes of `group`."""
        return [i for i, factor in enumerate(self.factors) if factor.group == group]

    def compressed(self, how: Compression) -> Piece:
        """A copy with the last axis reduced to its leading principal directions."""
        values, vectors = torch.linalg.eigh(_gram(self.target) + _gram(self.source))
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        enough = int((values.cumsum(0) < how.energy * float(values.sum())).sum()) + 1
        rank = int(min(enough, max(1.0, how.sizes * self.each), len(values)))
        if rank == len(values):
            return self
        turn = vectors[:, :rank].to(self.target.dtype)
        return replace(self, targets=[self.target @ turn], sources=[self.source @ turn])


def _whole(parts: list[Tensor]) -> Tensor:
    if len(parts) > 1:
        parts[:] = [torch.cat(parts, -1)]
    return parts[0]


def _gram(side: Tensor) -> Tensor:
    # Of the last axis, scaled so that both sides have the same weight.
    flat = side.flatten(0, -2)
    gram = (flat.T @ flat).double()
    return gram / trace if (trace := float(gram.trace())) else gram


@dataclass
class Stacks:
    """Pairs of tensors of all steps, and the objective over them."""

    graph: PermutationGraph
    compression: Compression | None = None
    normalise: bool = False
    steps: int = 0
    constant: float = 0.0
    """The part of the objective that does not depend on the permutation."""
    pieces: dict[tuple[str, int], Piece] = field(default_factory=dict)

    def add(self, target: Tensors, source: Tensors) -> None:
        """Add a pair of gradients, weights or deltas of the target and the source.

        Both sides must have the same tensors. Missing tensors (frozen parameters) and integers (BatchNorm's counters)
        do not contribute.
        """
        if missing := sorted(set(target) ^ set(source)):
            side = "target" if missing[0] in source else "source"
            raise MatchError(f"'{missing[0]}' is missing on the {side} side ({len(missing)} such tensors)")
        for name, ours in target.items():
            theirs = source[name]
            layout = self.graph.layouts.get(self.graph.tied.get(name, name))
            if layout is None:
                raise TensorMismatchError(f"'{name}' is not a tensor of the traced model")
            for side, tensor in (("target", ours), ("source", theirs)):
                _valid(name, side, tensor, layout.shape)
            for number, block in enumerate(layout.blocks if ours.is_floating_point() else ()):
                self._extend(name, number, block, ours, theirs)
        self.steps += 1

    def _extend(self, name: str, number: int, block: Block, target: Tensor, source: Tensor) -> None:
        ours, theirs = (_arrange(block, tensor) for tensor in (target, source))
        factors = _factors(block)
        if not any(factor.group for factor in factors):
            self.constant += float(ours.double().flatten() @ theirs.double().flatten())
            return
        piece = self.pieces.setdefault((name, number), Piece(name, factors, ours.shape[-1]))
        piece.add(ours, theirs)
        if self.compression is not None and len(piece.targets) > 1:
            self.pieces[name, number] = piece.compressed(self.compression)

    def factors(self, name: str, number: int) -> tuple[Factor, ...]:
        """The axes of the piece made from a block of a tensor."""
        return _factors(self.graph.layouts[self.graph.tied.get(name, name)].blocks[number])

    @property
    def elements(self) -> int:
        """The number of elements of both stacks."""
        return sum(piece.elements for piece in self.pieces.values())

    def weights(self) -> dict[str, float]:
        """The weight of each tensor in the objective: one, or the inverse of its norms if normalised."""
        names = {piece.tensor for piece in self.pieces.values()}
        if not self.normalise:
            return dict.fromkeys(names, 1.0)
        norms = dict.fromkeys(names, (0.0, 0.0))
        for piece in self.pieces.values():
            (a, b), (ours, theirs) = norms[piece.tensor], piece.norms
            norms[piece.tensor] = (a + ours**2, b + theirs**2)
        return {name: 1.0 / ((a * b) ** 0.5) if a and b else 0.0 for name, (a, b) in norms.items()}


def _valid(name: str, side: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise TensorMismatchError(
            f"'{name}' of the {side} has shape {list(tensor.shape)}, the graph expects {list(shape)}"
        )
    if math.isfinite(float(tensor.sum())):  # one pass; NaN and infinity survive a sum
        return
    if bad := int((~torch.isfinite(tensor)).sum()):  # or only the sum was too large
        raise MatchError(
            f"'{name}' of the {side} has {bad} values that are NaN or infinite; "
            "check the weights it was computed with, or use a higher precision"
        )


def _kept(block: Block) -> list[int]:
    # The axes of a piece: groups, and pinned blocks that address the rows of a group.
    needed = {place for factor in block.factors for place in factor.outer}
    return [place for place, factor in enumerate(block.factors) if factor.group is not None or place in needed]


def _factors(block: Block) -> tuple[Factor, ...]:
    moved = {place: i for i, place in enumerate(_kept(block))}
    kept = [block.factors[place] for place in moved]
    return tuple(factor._replace(outer=tuple(moved[place] for place in factor.outer)) for factor in kept)


def _arrange(block: Block, tensor: Tensor) -> Tensor:
    view = block.view(tensor.detach().contiguous())
    kept = _kept(block)
    rest = [place for place in range(view.dim()) if place not in kept]
    sizes = [view.shape[place] for place in kept]
    # A copy of nothing but the block, as the caller may change the original.
    own = view.permute([*kept, *rest]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return own.reshape(*sizes, prod(view.shape[place] for place in rest))
