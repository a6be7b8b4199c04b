"""What is maximised: Σ ⟨target, π source⟩ over all tensors and steps, kept as two stacks.

The steps of a trajectory are one more axis that is never permuted, like the axes of a kernel. So each block of a tensor
is kept as a *piece*: its groups' axes first, and all the rest (kernel × steps) as one last axis. That last axis may be
rotated freely, because both sides share it: compression keeps the directions that carry the energy. What is lost is
orthogonal to what is kept, so for any permutation the objective is off by at most ‖a⊥‖·‖b⊥‖; `bound` adds these up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.graph.permutation import Block, Factor
from hf_retarget.graph.permutation_graph import PermutationGraph

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Compression:
    """How much of the last axis of a piece is kept.

    `energy` is the share of the squared norm to keep, `sizes` the most that one side of the stacks may hold, in
    multiples of the model.
    """

    energy: float = 0.999
    sizes: float = 1.0


@dataclass
class Piece:
    """One block of one tensor: both sides as `[groups' axes …, rest]`, in parts until the whole is needed."""

    tensor: str
    factors: tuple[Factor, ...]
    each: int
    """The length that one step adds to the last axis."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    bound: float = 0.0
    grams: tuple[Tensor, ...] | None = None
    """Gram matrices of the first part along the last axis, one for each side: known once it was compressed."""

    @property
    def target(self) -> Tensor:
        """The target's side."""
        return _whole(self.targets)

    @property
    def source(self) -> Tensor:
        """The source's side."""
        return _whole(self.sources)

    @property
    def elements(self) -> int:
        """How many numbers both sides hold."""
        return sum(part.numel() for part in (*self.targets, *self.sources))

    @property
    def groups(self) -> set[str]:
        """The groups whose axes this piece has."""
        return {factor.group for factor in self.factors if factor.group is not None}

    def positions(self, group: str) -> list[int]:
        """Where the axes of `group` are."""
        return [i for i, factor in enumerate(self.factors) if factor.group == group]

    def compressed(self, how: Compression) -> Piece:
        """The same piece with its last axis turned to its principal directions, of which the leading ones are kept."""
        spectrum = self._spectrum()
        rank = int(min(spectrum.enough(how.energy), max(1.0, how.sizes * self.each)))
        if rank == len(spectrum.values):
            return replace(self, grams=spectrum.grams)
        turn = spectrum.vectors[:, :rank]
        ours, theirs = (_turned(parts, turn) for parts in (self.targets, self.sources))
        grams = turn.T @ spectrum.grams[0] @ turn, turn.T @ spectrum.grams[1] @ turn
        bound = self.bound + spectrum.lost(rank)
        return Piece(self.tensor, self.factors, self.each, [ours], [theirs], bound, grams)

    def _spectrum(self) -> _Spectrum:
        known = self.grams or (None, None)
        grams = _gram(self.targets, known[0]), _gram(self.sources, known[1])
        scaled = [gram / trace if (trace := float(gram.trace())) else gram for gram in grams]
        values, vectors = torch.linalg.eigh(scaled[0] + scaled[1])
        return _Spectrum(values.flip(0).clamp(min=0), vectors.flip(1), grams)


def _whole(parts: list[Tensor]) -> Tensor:
    if len(parts) > 1:
        parts[:] = [torch.cat(parts, -1)]
    return parts[0]


class _Spectrum(NamedTuple):
    """The principal directions of both sides together, each side scaled to norm one."""

    values: Tensor
    vectors: Tensor
    grams: tuple[Tensor, Tensor]

    def enough(self, energy: float) -> int:
        """How many of the leading directions carry this share of the energy."""
        return min(int((self.values.cumsum(0) < energy * float(self.values.sum())).sum()) + 1, len(self.values))

    def lost(self, rank: int) -> float:
        """‖a⊥‖·‖b⊥‖ when `rank` directions are kept, rounded up by what single precision leaves open."""
        rest = self.vectors[:, rank:]
        energies = [float(((gram @ rest) * rest).sum()) + 1e-7 * float(gram.trace()) for gram in self.grams]
        return math.sqrt(max(energies[0], 0.0) * max(energies[1], 0.0))


def _gram(parts: list[Tensor], known: Tensor | None) -> Tensor:
    # Of the parts as one, along the last axis; `known` is that of the first part, if it was computed before.
    flat = [part.flatten(0, -2) for part in parts]
    if known is None or len(known) != flat[0].shape[1]:
        known = (flat[0].T @ flat[0]).double()
    if len(flat) == 1:
        return known
    new = torch.cat(flat[1:], 1)
    cross, corner = (new.T @ flat[0]).T.double(), (new.T @ new).double()  # the short side first: four times faster
    return torch.cat([torch.cat([known, cross], 1), torch.cat([cross.T, corner], 1)])


def _turned(parts: list[Tensor], turn: Tensor) -> Tensor:
    # The parts as one, with another basis of the last axis.
    rows = turn.to(parts[0].dtype).split([part.shape[-1] for part in parts])
    result: Tensor = parts[0].flatten(0, -2) @ rows[0]
    for part, row in zip(parts[1:], rows[1:], strict=True):
        result.addmm_(part.flatten(0, -2), row)
    return result.view(*parts[0].shape[:-1], -1)


@dataclass
class Stacks:
    """Pairs of tensors, step after step, and the objective over them."""

    graph: PermutationGraph
    compression: Compression | None = None
    normalise: bool = False
    steps: int = 0
    constant: float = 0.0
    """The part of the objective that no permutation changes."""
    pieces: dict[tuple[str, int], Piece] = field(default_factory=dict)

    def add(self, target: Tensors, source: Tensors) -> None:
        """Add one pair: gradients, weights or deltas of the target and the source.

        Tensors that only one side has are an error; those that neither has (frozen parameters) do not count, and
        neither do whole numbers (BatchNorm's count of minibatches).
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
        piece.targets.append(ours)
        piece.sources.append(theirs)
        if self.compression is not None and len(piece.targets) > 1:
            self.pieces[name, number] = piece.compressed(self.compression)

    def compressed(self, how: Compression) -> Stacks:
        """These stacks with fewer directions: what a first, coarse descent sees."""
        pieces = {key: piece.compressed(how) for key, piece in self.pieces.items()}
        return Stacks(self.graph, how, self.normalise, self.steps, self.constant, pieces)

    def factors(self, name: str, number: int) -> tuple[Factor, ...]:
        """The axes of the piece that a block of a tensor makes."""
        return _factors(self.graph.layouts[self.graph.tied.get(name, name)].blocks[number])

    @property
    def bound(self) -> float:
        """By how much compression may have changed the objective, whatever the permutation."""
        return sum(piece.bound for piece in self.pieces.values())

    @property
    def elements(self) -> int:
        """How many numbers both stacks hold."""
        return sum(piece.elements for piece in self.pieces.values())

    def weights(self) -> dict[str, float]:
        """The weight of each tensor in the objective: one, or what makes all tensors count alike."""
        names = {piece.tensor for piece in self.pieces.values()}
        if not self.normalise:
            return dict.fromkeys(names, 1.0)
        norms = dict.fromkeys(names, (0.0, 0.0))
        for piece in self.pieces.values():
            a, b = norms[piece.tensor]
            norms[piece.tensor] = (a + float(piece.target.square().sum()), b + float(piece.source.square().sum()))
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
    # What stays an axis of a piece: groups, and pinned blocks that address the rows of a group.
    needed = {place for factor in block.factors for place in factor.outer}
    return [place for place, factor in enumerate(block.factors) if factor.group is not None or place in needed]


def _factors(block: Block) -> tuple[Factor, ...]:
    moved = {place: i for i, place in enumerate(_kept(block))}
    kept = [block.factors[place] for place in moved]
    return tuple(factor._replace(outer=tuple(moved[place] for place in factor.outer)) for factor in kept)


def _arrange(block: Block, tensor: Tensor) -> Tensor:
    view = block.view(tensor.detach().clone().float().contiguous())  # a copy, as the caller may change the original
    kept = _kept(block)
    rest = [place for place in range(view.dim()) if place not in kept]
    sizes = [view.shape[place] for place in kept]
    return view.permute([*kept, *rest]).reshape(*sizes, prod(view.shape[place] for place in rest))
