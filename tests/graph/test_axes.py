"""The axis algebra: refining, cutting, unifying, specialising and collapsing."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retarget.graph.axes import (
    Atom,
    Key,
    Misaligned,
    Pin,
    Product,
    cut,
    divide,
    find,
    flat,
    leaves,
    narrow,
    pin,
    regroup,
    size_of,
    specialise,
    split,
    starts,
    sum_of,
    unify,
)
from hf_retarget.graph.families import collapse, outers, paths

WHY = Pin("order", "a test")


def sizes(axis: Product) -> list[int]:
    return [atom.size for atom in flat(axis)]


def parts(axis: Product) -> list[int]:
    (atom,) = flat(axis)
    return [part.size for part in atom.parts]


def same(left: Product, right: Product) -> bool:
    return [find(atom) for atom in flat(left)] == [find(atom) for atom in flat(right)]


def labels(axis: Product) -> list[tuple[tuple[int, int], ...]]:
    """The content of every position: its atoms, and the index within each."""
    found: list = [None] * size_of(axis)
    for path in paths((axis,)):
        for indices in product(*(range(place.atom.size) for place in path.places)):
            position = path.offset + sum(i * place.stride for i, place in zip(indices, path.places, strict=True))
            assert found[position] is None, "blocks overlap"
            found[position] = tuple((id(place.atom), i) for i, place in zip(indices, path.places, strict=True))
    assert None not in found, "blocks leave a gap"
    return found


# ---------------------------------------------------------------------- refining


def test_split_makes_a_product_outermost_first():
    atom = Atom(12)
    outer, inner = split(atom, 3)
    assert (outer.size, inner.size) == (3, 4)
    assert flat((atom,)) == [outer, inner]


def test_split_keeps_the_pin():
    outer, inner = split(Atom(12, WHY), 3)
    assert outer.pin == inner.pin == WHY


def test_split_refuses_sizes_that_do_not_divide():
    with pytest.raises(Misaligned):
        split(Atom(12), 5)


def test_split_of_a_sum_splits_every_part():
    first, second = Atom(4), Atom(6)
    outer, inner = split(sum_of([(first,), (second,)]), 5)
    assert (parts((outer,)), inner.size) == ([2, 3], 2)
    assert sizes((first,)) == [2, 2]
    assert sizes((second,)) == [3, 2]
    assert [member.size for _, member in inner.special] == [2, 2], "each part has its own inner axis"


def test_split_of_a_sum_refuses_parts_that_do_not_divide():
    with pytest.raises(Misaligned):
        split(sum_of([(Atom(3),), (Atom(5),)]), 4)


def test_divide_takes_the_inner_size():
    outer, inner = divide((Atom(12),), 3)
    assert (size_of(outer), size_of(inner)) == (4, 3)
    with pytest.raises(Misaligned):
        divide((Atom(12),), 5)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([24], [2, 1, 12], [[2], [], [12]]),
        ([4, 6], [24], [[4, 6]]),
        ([4, 6], [2, 2, 6], [[2], [2], [6]]),
        ([4, 6], [2, 12], [[2], [2, 6]]),
        ([4, 6], [8, 3], [[4, 2], [3]]),
        ([1, 5, 1], [5], [[5]]),
        ([], [1, 1], [[], []]),
    ],
)
def test_regroup_distributes_the_factors(old, new, expected):
    axis = tuple(Atom(size) for size in old)
    assert [sizes(part) for part in regroup(axis, new)] == expected


@pytest.mark.parametrize(("old", "new"), [([4, 3], [6, 2]), ([6], [4]), ([3, 2], [2, 3])])
def test_regroup_refuses_misaligned_sizes(old, new):
    with pytest.raises(Misaligned):
        regroup(tuple(Atom(size) for size in old), new)


def test_regroup_affects_all_unified_axes():
    first, second = Atom(12), Atom(12)
    unify((first,), (second,))
    regroup((first,), [3, 4])
    assert sizes((second,)) == [3, 4]


def test_an_axis_of_one_element_is_the_empty_product():
    assert flat((Atom(1),)) == []
    assert size_of(()) == 1


# ---------------------------------------------------------------------- cutting


def test_cut_makes_a_sum():
    atom = Atom(10)
    cut(atom, [3, 7])
    assert parts((atom,)) == [3, 4, 3]
    assert starts(atom.parts) == [0, 3, 7]


def test_a_second_cut_divides_the_parts():
    atom = Atom(10)
    cut(atom, [4])
    cut(atom, [2, 4, 9])
    assert [leaf.size for leaf in leaves((atom,))] == [2, 2, 5]  # the last part has one element, which is no atom


def test_a_cut_at_the_ends_changes_nothing():
    atom = Atom(10)
    cut(atom, [0, 10])
    assert atom.whole


def test_cut_within_a_product_falls_between_rows():
    atom = sum_of([(Atom(3), Atom(2)), (Atom(4),)])
    cut(atom, [2])
    first, second = atom.parts
    assert [leaf.size for leaf in leaves((first,))] == [2, 2], "1 + 2 rows of 2"
    assert second.whole
    with pytest.raises(Misaligned):
        cut(atom, [3])


def test_sum_of_one_axis_is_that_axis():
    atom = Atom(3)
    assert sum_of([(atom,)]) is atom
    assert sum_of([(Atom(0),), (atom,)]) is atom


def test_narrow_takes_a_part():
    atom = Atom(10)
    piece, keys = narrow((atom,), 2, 5)
    assert parts((atom,)) == [2, 5, 3]
    assert same(piece, (atom.parts[1],))
    assert [(key.start, key.length) for key in keys] == [(2, 5)]


def test_narrow_to_the_whole_changes_nothing():
    atom = Atom(10)
    assert narrow((atom,), 0, 10) == ((atom,), [])
    assert atom.whole


def test_narrow_across_parts_is_a_sum():
    atom = sum_of([(Atom(4),), (Atom(6),)])
    piece, _ = narrow((atom,), 2, 5)
    assert parts(piece) == [2, 3]


def test_narrow_of_a_product_takes_whole_rows_or_part_of_one():
    outer, inner = Atom(3), Atom(4)
    piece, keys = narrow((outer, inner), 4, 8)
    assert sizes(piece) == [2, 4]
    assert [(key.start, key.length) for key in keys] == [(1, 2)]
    piece, keys = narrow((Atom(3), Atom(4)), 5, 2)
    assert size_of(piece) == 2
    assert [(key.start, key.length) for key in keys] == [(1, 1), (1, 2)]
    with pytest.raises(Misaligned):
        narrow((Atom(3), Atom(4)), 2, 4)


def test_narrow_to_nothing():
    piece, keys = narrow((Atom(4),), 2, 0)
    assert (size_of(piece), keys) == (0, [])


# ---------------------------------------------------------------------- unifying


def test_unify_makes_two_atoms_one():
    first, second = Atom(4), Atom(4)
    unify((first,), (second,))
    assert find(first) is find(second)


def test_unify_refuses_different_sizes():
    with pytest.raises(Misaligned):
        unify((Atom(4),), (Atom(5),))


def test_unify_aligns_factors():
    whole, rows, columns = Atom(12), Atom(3), Atom(4)
    unify((whole,), (rows, columns))
    assert same((whole,), (rows, columns))


def test_unify_aligns_products_of_different_factors():
    left, right = (Atom(6), Atom(2)), (Atom(2), Atom(6))
    unify(left, right)
    assert sizes(left) == [2, 3, 2]
    assert same(left, right)


@pytest.mark.parametrize(("left", "right"), [([2, 3], [3, 2]), ([4, 9], [6, 6])])
def test_unify_refuses_misaligned_factors(left, right):
    with pytest.raises(Misaligned):
        unify([Atom(size) for size in left], [Atom(size) for size in right])


def test_unify_aligns_parts():
    left, right = sum_of([(Atom(3),), (Atom(7),)]), sum_of([(Atom(5),), (Atom(5),)])
    unify((left,), (right,))
    assert [leaf.size for leaf in leaves((left,))] == [3, 2, 5]
    assert labels((left,)) == labels((right,))


def test_unify_a_whole_atom_with_a_sum_keeps_the_sum():
    whole, first = Atom(10), Atom(3)
    unify((whole,), (sum_of([(first,), (Atom(7),)]),))
    assert parts((whole,)) == [3, 7]
    assert find(find(whole).parts[0]) is find(first)


def test_unify_a_product_with_a_sum():
    rows, columns = Atom(2), Atom(3)
    joined = sum_of([(Atom(3),), (Atom(3),)])
    unify((rows, columns), (joined,))
    assert labels((rows, columns)) == labels((joined,))


def test_unify_a_sum_of_products_with_a_product():
    joined = sum_of([(Atom(2), Atom(3)), (Atom(4), Atom(3))])
    rows, columns = Atom(6), Atom(3)
    unify((rows, columns), (joined,))
    assert parts((rows,)) == [2, 4]
    assert labels((rows, columns)) == labels((joined,))


@pytest.mark.parametrize("pinned_first", [True, False])
def test_unifying_spreads_a_pin(pinned_first):
    pinned, free = Atom(6, WHY), Atom(6)
    split(free, 2)
    unify(*(((pinned,), (free,)) if pinned_first else ((free,), (pinned,))))
    assert [leaf.pin for leaf in leaves((free,))] == [WHY, WHY]


def test_the_first_reason_is_kept():
    atom = Atom(6)
    pin((atom,), Pin("input"))
    pin((atom,), Pin("output"))
    assert atom.pin == Pin("input")


def test_a_pin_reaches_all_parts_and_members():
    outer, inner = Atom(2), Atom(5)
    member = specialise((inner,), Key(outer, 0, 1))
    pin((inner,), WHY)
    assert [leaf.pin for leaf in leaves(member)] == [WHY]
    joined = sum_of([(Atom(3),), (Atom(4),)])
    pin((joined,), WHY)
    assert [leaf.pin for leaf in leaves((joined,))] == [WHY, WHY]


# ---------------------------------------------------------------------- specialising and collapsing


def test_specialising_twice_gives_the_same_member():
    outer, inner = Atom(3), Atom(5)
    once, again = (specialise((inner,), Key(outer, 1, 1)) for _ in range(2))
    other = specialise((inner,), Key(outer, 2, 1))
    assert same(once, again)
    assert not same(once, other)
    assert not same(once, (inner,))


def test_a_pinned_atom_has_no_members():
    inner = Atom(5, WHY)
    assert same(specialise((inner,), Key(Atom(3), 0, 1)), (inner,))


def test_a_refinement_reaches_the_members():
    inner = Atom(6)
    (member,) = specialise((inner,), Key(Atom(3), 0, 1))
    split(inner, 2)
    assert sizes((member,)) == [2, 3]
    (before,) = specialise((Atom(6),), Key(Atom(3), 0, 1))
    assert find(before).whole


def select(shape: tuple[Product, ...], dim: int, index: int) -> tuple[Product, ...]:
    """`x.select(dim, index)`, as in `Call.narrow`."""
    _, keys = narrow(shape[dim], index, 1)
    others = list(shape)
    for key in keys:
        others = [specialise(axis, key) for axis in others]
    return (*others[:dim], *others[dim + 1 :])


def test_members_stay_separate_if_the_outer_atom_is_always_present():
    x = ((Atom(2),), (Atom(5),))
    first, second = select(x, 0, 0), select(x, 0, 1)
    collapse([x, first, second])
    assert not same(*first, *second)
    held = [{place.atom for place in path.places} for path in paths(x)]
    assert held == [{find(first[0][0])}, {find(second[0][0])}], "x has one of them in each of its rows"


def test_members_collapse_if_the_inner_atom_occurs_alone():
    inner = (Atom(5),)
    x = ((Atom(2),), inner)
    first, second = select(x, 0, 0), select(x, 0, 1)
    collapse([x, first, second, (inner,)])
    assert same(*first, *second)
    assert same(*first, inner)


def test_members_of_overlapping_parts_collapse():
    outer, inner = (Atom(4),), (Atom(5),)
    head, keys = narrow(outer, 0, 3)
    first = specialise(inner, *keys)
    tail, keys = narrow(outer, 1, 3)
    second = specialise(inner, *keys)
    collapse([(outer, inner), (head, first), (tail, second)])
    assert same(first, second)


def test_members_over_two_axes_collapse_where_they_meet():
    # x[1] and x[:, 1] both hold x[1, 1]: its order along the last axis cannot be two things at once.
    x = ((Atom(2),), (Atom(2),), (Atom(5),))
    row, column = select(x, 0, 1), select(x, 1, 1)
    meeting = (select(row, 0, 1), select(column, 0, 1))
    collapse([x, row, column, *meeting])
    assert labels(meeting[0][0]) == labels(meeting[1][0])


def test_members_are_found_in_a_product_inside_a_sum():
    # Six rows, 2 × 2 and 2; the first two of them lie inside the 2 × 2.
    rows, inner = sum_of([(Atom(2), Atom(2)), (Atom(2),)]), Atom(5)
    x = ((rows,), (inner,))
    piece, (key,) = narrow((rows,), 0, 2)
    part = (piece, specialise((inner,), key))
    collapse([x, part])
    assert labels((rows, inner))[:10] == labels((*part[0], *part[1]))


def test_an_inner_atom_varies_over_an_outer_one_that_is_always_present():
    heads, inner, alone = Atom(3), Atom(4), Atom(6)
    weight, bias = ((heads, inner), (alone,)), ((heads, inner),)
    others = [((alone,),), ((heads,),)]
    result = outers([*paths(weight), *paths(bias)], [path for shape in others for path in paths(shape)])
    assert result == {heads: [], inner: [heads], alone: []}


def test_an_inner_atom_that_occurs_alone_does_not_vary():
    heads, inner = Atom(3), Atom(4)
    weight = ((heads, inner),)
    result = outers(paths(weight), [*paths(weight), *paths(((inner,),))])
    assert result[inner] == []


def test_an_inner_atom_does_not_vary_if_the_outer_one_occurs_twice():
    tokens, inner = Atom(3), Atom(4)
    both = ((tokens,), (tokens,), (inner,))
    result = outers(paths(((tokens,), (inner,))), [*paths(((tokens,), (inner,))), *paths(both)])
    assert result[inner] == []


def test_an_inner_atom_may_vary_over_a_pinned_one():
    heads, inner = Atom(3, WHY), Atom(4)
    assert outers(paths(((heads, inner),)), []) == {inner: [heads]}


# ---------------------------------------------------------------------- laws


@st.composite
def axes(draw: st.DrawFn, size: int) -> Product:
    """An axis of the given size: whole, a product, a sum, or a part of something larger."""
    divisors = [n for n in range(2, size) if size % n == 0]
    kinds = ["atom", *(["product"] if divisors else []), *(["sum", "part"] if size > 2 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "atom":
        return (Atom(size),)
    if kind == "product":
        outer = draw(st.sampled_from(divisors))
        return (*draw(axes(outer)), *draw(axes(size // outer)))
    if kind == "sum":
        first = draw(st.integers(1, size - 1))
        return (sum_of([draw(axes(first)), draw(axes(size - first))]),)
    start = draw(st.integers(0, 2))
    return narrow((Atom(size + start + 1),), start, size)[0]


SIZES = st.sampled_from([4, 6, 8, 12])


@given(SIZES.flatmap(lambda size: st.tuples(axes(size), axes(size))))
def test_unified_axes_have_the_same_elements(pair):
    left, right = pair
    try:
        unify(left, right)
    except Misaligned:
        return
    collapse([(left,), (right,)])
    assert labels(left) == labels(right)


@given(SIZES.flatmap(axes), st.data())
def test_regrouping_keeps_every_element_in_place(axis, data):
    size = size_of(axis)
    outer = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    try:
        new = regroup(axis, [outer, size // outer])
    except Misaligned:
        return
    merged = tuple(atom for part in new for atom in part)
    assert [size_of(part) for part in new] == [outer, size // outer]
    assert labels(merged) == labels(axis)


@given(SIZES.flatmap(axes), st.data())
def test_narrowing_takes_the_stated_elements(axis, data):
    size = size_of(axis)
    length = data.draw(st.integers(1, size))
    start = data.draw(st.integers(0, size - length))
    try:
        piece, _ = narrow(axis, start, length)
    except Misaligned:
        return
    assert size_of(piece) == length
    collapse([(axis,), (piece,)])
    assert labels(piece) == labels(axis)[start : start + length]


@given(SIZES.flatmap(axes), st.data())
def test_cutting_and_joining_restores_the_axis(axis, data):
    size = size_of(axis)
    at = data.draw(st.integers(1, size - 1))
    try:
        head, tail = narrow(axis, 0, at)[0], narrow(axis, at, size - at)[0]
    except Misaligned:
        return
    joined = (sum_of([head, tail]),)
    try:
        unify(axis, joined)
    except Misaligned:
        return
    collapse([(axis,), (joined,)])
    assert labels(joined) == labels(axis)
