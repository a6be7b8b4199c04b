"""The source as it is permuted so far, and its products with the target, kept up to date as groups move.

A step of a descent asks for a permutation relative to the current one, so the gains of exchanging neurons are one
product for each piece, without looking anything up. What is known of a piece is kept until a group moves that it has.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hf_retarget.graph.permutation import Permutation, gather
from hf_retarget.matching.objective import Piece, Stacks

_ROOM = 1 << 30
"""Bytes for products that are kept until a neighbour moves."""

Moves = dict[str, Tensor]
"""Permutations relative to the current one, of some groups."""


class MovedSource:
    """Both sides of the stacks, piece by piece; the source in the current order of its neurons."""

    def __init__(self, stacks: Stacks, start: Permutation) -> None:
        self.weights = stacks.weights()
        self.constant = stacks.constant
        self.pieces = list(stacks.pieces.values())
        moved = {name: index for name, index in start.indices.items() if not is_identity(index)}
        self.source = [_permuted(piece, piece.source, moved) for piece in self.pieces]
        self._known: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in self.pieces]
        self._room = _ROOM

    def objective(self) -> float:
        """⟨target, π source⟩ as it is now."""
        return self.constant + sum(self._value(number, source) for number, source in enumerate(self.source))

    def scale(self, number: int) -> float:
        """What a piece would add to the objective if it were matched perfectly."""
        piece = self.pieces[number]
        return self.weights[piece.tensor] * float(piece.target.norm()) * float(piece.source.norm())

    def gains(self, number: int, batch: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
        """What a piece adds to the objective if the source's neuron j goes to i, for each index of the batch axes."""
        known = self._known[number].get(axes)
        if known is None:
            piece = self.pieces[number]
            known = self._product(piece, piece.target, self.source[number], batch, axes)
            if self._room >= known.nbytes:
                self._room -= known.nbytes
                self._known[number][axes] = known
        return known

    def _product(
        self, piece: Piece, target: Tensor, source: Tensor, batch: tuple[int, ...], axes: tuple[int, ...]
    ) -> np.ndarray:
        # gains[batch, i, j] = ⟨target at i, source at j⟩ along some axes of a piece, for each index of the batch axes
        rest = [i for i in range(target.dim()) if i not in (*batch, *axes)]
        order = [*batch, *axes, *rest]
        rows = math.prod(target.shape[i] for i in batch)
        length = math.prod(target.shape[i] for i in axes)
        ours, theirs = (side.permute(order).reshape(rows, length, -1) for side in (target, source))
        gains = torch.bmm(ours, theirs.transpose(1, 2)) if batch else (ours[0] @ theirs[0].T)
        product: np.ndarray = (self.weights[piece.tensor] * gains).cpu().numpy()
        return product

    def try_out(self, number: int, moves: Moves) -> float:
        """By how much a piece would change the objective if some groups moved."""
        moved = _permuted(self.pieces[number], self.source[number], moves)
        return self._value(number, moved) - self._value(number, self.source[number])

    def _value(self, number: int, source: Tensor) -> float:
        piece = self.pieces[number]
        return self.weights[piece.tensor] * float(torch.dot(piece.target.flatten(), source.flatten()))

    def move(self, number: int, moves: Moves) -> None:
        """Permute a piece; what is known of it moves along, is corrected by what has changed, or is forgotten."""
        piece, source = self.pieces[number], self.source[number]
        moved = [i for i, factor in enumerate(piece.factors) if factor.group in moves]
        plain = len(moved) == 1 and not piece.factors[moved[0]].outer
        index = moves[piece.factors[moved[0]].group or ""] if plain else None
        changes = None if index is None else self._exchange(number, moved[0], index)
        if changes is None:
            self.source[number] = _permuted(piece, source, moves)
        for axes, gains in list(self._known[number].items()):
            outer = piece.factors[axes[0]].outer
            if index is not None and axes == (moved[0],):
                self._known[number][axes] = np.take(gains, index.numpy(), axis=-1)
            elif changes is not None and moved[0] not in (*axes, *outer):
                gains += self._product(piece, *changes, outer, axes)
            else:
                self._room += gains.nbytes
                del self._known[number][axes]

    def _exchange(self, number: int, axis: int, index: Tensor) -> tuple[Tensor, Tensor] | None:
        # Where few elements change places, only they are touched: the target there, and by how much the source changes.
        changed = (index != torch.arange(len(index))).nonzero()[:, 0]
        if 2 * len(changed) > len(index):
            return None
        piece, source = self.pieces[number], self.source[number]
        old, new = source.index_select(axis, changed), source.index_select(axis, index[changed])
        if source.data_ptr() == piece.source.data_ptr():
            source = self.source[number] = source.clone()  # the stacks are not ours
        source.index_copy_(axis, changed, new)
        return piece.target.index_select(axis, changed), new.sub_(old)


def _permuted(piece: Piece, tensor: Tensor, moves: Moves) -> Tensor:
    return gather(tensor, piece.factors, moves)


def is_identity(index: Tensor) -> bool:
    """Whether all stay where they are, in every row.

    Example:
        >>> is_identity(torch.tensor([[0, 1], [0, 1]])), is_identity(torch.tensor([1, 0]))
        (True, False)
    """
    return bool((index == torch.arange(index.shape[-1])).all())
