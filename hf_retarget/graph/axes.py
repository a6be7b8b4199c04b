"""The axis algebra: atoms that axes are made of, and how these are split, cut and unified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple


class Misaligned(Exception):
    """Two axes, or an axis and a shape, do not have compatible factors; the caller pins them."""


class Pin(NamedTuple):
    """Why an atom may not be permuted, and the operator that decided it."""

    reason: str
    where: str = ""


MISALIGNED = Pin("misaligned")


class Key(NamedTuple):
    """The part `start : start + length` of an atom, as the condition of a specialisation."""

    atom: Atom
    start: int
    length: int

    def covers(self, other: Key) -> bool:
        """Whether `other` is the same part of the same atom, or a part of it."""
        inside = self.start <= other.start and other.start + other.length <= self.start + self.length
        return inside and find(self.atom) is find(other.atom)

    def overlaps(self, other: Key) -> bool:
        """Whether both have elements of the same atom in common."""
        meet = self.start < other.start + other.length and other.start < self.start + self.length
        return meet and find(self.atom) is find(other.atom)

    def same(self, other: Key) -> bool:
        """Whether both are the same part, given all unifications so far."""
        return self.covers(other) and self.length == other.length


class Atom:
    """An index set of `size` elements: whole, a product of factors, or a sum of parts."""

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

Shape = tuple[Product, ...]
"""The axes of one tensor."""


def axis_of(size: int, why: Pin | None = None) -> Product:
    """A new axis of `size` elements: free, or pinned."""
    return () if size == 1 else (Atom(size, why),)


def find(atom: Atom) -> Atom:
    """The representative of everything unified with `atom`."""
    root = atom
    while root.parent is not None:
        root = root.parent
    while atom.parent is not None:
        atom.parent, atom = root, atom.parent
    return root


def flat(axis: Iterable[Atom]) -> list[Atom]:
    """The axis as whole atoms and sums, with products expanded and atoms of size one dropped."""
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
    """All whole atoms in the axis, including those inside sums."""
    for atom in flat(axis):
        if atom.parts is None:
            yield atom
        else:
            yield from leaves(atom.parts)


def starts(parts: Sequence[Atom]) -> list[int]:
    """The offset of each part."""
    return list(accumulate((part.size for part in parts), initial=0))[:-1]


def sum_of(axes: Sequence[Iterable[Atom]]) -> Atom:
    """An atom whose parts are the given axes, in order."""
    parts = [part for part in map(as_atom, axes) if part.size]
    if len(parts) == 1:
        return parts[0]
    atom = Atom(sum(part.size for part in parts))
    atom.parts = parts
    return atom


def as_atom(axis: Iterable[Atom]) -> Atom:
    """The axis as a single atom, a product if necessary."""
    factors = flat(axis)
    if len(factors) == 1:
        return factors[0]
    atom = Atom(size_of(factors))
    if factors:
        atom.factors = factors
    return atom


# ---------------------------------------------------------------------- pinning


def pin(axis: Iterable[Atom], why: Pin) -> None:
    """Fix the order of every atom in the axis; the first reason is kept."""
    for leaf in leaves(axis):
        if leaf.pin is None:
            leaf.pin = why
            for _, member in leaf.special:
                pin((member,), why)


# ---------------------------------------------------------------------- refining


def split(atom: Atom, outer_size: int) -> tuple[Atom, Atom]:
    """Refine an atom into `outer_size × rest` and return the two factors."""
    inner_size = atom.size // outer_size
    if atom.size % outer_size:
        raise Misaligned
    if atom.parts is None:
        outer, inner = Atom(outer_size, atom.pin), Atom(inner_size, atom.pin)
    else:
        # A sum whose parts are all divisible: (a·d + b·d) is (a + b) × d, where d is a family over the parts.
        pairs = [divide((part,), inner_size) for part in atom.parts]
        outer, inner = sum_of([pair[0] for pair in pairs]), Atom(inner_size)
        for start, (head, tail) in zip(starts(outer.parts or []), pairs, strict=True):
            inner.special.append((Key(outer, start, size_of(head)), as_atom(tail)))
    _refine(atom, factors=[outer, inner])
    return outer, inner


def divide(axis: Iterable[Atom], inner_size: int) -> tuple[Product, Product]:
    """Split an axis into an outer axis and an inner axis of `inner_size` elements."""
    axis = tuple(axis)
    outer, inner = regroup(axis, [size_of(axis) // inner_size, inner_size])
    return outer, inner


def regroup(axis: Iterable[Atom], sizes: Sequence[int]) -> list[Product]:
    """Distribute the factors of an axis over new axes of the given sizes, as a reshape does.

    Example:
        >>> atom = Atom(24)
        >>> [size_of(axis) for axis in regroup((atom,), [2, 1, 12])]
        [2, 1, 12]
    """
    queue = flat(axis)
    if size_of(queue) != prod(sizes):
        raise Misaligned
    result = []
    for size in sizes:
        taken: list[Atom] = []
        while size > 1:
            queue[:1] = flat(queue[:1])
            head = queue[0]
            if size % head.size == 0:
                taken.append(queue.pop(0))
                size //= head.size
            elif head.size % size == 0:
                queue[:1] = split(head, size)
            else:
                raise Misaligned
        result.append(tuple(taken))
    return result


def cut(atom: Atom, boundaries: Iterable[int]) -> None:
    """Refine an atom into a sum whose parts end at the given boundaries."""
    inside = sorted({boundary for boundary in boundaries if 0 < boundary < atom.size})
    if atom.parts is None:
        if inside:
            edges = [0, *inside, atom.size]
            _refine(atom, parts=[Atom(end - start, atom.pin) for start, end in pairwise(edges)])
        return
    for start, part in zip(starts(atom.parts), atom.parts, strict=True):
        within = [boundary - start for boundary in inside if start < boundary < start + part.size]
        if within:
            head, *rest = flat((part,))
            step = size_of(rest)
            if any(boundary % step for boundary in within):
                raise Misaligned
            cut(head, [boundary // step for boundary in within])


def _refine(atom: Atom, factors: list[Atom] | None = None, parts: list[Atom] | None = None) -> None:
    # The members of a family are refined along with it.
    atom.factors, atom.parts = factors, parts
    families, atom.special = atom.special, []
    for key, member in families:
        unify_or_pin((member,), specialise((atom,), key))


def narrow(axis: Iterable[Atom], start: int, length: int) -> tuple[Product, list[Key]]:
    """The part `start : start + length` of an axis, and the keys that specialise the other axes for it."""
    factors = flat(axis)
    if length == size_of(factors):
        return tuple(factors), []
    if length == 0:
        return (Atom(0),), []
    head, *rest = factors
    step = size_of(rest)
    if start % step == 0 and length % step == 0:
        piece = _piece(head, start // step, length // step)
        key = Key(head, start // step, length // step)
        return (piece, *specialise(rest, key)), [key]
    row = start // step
    if (start + length - 1) // step != row:
        raise Misaligned
    _piece(head, row, 1)
    key = Key(head, row, 1)
    result, keys = narrow(specialise(rest, key), start - row * step, length)
    return result, [key, *keys]


def _piece(atom: Atom, start: int, length: int) -> Atom:
    if length == atom.size:
        return atom
    cut(atom, [start, start + length])
    pieces: list[Product] = []
    parts = atom.parts or []
    for offset, part in zip(starts(parts), parts, strict=True):
        low, high = max(start, offset), min(start + length, offset + part.size)
        if low < high:
            pieces.append(narrow((part,), low - offset, high - low)[0])
    return as_atom(pieces[0]) if len(pieces) == 1 else sum_of(pieces)


# ---------------------------------------------------------------------- specialising


def specialise(axis: Iterable[Atom], key: Key) -> Product:
    """The axis where `key.atom` is in the key's part."""
    return tuple(_member(atom, key) for atom in flat(axis))


def _member(atom: Atom, key: Key) -> Atom:
    if atom.pin is not None or atom is find(key.atom):
        return atom
    for known, member in atom.special:
        if known.same(key):
            return member
    if atom.parts is None:
        member = Atom(atom.size)
    else:
        parts = [part if part.size == 1 else as_atom(specialise((part,), key)) for part in atom.parts]
        if all(find(new) is find(old) for new, old in zip(parts, atom.parts, strict=True)):
            return atom
        member = sum_of([(part,) for part in parts])
    atom.special.append((key, member))
    return member


def family(outer: Atom, members: Sequence[Iterable[Atom]]) -> Atom:
    """A new atom that is a different member for each part of the sum `outer`."""
    atom = Atom(size_of(members[0]))
    parts = outer.parts or []
    for start, part, member in zip(starts(parts), parts, members, strict=True):
        atom.special.append((Key(outer, start, part.size), as_atom(member)))
    return atom


# ---------------------------------------------------------------------- unifying


def unify(left: Iterable[Atom], right: Iterable[Atom]) -> None:
    """Make two axes share one permutation, refining both until their factors agree."""
    a, b = flat(left), flat(right)
    if size_of(a) != size_of(b):
        raise Misaligned
    while a and b:
        a[:1], b[:1] = flat(a[:1]), flat(b[:1])  # an earlier round may have refined them
        if a[0].size == b[0].size:
            _unify_atoms(a.pop(0), b.pop(0))
        elif a[0].size > b[0].size:
            a[:1] = split(a[0], b[0].size)
        else:
            b[:1] = split(b[0], a[0].size)


def unify_or_pin(left: Iterable[Atom], right: Iterable[Atom], why: Pin = MISALIGNED) -> None:
    """Unify two axes, or pin both if that fails: for places where an exception would leave work unfinished."""
    left, right = tuple(left), tuple(right)
    try:
        unify(left, right)
    except Misaligned:
        pin((*left, *right), why)


def _unify_atoms(a: Atom, b: Atom) -> None:
    if a is b:
        return
    if a.parts is not None and b.parts is not None:
        _unify_sums(a, b)
        a, b = find(a), find(b)
        if a is b or a.factors is not None or b.factors is not None:
            unify((a,), (b,))
            return
    if len(b.parts or ()) > len(a.parts or ()):
        a, b = b, a
    b.parent = a  # the finer one is kept, otherwise the left one: members of `a` must not absorb it
    if b.pin is not None:
        pin((a,), b.pin)
    elif a.pin is not None:
        for _, member in b.special:
            pin((member,), a.pin)
    # A family over the atom that it has just become part of is meaningless: there is only one member.
    itself = [entry for entry in a.special if find(entry[0].atom) is a]
    a.special = [entry for entry in a.special if find(entry[0].atom) is not a]
    families, b.special = b.special + itself, []
    for key, member in families:
        if find(key.atom) is find(a):
            unify_or_pin((a,), (member,))
        else:
            _merge_member(a, key, member)


def _merge_member(atom: Atom, key: Key, member: Atom) -> None:
    root = find(atom)
    if root.whole and root.pin is None and not any(known.same(key) for known, _ in root.special):
        root.special.append((key, member))
    else:
        unify_or_pin(specialise((root,), key), (member,))


def _unify_sums(a: Atom, b: Atom) -> None:
    left: list[Product] = [(part,) for part in a.parts or []]
    right: list[Product] = [(part,) for part in b.parts or []]
    while left and right:
        length = min(size_of(left[0]), size_of(right[0]))
        pair = []
        for side in (left, right):
            first = side.pop(0)
            if size_of(first) > length:
                side.insert(0, narrow(first, length, size_of(first) - length)[0])
            pair.append(narrow(first, 0, length)[0])
        unify(*pair)
