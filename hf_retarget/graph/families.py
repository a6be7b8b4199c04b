"""Decides, after all operators have been processed, which atoms may vary from block to block, and finds the blocks.

There are two such freedoms, with the same criterion: *every tensor that holds the inner atom also holds the outer one*.

- A specialised atom `d | t=1` (see `hf_retarget.graph.axes`) stays separate from `d` only if `d` never occurs
  without `t`; otherwise the whole family collapses into one atom.
- An atom `d` may have its own permutation for every index of `h` (a wreath product: heads, groups).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from hf_retarget.graph.axes import Atom, Key, Pin, Shape, find, flat, size_of, starts, unify_or_pin


class Place(NamedTuple):
    """A whole atom or a sum at its place in a tensor: the dimension, and the stride of its elements."""

    atom: Atom
    dim: int
    stride: int


@dataclass(frozen=True)
class Path:
    """One block of a tensor with all sums resolved: a product of whole atoms."""

    places: tuple[Place, ...]
    offset: int = 0
    conditions: tuple[Key, ...] = ()

    def partner(self, position: int, outer: Atom) -> int | None:
        """The position of the place of `outer` that belongs to the place at `position`, if it is unambiguous.

        If there are several, as in a square matrix over (h d), it is the one directly before the place.
        """
        found = [i for i, other in enumerate(self.places) if other.atom is outer]
        if len(found) > 1:
            place = self.places[position]
            before = self.places[position - 1] if position else place
            adjacent = before.dim == place.dim and before.stride == place.atom.size * place.stride
            found = [i for i in found if i == position - 1 and adjacent]
        return found[0] if len(found) == 1 else None


def _spread(axis: Iterable[Atom], dim: int, stride: int) -> list[Place]:
    places = []
    for atom in reversed(flat(axis)):
        places.append(Place(atom, dim, stride))
        stride *= atom.size
    return places[::-1]


def _conditioned(place: Place, conditions: Sequence[Key]) -> list[Place]:
    for key, member in place.atom.special:
        if find(member) is not place.atom and any(key.covers(condition) for condition in conditions):
            parts = _spread((member,), place.dim, place.stride)
            return [final for part in parts for final in _conditioned(part, conditions)]
    return [place]


def paths(shape: Shape) -> Iterator[Path]:
    """All blocks of a tensor: each combination of the parts of its sums."""
    places: list[Place] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        places = _spread(shape[dim], dim, stride) + places
        stride *= size_of(shape[dim])
    yield from _resolve(Path(tuple(places)))


def _resolve(path: Path) -> Iterator[Path]:
    for i, place in enumerate(path.places):
        if place.atom.parts is None:
            continue
        for start, part, keys in _parts(place.atom):
            conditions = (*path.conditions, *keys)
            places = [*path.places[:i], *_spread((part,), place.dim, place.stride), *path.places[i + 1 :]]
            resolved = tuple(final for each in places for final in _conditioned(each, conditions))
            yield from _resolve(Path(resolved, path.offset + start * place.stride, conditions))
        return
    yield path


def _parts(atom: Atom) -> Iterator[tuple[int, Atom, list[Key]]]:
    # Nested sums are resolved at once: a part lies in each of them, and may be specialised by any.
    parts = atom.parts or []
    for start, part in zip(starts(parts), map(find, parts), strict=True):
        if part.parts is None:
            yield start, part, [Key(atom, start, part.size)]
        else:
            for inside, piece, keys in _parts(part):
                yield start + inside, piece, [*keys, Key(atom, start + inside, piece.size)]


def distinct(shapes: Iterable[Shape]) -> list[Shape]:
    """The distinct shapes after all unifications; a residual network repeats the same shapes many times."""
    seen: dict[tuple[tuple[int, ...], ...], Shape] = {}
    for shape in shapes:
        seen.setdefault(tuple(tuple(map(id, flat(axis))) for axis in shape), shape)
    return list(seen.values())


# ---------------------------------------------------------------------- families that do not hold


def settle(state: Mapping[str, Shape], held: Sequence[Shape], spaces: Sequence[Shape]) -> list[Shape]:
    """Collapse all families that do not hold, and return the shapes that decide which atom may vary over which.

    `spaces` are the index spaces of contractions, which only add information if an axis is contracted with itself.
    """
    collapse(list(state.values()))  # few and small, and they settle most families
    while True:
        doubled = [space for space in distinct(spaces) if _doubled(space)]
        shapes = [*distinct(held), *doubled]
        collapse(shapes)
        if len(doubled) == sum(_doubled(space) for space in distinct(spaces)):
            return distinct(shapes)


def _doubled(space: Shape) -> bool:
    # Atoms that may turn out to be equal: unified ones, and the members of families.
    seen: set[Atom] = set()
    for atom in [atom for axis in space for atom in flat(axis)]:
        reached = _reached((atom,))
        if seen & reached:
            return True
        seen |= reached
    return False


def collapse(shapes: Sequence[Shape]) -> None:
    """Unify every family that occurs without the atom it varies over."""
    while True:
        offenders = _offenders(distinct(shapes))
        if not offenders:
            return
        for atom, members in offenders:
            for member in members:
                unify_or_pin((atom,), (member,), Pin("misaligned", "parts of one axis that are used differently"))


def _offenders(shapes: Sequence[Shape]) -> list[tuple[Atom, list[Atom]]]:
    loose: dict[Atom, set[Atom]] = {}
    concerned = []
    for shape in shapes:
        reached = (atom for axis in shape for atom in _reached(axis))
        if families := [atom for atom in reached if atom.special and atom.parts is None]:
            concerned.append((shape, families))
            loose |= {atom: _contradictory(atom) for atom in families if atom not in loose}
    if not any(loose.values()):  # paths are well defined only once contradictions are gone
        for shape, families in concerned:
            for path in paths(shape):
                _find_loose(path, families, loose)
    result = []
    for atom, outers in loose.items():
        members = [member for key, member in atom.special if find(key.atom) in outers]
        if members:
            atom.special = [(key, member) for key, member in atom.special if find(key.atom) not in outers]
            result.append((atom, members))
    return result


def _find_loose(path: Path, families: Sequence[Atom], loose: dict[Atom, set[Atom]]) -> None:
    held: dict[Atom, list[Key]] = {}
    for key in path.conditions:
        held.setdefault(find(key.atom), []).append(key)
    for place in path.places:
        for key, _ in place.atom.special:
            conditions = held.get(find(key.atom), [])
            if not conditions or any(key.overlaps(condition) and not key.covers(condition) for condition in conditions):
                loose[place.atom].add(find(key.atom))
    # If an atom occurs twice, it is ambiguous which of the two a family varies over.
    twice = {atom for atom, keys in held.items() if len(keys) > 1}
    for atom in families if twice else ():
        loose[atom] |= {find(key.atom) for key, _ in atom.special} & twice


def _contradictory(atom: Atom) -> set[Atom]:
    # The outer atoms that are impossible, whatever the tensors hold.
    keys = [key for key, _ in atom.special]
    outers = list(dict.fromkeys(find(key.atom) for key in keys))
    pairs = combinations(keys, 2)
    overlapping = {find(one.atom) for one, other in pairs if one.overlaps(other) and not one.same(other)}
    members = [member for _, member in atom.special if find(member) is not atom]
    circular = members and atom in _reached(members)  # a member of its own member: there is only one
    # A family over two outer atoms would have to agree with itself where both hold; it may keep the first.
    return set(outers) if circular else overlapping | set(outers[1:])


def _reached(axis: Iterable[Atom]) -> set[Atom]:
    # All atoms in an axis, including those inside sums and members of families, which no tensor need hold itself.
    found: set[Atom] = set()
    queue = flat(axis)
    while queue:
        atom = queue.pop()
        if atom not in found:
            found.add(atom)
            queue += flat([*(atom.parts or ()), *(member for _, member in atom.special)])
    return found


# ---------------------------------------------------------------------- families that hold


def outers(state: Iterable[Path], others: Iterable[Path]) -> dict[Atom, list[Atom]]:
    """The atoms that each free atom of the model's own tensors (`state`) may vary over, outermost first."""
    candidates: dict[Atom, set[Atom]] = {}
    rank: dict[Atom, int] = {}
    for own, path in [*((True, path) for path in state), *((False, path) for path in others)]:
        for position, place in enumerate(path.places):
            atom = place.atom
            if own:
                rank.setdefault(atom, len(rank))
            if own and atom not in candidates:
                candidates[atom] = {other.atom for other in path.places} - {atom}
            if candidates.get(atom):
                candidates[atom] = {outer for outer in candidates[atom] if path.partner(position, outer) is not None}
    result: dict[Atom, list[Atom]] = {}
    for atom, found in candidates.items():
        if atom.pin is not None:
            continue
        # If two atoms only occur together, each could vary over the other; the one that occurs first is the outer.
        inner_first = {o for o in found if o.pin is None and atom in candidates[o] and rank[o] > rank[atom]}
        kept = found - inner_first
        result[atom] = sorted(kept, key=lambda outer: (len(candidates.get(outer, ())), rank[outer]))
    while unfit := [
        (atom, outer) for atom, its in result.items() for outer in its if not set(result.get(outer, ())) <= set(its)
    ]:
        for atom, outer in unfit:  # nested blocks: what varies over the inner ones must vary over the outer ones, too
            result[atom].remove(outer)
    return result
