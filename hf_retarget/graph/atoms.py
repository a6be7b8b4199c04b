"""Atoms, and axes as products of them: what the axis algebra in `hf_retarget.graph.axes` works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple


class Misaligned(Exception):
    """Two axes, or an axis and a shape, do not fit each other's factors; the caller pins what is involved."""


class Pin(NamedTuple):
    """Why an atom may not be permuted, and what decided it."""

    reason: str
    where: str = ""


MISALIGNED = Pin("misaligned")


class Key(NamedTuple):
    """The part `start : start + length` of an atom, as the condition of a specialisation."""

    atom: Atom
    start: int
    length: int

    def covers(self, other: Key) -> bool:
        """Whether `other` is the same part of the same atom, or lies inside it."""
        return (
            find(self.atom) is find(other.atom)
            and self.start <= other.start
            and other.start + other.length <= self.start + self.length
        )

    def overlaps(self, other: Key) -> bool:
        """Whether both have elements of the same atom in common."""
        return (
            find(self.atom) is find(other.atom)
            and self.start < other.start + other.length
            and other.start < self.start + self.length
        )

    def same(self, other: Key) -> bool:
        """Whether both name the same part, given all unifications so far."""
        return self.covers(other) and self.length == other.length


class Atom:
    """An index set of `size` elements that is permuted as one: whole, a product of factors, or a sum of parts."""

    __slots__ = ("factors", "parent", "parts", "pin", "size", "special")

    def __init__(self, size: int, pin: Pin | None = None) -> None:
        self.size = size
        self.pin = pin
        self.parent: Atom | None = None
        self.factors: list[Atom] | None = None
        self.parts: list[Atom] | None = None
        self.special: list[tuple[Key, Atom]] = []

    @property
    def whole(self) -> bool:
        """Whether the atom is neither a product nor a sum (yet)."""
        return self.factors is None and self.parts is None

    def __repr__(self) -> str:
        atom = find(self)
        if atom.factors is not None:
            return "(" + " × ".join(map(repr, atom.factors)) + ")"
        if atom.parts is not None:
            return "(" + " + ".join(map(repr, atom.parts)) + ")"
        return f"{atom.size}{'!' if atom.pin else ''}#{id(atom) % 9973}"


Product = tuple[Atom, ...]
"""An axis: the product of its atoms, outermost first. An axis of size one is the empty product."""


def find(atom: Atom) -> Atom:
    """The representative of everything unified with `atom`."""
    root = atom
    while root.parent is not None:
        root = root.parent
    while atom.parent is not None:
        atom.parent, atom = root, atom.parent
    return root


def flat(axis: Iterable[Atom]) -> list[Atom]:
    """The axis as whole atoms and sums, products multiplied out and atoms of size one dropped."""
    result = []
    for atom in axis:
        root = find(atom)
        if root.factors is not None:
            result += flat(root.factors)
        elif root.size != 1:
            result.append(root)
    return result


def size_of(axis: Iterable[Atom]) -> int:
    """The number of elements along the axis."""
    return prod(atom.size for atom in axis)


def leaves(axis: Iterable[Atom]) -> Iterator[Atom]:
    """All whole atoms in the axis, those inside sums included."""
    for atom in flat(axis):
        if atom.parts is None:
            yield atom
        else:
            yield from leaves(atom.parts)


def starts(parts: Sequence[Atom]) -> list[int]:
    """The offset at which each part begins."""
    return list(accumulate((part.size for part in parts), initial=0))[:-1]


def sum_of(axes: Sequence[Iterable[Atom]]) -> Atom:
    """An atom whose parts are the given axes, one after the other."""
    parts = [part for part in map(as_atom, axes) if part.size]
    if len(parts) == 1:
        return parts[0]
    atom = Atom(sum(part.size for part in parts))
    atom.parts = parts
    return atom


def as_atom(axis: Iterable[Atom]) -> Atom:
    """The axis as one atom, which is a product if need be."""
    factors = flat(axis)
    if len(factors) == 1:
        return factors[0]
    atom = Atom(size_of(factors))
    if factors:
        atom.factors = factors
    return atom


# ---------------------------------------------------------------------- pinning


def pin(axis: Iterable[Atom], why: Pin) -> None:
    """Fix the order of every atom in the axis; the first reason stays."""
    for leaf in leaves(axis):
        if leaf.pin is None:
            leaf.pin = why
            for _, member in leaf.special:
                pin((member,), why)
