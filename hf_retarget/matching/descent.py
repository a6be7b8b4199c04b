"""Coordinate descent over groups: one exact assignment at a time, until no group can improve the objective.

The source side is kept *as permuted so far*. A step asks for a permutation relative to that, so building its matrix
of gains is one product for each piece, without looking anything up; only a step that moves something permutes the
pieces it touches. A group is looked at again only after a group it shares a piece with has moved.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_retarget.graph.layout import gather
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import Group, PermutationGraph
from hf_retarget.matching.assignment import assign, assign_nested, assign_rows
from hf_retarget.matching.objective import Piece, Stacks

_ROOM = 1 << 30
"""Bytes for products that are kept until a neighbour moves."""

Moves = dict[str, Tensor]
"""Permutations relative to the current one, of some groups."""


@dataclass(frozen=True)
class Sweep:
    """One pass over all groups that were due."""

    objective: float
    solved: int
    moved: int


@dataclass(frozen=True)
class Match:
    """A permutation, the objective it reaches, and how it was found."""

    permutation: Permutation
    objective: float
    sweeps: tuple[Sweep, ...]


@dataclass(frozen=True)
class Unit:
    """What is solved in one step: a group, or blocks together with some of their inner groups."""

    group: Group
    inners: tuple[Group, ...] = ()

    @property
    def names(self) -> set[str]:
        """All groups that the step may move."""
        return {self.group.name, *(inner.name for inner in self.inners)}


def descend(
    stacks: Stacks,
    start: Permutation | None = None,
    *,
    seed: int = 0,
    restarts: int = 1,
    max_sweeps: int = 100,
    tolerance: float = 1e-7,
) -> Match:
    """Find a permutation that maximises the objective, starting from `start` (or the identity).

    Groups are visited in a seeded random order; of several `restarts`, with other orders, the best is kept. A sweep
    that gains less than `tolerance` of the objective's scale is the last.

    Example:
        >>> match = descend(stacks, seed=0)                      # doctest: +SKIP
        >>> ported = graph.apply(match.permutation, delta)       # doctest: +SKIP
    """
    graph = stacks.graph
    start = graph.identity() if start is None else start
    runs = [_Descent(stacks, start, seed + run).run(max_sweeps, tolerance) for run in range(restarts)]
    return max(runs, key=lambda match: match.objective)


class _Descent:
    """The state of one descent: the current permutation and the source as it is permuted by it."""

    def __init__(self, stacks: Stacks, start: Permutation, seed: int) -> None:
        self.graph = stacks.graph
        self.indices = dict(start.indices)
        self.generator = np.random.default_rng(seed)
        self.weights = stacks.weights()
        self.constant = stacks.constant
        self.pieces = list(stacks.pieces.values())
        moved = {name: index for name, index in start.indices.items() if not _is_identity(index)}
        self.source = [_permuted(piece, piece.source, moved) for piece in self.pieces]
        self.units = units(self.graph, self.pieces)
        self.known: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in self.pieces]
        self.room = _ROOM
        self.touching: dict[str, list[int]] = {group.name: [] for group in self.graph.groups}
        for number, piece in enumerate(self.pieces):
            for name in piece.groups:
                self.touching[name].append(number)

    def run(self, max_sweeps: int, tolerance: float) -> Match:
        """Sweep until nothing is due, or too little is gained."""
        self._warn_of_zeros()
        due = set(range(len(self.units)))
        objective = self.objective()
        scale = self._scale()
        sweeps: list[Sweep] = []
        while due and len(sweeps) < max_sweeps:
            order = [int(number) for number in self.generator.permutation(len(self.units)) if number in due]
            before, moved = objective, 0
            for number in order:
                due.discard(number)
                moves, gain = self._solve(self.units[number], scale)
                if moves:
                    moved += 1
                    objective += gain
                    settled = not any(self._twice(name) for name in moves)  # a quadratic step may go on
                    due |= self._apply(moves) - ({number} if settled else set())
            sweeps.append(Sweep(objective, len(order), moved))
            if objective - before <= tolerance * scale:
                break
        permutation = Permutation(self.graph.fingerprint, self.indices)
        return Match(permutation, self.objective(), tuple(sweeps))

    # ------------------------------------------------------------------ the objective

    def objective(self) -> float:
        """⟨target, π source⟩ as it is now."""
        return self.constant + sum(self._value(number) for number in range(len(self.pieces)))

    def _value(self, number: int) -> float:
        piece = self.pieces[number]
        product = torch.dot(piece.target.flatten(), self.source[number].flatten())
        return self.weights[piece.tensor] * float(product)

    def _scale(self) -> float:
        # What the objective would be if every piece were matched perfectly.
        return sum(
            self.weights[piece.tensor] * float(piece.target.norm()) * float(piece.source.norm())
            for piece in self.pieces
        )

    def _warn_of_zeros(self) -> None:
        dead = [
            name
            for name, numbers in self.touching.items()
            if not any(bool(self.pieces[n].target.any()) and bool(self.pieces[n].source.any()) for n in numbers)
        ]
        if dead:
            listed = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
            warnings.warn(f"nothing to match in {listed}: all zero or absent; the identity is kept", stacklevel=4)

    # ------------------------------------------------------------------ one step

    def _solve(self, unit: Unit, scale: float) -> tuple[Moves, float]:
        if unit.inners:
            moves, gain = self._solve_nested(unit)
        else:
            moves, gain = self._solve_one(unit.group)
        moves = {name: index for name, index in moves.items() if not _is_identity(index)}
        if moves and any(self._twice(name) for name in moves):
            gain = self._true_gain(moves)
        return (moves, gain) if gain > 1e-9 * scale else ({}, 0.0)  # less could be made by rounding

    def _solve_one(self, group: Group) -> tuple[Moves, float]:
        gains = np.zeros((*group.blocks, group.size, group.size), np.float64)
        for number in self.touching[group.name]:
            piece = self.pieces[number]
            for position in piece.positions(group.name):
                outer = piece.factors[position].outer
                gains += self._gains(number, outer, (position,)).reshape(gains.shape)
        index, best = assign(gains) if not group.blocks else assign_rows(gains)
        return {group.name: torch.from_numpy(index)}, best - _stay(gains)

    def _solve_nested(self, unit: Unit) -> tuple[Moves, float]:
        blocks = unit.group.size
        outer = np.zeros((blocks, blocks))
        inners = {inner.name: np.zeros((blocks, blocks, inner.size, inner.size)) for inner in unit.inners}
        for number in self.touching[unit.group.name]:
            piece = self.pieces[number]
            paired = {piece.factors[p].outer[0]: p for name in inners for p in piece.positions(name)}
            for position in piece.positions(unit.group.name):
                if position not in paired:
                    outer += self._gains(number, (), (position,))
                    continue
                name = piece.factors[paired[position]].group or ""
                size = inners[name].shape[-1]
                gains = self._gains(number, (), (position, paired[position]))
                inners[name] += gains.reshape(blocks, size, blocks, size).transpose(0, 2, 1, 3)
        order, rows, best = assign_nested(outer, list(inners.values()))
        stay = _stay(outer) + sum(_stay(gains[range(blocks), range(blocks)]) for gains in inners.values())
        moves = {unit.group.name: order, **dict(zip(inners, rows, strict=True))}
        return {name: torch.from_numpy(index) for name, index in moves.items()}, best - stay

    def _gains(self, number: int, batch: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
        known = self.known[number].get(axes)
        if known is None:
            known = self._product(number, batch, axes)
            if self.room >= known.nbytes:
                self.room -= known.nbytes
                self.known[number][axes] = known
        return known

    def _product(self, number: int, batch: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
        # gains[batch, i, j] = ⟨target at i, source at j⟩ along some axes of a piece, for each index of the batch axes
        piece = self.pieces[number]
        rest = [i for i in range(piece.target.dim()) if i not in (*batch, *axes)]
        order = [*batch, *axes, *rest]
        sizes = piece.target.shape
        rows = int(np.prod([sizes[i] for i in batch])) if batch else 1
        length = int(np.prod([sizes[i] for i in axes]))
        ours, theirs = (side.permute(order).reshape(rows, length, -1) for side in (piece.target, self.source[number]))
        gains = torch.bmm(ours, theirs.transpose(1, 2)) if batch else (ours[0] @ theirs[0].T)
        product: np.ndarray = (self.weights[piece.tensor] * gains).cpu().numpy()
        return product

    def _twice(self, name: str) -> bool:
        return any(len(self.pieces[number].positions(name)) > 1 for number in self.touching[name])

    def _true_gain(self, moves: Moves) -> float:
        # A group that a tensor has twice makes the step quadratic: its gain was only a linear guess.
        before = after = 0.0
        for number in sorted({number for name in moves for number in self.touching[name]}):
            piece = self.pieces[number]
            moved = _permuted(piece, self.source[number], moves)
            before += self._value(number)
            after += self.weights[piece.tensor] * float(torch.dot(piece.target.flatten(), moved.flatten()))
        return after - before

    def _apply(self, moves: Moves) -> set[int]:
        # Move the source along, and tell which units have a neighbour that moved.
        for group in self.graph.groups:
            if group.name in moves or any(outer in moves for outer in group.outer):
                self.indices[group.name] = self.graph.compose_group(group, self.indices, moves)
        numbers = {number for name in moves for number in self.touching[name]}
        for number in numbers:
            self.source[number] = _permuted(self.pieces[number], self.source[number], moves)
            self._forget(number, moves)
        near = {name for number in numbers for name in self.pieces[number].groups}
        return {i for i, unit in enumerate(self.units) if unit.names & near}

    def _forget(self, number: int, moves: Moves) -> None:
        # What is known of a piece stays true if only the axis itself has moved: its columns have moved along.
        piece = self.pieces[number]
        moved = {i for i, factor in enumerate(piece.factors) if factor.group in moves}
        for axes, gains in list(self.known[number].items()):
            factor = piece.factors[axes[0]]
            if moved == set(axes) and len(axes) == 1 and not factor.outer:
                self.known[number][axes] = gains[:, moves[factor.group or ""].numpy()]
            else:
                self.room += gains.nbytes
                del self.known[number][axes]


def units(graph: PermutationGraph, pieces: list[Piece]) -> list[Unit]:
    """The steps of a descent: each group, blocks taken together with inner groups that do not share a piece.

    Two inner groups in one piece (both sides of a grouped convolution) cannot be solved jointly, so each
    is paired with the blocks in a step of its own.
    """
    result = []
    for group in graph.groups:
        inners = [inner for inner in graph.groups if inner.outer == (group.name,)] if not group.blocks else []
        if not inners:
            joint = len(group.outer) == 1 and group.outer[0] is not None and not graph[group.outer[0]].blocks
            if not joint:
                result.append(Unit(group))
            continue
        classes: list[list[Group]] = []
        for inner in inners:
            free = (each for each in classes if not any(_meet(inner, other, pieces) for other in each))
            chosen = next(free, None)
            if chosen is None:
                classes.append([inner])
            else:
                chosen.append(inner)
        result += [Unit(group, tuple(each)) for each in classes]
    return result


def _meet(one: Group, other: Group, pieces: list[Piece]) -> bool:
    return any({one.name, other.name} <= piece.groups for piece in pieces)


def _permuted(piece: Piece, tensor: Tensor, moves: Moves) -> Tensor:
    return gather(tensor, piece.factors, moves)


def _is_identity(index: Tensor) -> bool:
    return bool((index == torch.arange(index.shape[-1])).all())


def _stay(gains: np.ndarray) -> float:
    return float(np.diagonal(gains, axis1=-2, axis2=-1).sum())
