"""Batches depend only on a seed and a number."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hf_retarget.data import BatchCache, ImageData, Split
from hf_retarget.data.tables import ItemRows
from hf_retarget.errors import DataError


class Holes:
    """Pairs of which some cannot be read."""

    def __init__(self, pairs, broken):
        self.pairs, self.broken = pairs, set(broken)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, number):
        if number in self.broken:
            raise OSError("image file is truncated")
        return self.pairs[number]


@pytest.fixture
def make(pairs, preprocess):
    def split(broken=(), count=60):
        targets = torch.tensor([label for _, label in pairs[:count]])
        rows = ItemRows(Holes(pairs[:count], broken), targets.tolist(), None)
        return Split("pictures", rows, torch.arange(count), targets, preprocess)

    return split


def drawn(numbers, batches):
    return [numbers(inputs) for inputs, _ in batches]


def same(ones, others):
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(ones, others, strict=True))


def test_batches_are_in_order_without_a_seed(make, numbers):
    batches = list(make().batches(25))
    assert drawn(numbers, batches) == [list(range(25)), list(range(25, 50)), list(range(50, 60))]
    assert batches[0][1].tolist() == [number % 3 for number in range(25)]


def test_each_epoch_is_shuffled_differently(make, numbers):
    found = list(itertools.chain(*drawn(numbers, make().batches(20, seed=1, count=6))))
    first, second = found[:60], found[60:]
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second != list(range(60))


def test_batches_stay_full_across_epochs(make, numbers):
    batches = drawn(numbers, make().batches(25, seed=1, count=5))
    assert [len(batch) for batch in batches] == [25] * 5
    assert sorted(list(itertools.chain(*batches))[:60]) == list(range(60))


def test_the_seed_determines_the_batches(make):
    ones = list(make().batches(16, seed=3, count=4))
    assert same(ones, make().batches(16, seed=3, count=4))
    assert not same(ones, make().batches(16, seed=4, count=4))


def test_labels_match_their_images(make, numbers):
    for inputs, labels in make().batches(16, seed=3, count=4):
        assert [number % 3 for number in numbers(inputs)] == labels.tolist()


@pytest.mark.parametrize("augment", [False, True])
def test_skip_jumps_to_the_same_batches(make, augment):
    split = make(broken=[5])
    all_of_them = list(split.batches(16, seed=3, count=8, augment=augment))
    assert same(all_of_them[5:], make(broken=[5]).batches(16, seed=3, count=3, skip=5, augment=augment))


def test_skip_and_count_in_order(make, numbers):
    assert drawn(numbers, make().batches(20, skip=1)) == [list(range(20, 40)), list(range(40, 60))]
    assert drawn(numbers, make().batches(20, skip=1, count=1)) == [list(range(20, 40))]
    assert drawn(numbers, make().batches(20, skip=9)) == []


@pytest.mark.parametrize("seed", [None, 3])
def test_workers_do_not_change_batches(make, seed):
    alone, helped = make(broken=[5, 9]), make(broken=[5, 9])
    count = None if seed is None else 5
    ones = list(alone.batches(16, seed=seed, count=count, augment=True))
    assert len(ones) >= 4
    assert same(ones, helped.batches(16, seed=seed, count=count, augment=True, workers=2))
    assert alone.broken == helped.broken
    assert set(alone.broken) == {5, 9}


def test_batches_are_endless_without_a_count(make):
    for workers in (0, 1):
        batches = make().batches(50, seed=0, workers=workers)
        assert len(list(itertools.islice(batches, 7))) == 7


def test_augmentation_is_seeded_for_each_sample(make):
    ones, others = (list(make().batches(60, seed=0, count=2, augment=True)) for _ in range(2))
    assert same(ones, others)
    assert not same(ones, make().batches(60, seed=0, count=2))


def test_global_generators_are_not_touched(make):
    random.seed(1), torch.manual_seed(1)
    expected = random.random(), torch.rand(1)
    random.seed(1), torch.manual_seed(1)
    for workers in (0, 1):
        list(make().batches(16, seed=0, count=2, augment=True, workers=workers))
    assert (random.random(), torch.rand(1)) == expected


def test_broken_images_are_left_out_in_a_single_pass(make, numbers):
    split = make(broken=[3, 30])
    found = list(itertools.chain(*drawn(numbers, split.batches(20))))
    assert found == [number for number in range(60) if number not in (3, 30)]
    assert split.broken == {3: "item 3: image file is truncated", 30: "item 30: image file is truncated"}


def test_broken_images_are_replaced_when_drawing(make, numbers):
    whole = drawn(numbers, make().batches(20, seed=1, count=3))
    split = make(broken=[3, 30])
    mended = drawn(numbers, split.batches(20, seed=1, count=3))
    changed = [
        (a, b) for one, other in zip(whole, mended, strict=True) for a, b in zip(one, other, strict=True) if a != b
    ]
    assert {a for a, _ in changed} == {3, 30}
    assert not {b for _, b in changed} & {3, 30}


def test_known_broken_images_do_not_change_batches(make):
    fresh, knowing = make(broken=[3, 30]), make(broken=[3, 30])
    list(knowing.batches(60))
    assert same(list(fresh.batches(20, seed=1, count=6)), knowing.batches(20, seed=1, count=6))


def test_too_many_broken_images_are_an_error_that_names_them(make):
    assert len(list(make(broken=range(4)).batches(20))) == 3
    with pytest.raises(
        DataError, match=r"5 images of 60 in 'pictures' cannot be read: item 0: image file is truncated;"
    ):
        list(make(broken=range(5)).batches(20))
    with pytest.raises(DataError, match="cannot be read"):
        list(make(broken=range(5)).batches(20, seed=0, count=3, workers=1))


@pytest.mark.parametrize("seed", [None, 0])
def test_only_broken_images_are_an_error(make, seed):
    with pytest.raises(DataError, match="3 images of 3"):
        list(make(broken=range(3), count=3).batches(2, seed=seed, count=4))


def test_up_to_five_per_cent_broken_images_are_tolerated(preprocess, pairs):
    many = pairs * 3
    targets = torch.tensor([label for _, label in many])
    rows = ItemRows(Holes(many, range(9)), targets.tolist(), None)
    split = Split("many", rows, torch.arange(180), targets, preprocess)
    assert sum(len(labels) for _, labels in split.batches(64)) == 171


def test_an_image_can_be_decoded_for_display(make, pairs):
    split = make(broken=[2])
    assert split.image(7) is pairs[7][0]
    with pytest.raises(DataError, match="item 2: image file is truncated"):
        split.image(2)


def test_an_empty_split_is_refused(make):
    empty = make(count=0)
    assert list(empty.batches(4)) == []
    with pytest.raises(DataError, match="no images in 'pictures'"):
        empty.batches(4, seed=0)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 4, "skip": -1}, {"batch_size": 4, "count": -1}])
def test_invalid_numbers_are_refused(make, wrong):
    with pytest.raises(DataError, match="give positive numbers"):
        make().batches(**wrong)


# --- parts of a split


def test_division_keeps_class_shares_and_order(preprocess):
    targets = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    split = Split("pictures", ItemRows([None] * 100, targets.tolist(), None), torch.arange(100), targets, preprocess)
    some, others = split.divide(20, "test", 0)
    assert torch.bincount(some.targets).tolist() == [10, 6, 4]
    assert sorted([*some.indices.tolist(), *others.indices.tolist()]) == list(range(100))
    assert torch.equal(targets[some.indices], some.targets)
    assert some.indices.tolist() == sorted(some.indices.tolist())
    again, another = split.divide(20, "test", 0)[0], split.divide(20, "test", 1)[0]
    assert torch.equal(some.indices, again.indices)
    assert not torch.equal(some.indices, another.indices)


def test_a_few_images_are_taken_in_order(make):
    split = make(broken=[3])
    list(split.batches(20))
    few = split.take(10, seed=0)
    assert few.indices.tolist() == sorted(few.indices.tolist())
    assert (len(few), few.broken) == (10, {})
    assert torch.equal(few.indices, split.take(10, seed=0).indices)
    assert not torch.equal(few.indices, split.take(10, seed=1).indices)
    assert split.take(None, seed=0) is split.take(60, seed=0) is split


def test_renumbering_drops_rows_without_a_number(make):
    split = make().renumber(torch.tensor([1, -1, 0]))
    assert split.indices.tolist() == [number for number in range(60) if number % 3 != 1]
    assert split.targets.tolist() == [{0: 1, 2: 0}[number % 3] for number in split.indices.tolist()]


def test_broken_images_are_noted_in_sentences(make):
    split = make(broken=[3, 7])
    data = ImageData("pictures", None, 3, split, make(), make(broken=[5]), "")
    assert data.broken_notes == []
    for each in (data.train, data.validation, data.test):
        list(each.batches(20))
    assert data.broken_notes == [
        "2 images of 'pictures' could not be read: item 3: image file is truncated",
        "1 image of 'pictures' could not be read: item 5: image file is truncated",
    ]


# --- the cache


def count_draws():
    asked = []

    def draw():
        asked.append(len(asked))
        for _ in range(2):
            yield torch.zeros(4, 3, 8, 8), torch.zeros(4)

    return draw, asked


def test_small_batches_are_drawn_once_per_use():
    draw, asked = count_draws()
    cache = BatchCache((3, 8, 8))
    assert [len(list(cache.get("step 1", 8, draw))) for _ in range(3)] == [2, 2, 2]
    assert asked == [0]
    cache.get("step 2", 8, draw)
    assert asked == [0, 1]
    cache.forget(but="step 2")
    cache.get("step 2", 8, draw)
    cache.get("step 1", 8, draw)
    assert asked == [0, 1, 2]


def test_large_batches_are_never_held_as_a_whole():
    draw, asked = count_draws()
    cache = BatchCache((3, 8, 8), limit=BatchCache((3, 8, 8)).size(8) - 1)
    for _ in range(3):
        batches = cache.get("step 1", 8, draw)
        assert not isinstance(batches, list)
        assert len(list(batches)) == 2
    assert asked == [0, 1, 2]
