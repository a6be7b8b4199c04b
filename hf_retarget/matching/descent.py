"""Coordinate descent over groups: one exact assignment at a time, until no group can improve the objective.

A step finds a permutation relative to the current one, so the gains of exchanging neurons are one matrix product per
piece. These products are cached until a group of the piece moves. A group is visited again only after a group that
shares a piece with it has moved.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_retarget.graph.permutation import Permutation, gather
from hf_retarget.graph.permutation_graph import Group, PermutationGraph
from hf_retarget.matching.assignment import SOLVERS, assign_nested, assign_rows
from hf_retarget.matching.objective import Piece, Stacks

_ROOM = 1 << 29
"""Bytes for cached products."""

Moves = dict[str, Tensor]
"""Permutations of some groups, relative to the current ones."""

Solved = tuple[Moves, float]
"""Moves and their gain."""


@dataclass(frozen=True)
class Sweep:
    """One pass over all groups that may improve."""

    objective: float
    solved: int
    moved: int


@dataclass(frozen=True)
class Match:
    """A permutation, its objective, and the sweeps that found it."""

    permutation: Permutation
    objective: float
    sweeps: tuple[Sweep, ...]


def descend(
    stacks: Stacks,
    start: Permutation | None = None,
    *,
    seed: int = 0,
    restarts: int = 1,
    max_sweeps: int = 100,
    tolerance: float = 1e-4,
) -> Match:
    """Find a permutation that maximises the objective, starting from `start` (or from a guess).

    Groups are visited in a seeded random order, in the first sweep those with most neighbours first; `restarts` use
    other orders and no guess, and the best result is kept. Stop after a sweep that gains less than `tolerance` of the
    objective's scale.
    """
    start, guesses, runs = start or stacks.graph.identity(), start is None, list[Match]()
    for number in range(seed, seed + restarts):
        with closing(_Descent(stacks, start, number)) as descent:
            if not guesses or number != seed or descent.guess():
                runs.append(descent.run(max_sweeps, tolerance))
                continue
        with closing(_Descent(stacks, start, number)) as descent:  # the guess was no better than the identity
            runs.append(descent.run(max_sweeps, tolerance))
    return max(runs, key=lambda match: match.objective)


class _Descent:
    """The state of one descent: the current permutation, and the source permuted by it."""

    def __init__(self, stacks: Stacks, start: Permutation, seed: int) -> None:
        self.graph = stacks.graph
        self.indices = dict(start.indices)
        self.generator = np.random.default_rng(seed)
        self.source = MovedSource(stacks, start)
        self.pieces = self.source.pieces
        self.units = units(self.graph, self.pieces)
        self.touching: dict[str, list[int]] = {group.name: [] for group in self.graph.groups}
        for number, piece in enumerate(self.pieces):
            for name in piece.groups:
                self.touching[name].append(number)
        self.due = set(range(len(self.units)))
        pieces = [{n for name in unit.names for n in self.touching[name]} for unit in self.units]
        self.near = [{i for i, theirs in enumerate(pieces) if ours & theirs} for ours in pieces]

    def close(self) -> None:
        """Put the stacks back in their own order."""
        self.source.put_back(self.graph.invert(Permutation(self.graph.fingerprint, self.indices)))

    def run(self, max_sweeps: int, tolerance: float) -> Match:
        """Sweep until no unit is due, or the gain is too small."""
        self._warn_of_zeros()
        due = self.due  # all units, or those that a guess has not settled
        objective = self.source.objective()
        scale = sum(map(self.source.scale, range(len(self.pieces))))
        sweeps: list[Sweep] = []
        while not sweeps or (due and len(sweeps) < max_sweeps):
            order = [int(number) for number in self.generator.permutation(len(self.units)) if number in due]
            if not sweeps:  # so that few are due again
                order.sort(key=lambda number: -len(self.near[number]))
            before, moved = objective, 0
            for number, moves in self._solve_all(order, scale):
                due.discard(number)
                if moves:
                    moved += 1
                    settled = not any(self._twice(name) for name in moves)  # a quadratic step may be repeated
                    due |= self._apply(moves) - ({number} if settled else set())
            objective = self.source.objective()
            sweeps.append(Sweep(objective, len(order), moved))
            if objective - before <= tolerance * scale:
                break
        permutation = Permutation(self.graph.fingerprint, self.indices)
        return Match(permutation, self.source.objective(), tuple(sweeps))

    def guess(self) -> bool:
        """Solve group by group, using only pieces whose other groups have been solved.

        Neighbours that are still in the wrong order are noise, and a descent that starts from noise ends in a worse
        optimum. The group with the most information is solved next. Returns whether the objective has improved.
        """
        before = self.source.objective()
        weight = [self.source.scale(number) for number in range(len(self.pieces))]
        touching, known, waiting = self.touching, set[str](), list(self.units)

        def heard(unit: Unit) -> set[int]:
            near = {number for name in unit.names for number in touching[name]}
            return {number for number in near if self.pieces[number].groups - unit.names <= known}

        while waiting:
            unit = max(waiting, key=lambda unit: sum(weight[number] for number in sorted(heard(unit))))
            waiting.remove(unit)
            if some := heard(unit):
                self.touching = {name: [n for n in numbers if n in some] for name, numbers in touching.items()}
                moves = self._solve(unit)
                self.touching = touching
                number = self.units.index(unit)
                if some == {n for name in unit.names for n in touching[name]} and not any(map(self._twice, unit.names)):
                    self.due.discard(number)  # optimal until a neighbour moves
                self.due |= self._apply(moves) - {number}
            known |= unit.names
        return self.source.objective() > before

    def _warn_of_zeros(self) -> None:
        dead = [
            name
            for name, numbers in self.touching.items()
            if not any(all(self.source.norms[number]) for number in numbers)
        ]
        if dead:
            listed = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
            warnings.warn(f"nothing to match in {listed}: all zero or absent; the identity is kept", stacklevel=4)

    def _solve_all(self, order: list[int], scale: float) -> Iterator[tuple[int, Moves]]:
        """Solve units in order, and yield the moves of each, which must be applied immediately.

        Large assignments are solved in parallel, each as soon as no earlier unit shares a piece with it. The result is
        the same as in sequence.
        """
        waiting, flying = list(order), deque[tuple[int, Callable[[], Solved]]]()
        while waiting or flying:
            blocked = {near for number, _ in flying for near in self.near[number]}
            for number in list(waiting):
                if len(flying) > SOLVERS.count:
                    break
                if number not in blocked:
                    waiting.remove(number)
                    flying.append((number, self._begin(self.units[number], alone=len(order) == 1)))
                blocked |= self.near[number]
            number, wait = flying.popleft()
            yield number, self._judge(*wait(), scale)

    def _solve(self, unit: Unit) -> Moves:
        return self._judge(*self._begin(unit, alone=True)(), scale=0.0)

    def _begin(self, unit: Unit, *, alone: bool) -> Callable[[], Solved]:
        if unit.inners:
            solved = self._solve_nested(unit)
            return lambda: solved
        return self._solve_one(unit.group, alone=alone)

    def _judge(self, moves: Moves, gain: float, scale: float) -> Moves:
        moves = {name: index for name, index in moves.items() if not _is_identity(index)}
        if moves and any(self._twice(name) for name in moves):
            # A group that occurs twice in a tensor makes the step quadratic: its gain was only a linear estimate.
            numbers = sorted({number for name in moves for number in self.touching[name]})
            gain = sum(self.source.try_out(number, moves) for number in numbers)
        return moves if gain > 1e-9 * scale else {}  # less could be rounding

    def _solve_one(self, group: Group, *, alone: bool) -> Callable[[], Solved]:
        gains = np.zeros((*group.blocks, group.size, group.size), np.float64)
        for number in self.touching[group.name]:
            piece = self.pieces[number]
            for position in piece.positions(group.name):
                outer = piece.factors[position].outer
                gains += self.source.gains(number, outer, (position,)).reshape(gains.shape)
        stay = _stay(gains)
        wait = partial(assign_rows, gains) if group.blocks else SOLVERS.assign(gains, alone=alone)

        def finish() -> Solved:
            index, best = wait()
            return {group.name: torch.from_numpy(index)}, best - stay

        return finish

    def _solve_nested(self, unit: Unit) -> Solved:
        blocks = unit.group.size
        outer = np.zeros((blocks, blocks))
        inners = {inner.name: np.zeros((blocks, blocks, inner.size, inner.size)) for inner in unit.inners}
        for number in self.touching[unit.group.name]:
            piece = self.pieces[number]
            paired = {piece.factors[p].outer[0]: p for name in inners for p in piece.positions(name)}
            for position in piece.positions(unit.group.name):
                if position not in paired:
                    outer += self.source.gains(number, (), (position,))
                    continue
                name = piece.factors[paired[position]].group or ""
                size = inners[name].shape[-1]
                gains = self.source.gains(number, (), (position, paired[position]))
                inners[name] += gains.reshape(blocks, size, blocks, size).transpose(0, 2, 1, 3)
        order, rows, best = assign_nested(outer, list(inners.values()))
        stay = _stay(outer) + sum(_stay(gains[range(blocks), range(blocks)]) for gains in inners.values())
        moves = {unit.group.name: order, **dict(zip(inners, rows, strict=True))}
        return {name: torch.from_numpy(index) for name, index in moves.items()}, best - stay

    def _apply(self, moves: Moves) -> set[int]:
        # Also moves the source. Returns the units with a neighbour that moved.
        for group in self.graph.groups:
            if group.name in moves or any(outer in moves for outer in group.outer):
                self.indices[group.name] = self.graph.compose_group(group, self.indices, moves)
        numbers = {number for name in moves for number in self.touching[name]}
        for number in numbers:
            self.source.move(number, moves)
        near = {name for number in numbers for name in self.pieces[number].groups}
        return {i for i, unit in enumerate(self.units) if unit.names & near}

    def _twice(self, name: str) -> bool:
        return any(len(self.pieces[number].positions(name)) > 1 for number in self.touching[name])


def _stay(gains: np.ndarray) -> float:
    return float(np.diagonal(gains, axis1=-2, axis2=-1).sum())


# ---- the units of a descent


@dataclass(frozen=True)
class Unit:
    """The groups solved in one step: a single one, or blocks together with some of their inner groups."""

    group: Group
    inners: tuple[Group, ...] = ()

    @property
    def names(self) -> set[str]:
        """The groups that the step may move."""
        return {self.group.name, *(inner.name for inner in self.inners)}


def units(graph: PermutationGraph, pieces: list[Piece]) -> list[Unit]:
    """The steps of a descent: each group, with blocks combined with inner groups that do not share a piece.

    Two inner groups in one piece (both sides of a grouped convolution) cannot be solved jointly, so each
    is paired with the blocks in a separate step.
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


# ---- the source under the current permutation


class MovedSource:
    """Both sides of the stacks by piece, with the source in the current order of its neurons.

    The sources are taken out of the stacks, so that memory holds them once, until they are put back.
    """

    def __init__(self, stacks: Stacks, start: Permutation) -> None:
        self.weights = stacks.weights()
        self.constant = stacks.constant
        self.pieces = list(stacks.pieces.values())
        self.norms = [piece.norms for piece in self.pieces]
        moved = _changed(start)
        self.source = [gather(piece.take_source(), piece.factors, moved) for piece in self.pieces]
        self._known: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in self.pieces]
        room, self._keeps = _ROOM, set[int]()  # chosen here, so that it does not depend on the order of requests
        for number, piece in enumerate(self.pieces):
            sizes = [math.prod(piece.target.shape[i] for i in (at, *f.outer)) for at, f in enumerate(piece.factors)]
            size = 4 * sum(each**2 for each in sizes)
            if len(sizes) > 1 and size <= room:  # those of a single group are computed as fast as they are permuted
                self._keeps.add(number)
                room -= size

    def put_back(self, inverse: Permutation) -> None:
        """Return the sources to the stacks, in their own order."""
        moved = _changed(inverse)
        for piece in reversed(self.pieces):
            piece.sources = [gather(self.source.pop(), piece.factors, moved)]

    def objective(self) -> float:
        """The current ⟨target, π source⟩."""
        return self.constant + sum(self._value(number, source) for number, source in enumerate(self.source))

    def scale(self, number: int) -> float:
        """The contribution of a perfectly matched piece to the objective."""
        piece = self.pieces[number]
        return self.weights[piece.tensor] * math.prod(self.norms[number])

    def gains(self, number: int, batch: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
        """A piece's contribution if the source's neuron j moves to i, for each index of the batch axes."""
        known = self._known[number].get(axes)
        if known is None:
            piece = self.pieces[number]
            known = self._product(piece, piece.target, self.source[number], batch, axes)
            if number in self._keeps:
                self._known[number][axes] = known
        return known

    def _product(
        self, piece: Piece, target: Tensor, source: Tensor, batch: tuple[int, ...], axes: tuple[int, ...]
    ) -> np.ndarray:
        # gains[batch, i, j] = ⟨target at i, source at j⟩ along some axes of a piece, for each index of the batch axes
        weight = self.weights[piece.tensor]
        if piece.products is not None:
            gains = piece.products.index_select(1, source)
            return (gains if weight == 1 else gains.mul_(weight)).numpy()
        rest = [i for i in range(target.dim()) if i not in (*batch, *axes)]
        order = [*batch, *axes, *rest]
        rows = math.prod(target.shape[i] for i in batch)
        length = math.prod(target.shape[i] for i in axes)
        ours, theirs = (side.permute(order).reshape(rows, length, -1) for side in (target, source))
        gains = torch.bmm(ours, theirs.transpose(1, 2)) if batch else (ours[0] @ theirs[0].T)
        product: np.ndarray = (gains if weight == 1 else gains.mul_(weight)).cpu().numpy()
        return product

    def try_out(self, number: int, moves: Moves) -> float:
        """The change of a piece's contribution if some groups moved."""
        moved = gather(self.source[number], self.pieces[number].factors, moves)
        return self._value(number, moved) - self._value(number, self.source[number])

    def _value(self, number: int, source: Tensor) -> float:
        piece = self.pieces[number]
        return self.weights[piece.tensor] * piece.value(source)

    def move(self, number: int, moves: Moves) -> None:
        """Permute a piece; its cached products are permuted, corrected by the changes, or dropped."""
        piece, source = self.pieces[number], self.source[number]
        moved = [i for i, factor in enumerate(piece.factors) if factor.group in moves]
        plain = len(moved) == 1 and not piece.factors[moved[0]].outer
        index = moves[piece.factors[moved[0]].group or ""] if plain else None
        changes = None if index is None else self._exchange(number, moved[0], index)
        if changes is None:
            self.source[number] = gather(source, piece.factors, moves)
        for axes, gains in list(self._known[number].items()):
            outer = piece.factors[axes[0]].outer
            if index is not None and axes == (moved[0],):
                self._known[number][axes] = np.take(gains, index.numpy(), axis=-1)
            elif changes is not None and moved[0] not in (*axes, *outer):
                gains += self._product(piece, *changes, outer, axes)
            else:
                del self._known[number][axes]

    def _exchange(self, number: int, axis: int, index: Tensor) -> tuple[Tensor, Tensor] | None:
        # If few elements move, update only these. Returns the target at these places, and the change of the source.
        changed = (index != torch.arange(len(index))).nonzero()[:, 0]
        piece, source = self.pieces[number], self.source[number]
        if 2 * len(changed) > len(index) or piece.products is not None:
            return None
        old, new = source.index_select(axis, changed), source.index_select(axis, index[changed])
        source.index_copy_(axis, changed, new)
        return piece.target.index_select(axis, changed), new.sub_(old)


def _changed(permutation: Permutation) -> Moves:
    return {name: index for name, index in permutation.indices.items() if not _is_identity(index)}


def _is_identity(index: Tensor) -> bool:
    return bool((index == torch.arange(index.shape[-1])).all())
