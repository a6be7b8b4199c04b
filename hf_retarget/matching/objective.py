"""What is maximised: Σ ⟨target, π source⟩ over all tensors and steps, kept as two stacks.

The steps of a trajectory are one more axis that nothing permutes, like the axes of a kernel. So each block of a tensor
is kept as a *piece*: its groups' axes first, and all the rest (kernel × steps) as one last axis. That last axis may be
rotated freely, because both sides share it: compression keeps the directions that carry the energy. What is lost
is orthogonal to what is kept, so whatever the permutation, the objective is off by at most ‖a⊥‖·‖b⊥‖; `bound` adds
these up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.graph.layout import Block, Factor
from hf_retarget.graph.permutation_graph import PermutationGraph

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Compression:
    """How much of the last axis of a piece is kept.

    `energy` is the share of the squared norm to keep, `sizes` the most that one side of the stacks may hold, in
    multiples of the model.
    """

    energy: float = 0.999
    sizes: float = 2.5


@dataclass
class Piece:
    """One block of one tensor: both sides as `[groups' axes …, rest]`."""

    tensor: str
    factors: tuple[Factor, ...]
    target: Tensor
    source: Tensor
    each: int
    """The length that one step adds to the last axis."""
    bound: float = 0.0

    @property
    def groups(self) -> set[str]:
        """The groups whose axes this piece has."""
        return {factor.group for factor in self.factors if factor.group is not None}

    def positions(self, group: str) -> list[int]:
        """Where the axes of `group` are."""
        return [i for i, factor in enumerate(self.factors) if factor.group == group]


@dataclass
class Stacks:
    """Pairs of tensors, step after step, and the objective over them.

    Example:
        >>> stacks = Stacks(graph)                                 # doctest: +SKIP
        >>> stacks.add(target_gradient, source_gradient)           # doctest: +SKIP
        >>> stacks.objective()                                     # doctest: +SKIP
    """

    graph: PermutationGraph
    compression: Compression | None = None
    normalise: bool = False
    steps: int = 0
    constant: float = 0.0
    """The part of the objective that no permutation changes."""
    pieces: dict[tuple[str, int], Piece] = field(default_factory=dict)

    def add(self, target: Tensors, source: Tensors, weight: float = 1.0) -> None:
        """Add one pair: gradients, weights or deltas of the target and the source.

        Tensors that only one side has are an error; those that neither has (frozen parameters) do not count.
        """
        if missing := sorted(set(target) ^ set(source)):
            side = "target" if missing[0] in source else "source"
            raise MatchError(f"'{missing[0]}' is missing on the {side} side ({len(missing)} such tensors)")
        scale = abs(weight) ** 0.5
        sign = -1.0 if weight < 0 else 1.0
        for name, ours in target.items():
            theirs = source[name]
            layout = self.graph.layouts.get(self.graph.tied.get(name, name))
            if layout is None:
                raise TensorMismatchError(f"'{name}' is not a tensor of the traced model")
            for side, tensor in (("target", ours), ("source", theirs)):
                _valid(name, side, tensor, layout.shape)
            for number, block in enumerate(layout.blocks):
                self._extend(name, number, block, ours * (sign * scale), theirs * scale)
        self.steps += 1

    def _extend(self, name: str, number: int, block: Block, target: Tensor, source: Tensor) -> None:
        ours, theirs = (_arrange(block, tensor) for tensor in (target, source))
        factors = _factors(block)
        if not any(factor.group for factor in factors):
            self.constant += float(ours.double().flatten() @ theirs.double().flatten())
            return
        piece = self.pieces.get((name, number))
        if piece is None:
            self.pieces[name, number] = Piece(name, factors, ours.clone(), theirs.clone(), ours.shape[-1])
            return
        piece.target = torch.cat([piece.target, ours], -1)
        piece.source = torch.cat([piece.source, theirs], -1)
        if self.compression is not None:
            compress(piece, self.compression)

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
        return sum(piece.target.numel() + piece.source.numel() for piece in self.pieces.values())

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
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
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
    view = block.view(tensor.detach().float().contiguous())
    kept = _kept(block)
    rest = [place for place in range(view.dim()) if place not in kept]
    sizes = [view.shape[place] for place in kept]
    return view.permute(*kept, *rest).reshape(*sizes, prod(view.shape[place] for place in rest))


def compress(piece: Piece, how: Compression) -> None:
    """Rotate the last axis of a piece to its principal directions and keep the leading ones."""
    ours, theirs = piece.target.flatten(0, -2), piece.source.flatten(0, -2)
    most = max(1, int(how.sizes * piece.each))
    energies, grams = [], []
    for side in (ours, theirs):
        gram = (side.T @ side).double()
        energies.append(float(gram.diagonal().sum()))
        grams.append(gram / energies[-1] if energies[-1] else gram)
    values, vectors = torch.linalg.eigh(grams[0] + grams[1])
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    total = float(values.sum())
    if not total:
        return
    enough = int((values.cumsum(0) < how.energy * total).sum()) + 1
    rank = min(enough, most, len(values))
    if rank == len(values):
        return
    basis = vectors[:, :rank].to(ours.dtype)
    sizes = piece.target.shape[:-1]
    piece.target, piece.source = (ours @ basis).reshape(*sizes, rank), (theirs @ basis).reshape(*sizes, rank)
    lost = [
        max(energy - float(kept.double().square().sum()), 0.0)
        for energy, kept in zip(energies, (piece.target, piece.source), strict=True)
    ]
    piece.bound += (lost[0] * lost[1]) ** 0.5
