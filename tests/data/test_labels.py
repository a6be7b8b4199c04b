"""Labels are converted to the model's class numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_retarget.data.labels import check_classes, choose_labels, match_labels, number_labels
from hf_retarget.data.tables import ItemRows
from hf_retarget.errors import DataError


def rows(labels, names=None):
    return ItemRows([None] * len(labels), labels, names)


@pytest.mark.parametrize(
    "labels", [[2, 0, 1], [2.0, 0.0, 1.0], [np.int64(2), np.uint8(0), 1], list(torch.tensor([2, 0, 1]))]
)
def test_all_kinds_of_integers_are_read(labels):
    names, numbers = number_labels({"train": rows(labels)})
    assert names is None
    assert numbers["train"].tolist() == [2, 0, 1]


def test_names_are_sorted_and_shared_by_splits():
    names, numbers = number_labels({"train": rows(["c", "a", "b"]), "test": rows(["b", "c"])})
    assert names == ("a", "b", "c")
    assert numbers["train"].tolist() == [2, 0, 1]
    assert numbers["test"].tolist() == [1, 2]


def test_splits_with_another_order_of_names_follow_the_first():
    _, numbers = number_labels({"train": rows([0, 1], ("a", "b")), "test": rows([0, 1], ("b", "a"))})
    assert numbers["test"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": rows([0, -1])}, r"'train', item 1: label -1 is out of range; it must be 0 or above"),
        ({"train": rows([0, 2], ("a", "b"))}, r"label 2 is out of range; it must be 0 … 1, as there are 2 label names"),
        ({"train": rows([0, None])}, r"None is not a label"),
        ({"train": rows([0, float("nan")])}, r"nan is not a label"),
        ({"train": rows([0, 0.5])}, r"0\.5 is not a label"),
        ({"train": rows([0, [1, 2]])}, r"\[1, 2\] is not a label"),
        ({"train": rows([0, "a"])}, r"'a' is not a label"),
        ({"train": rows(["a", "b"]), "test": rows(["c"])}, r"'test' has labels that 'train' does not have: 'c'"),
    ],
)
def test_invalid_labels_are_refused(splits, message):
    with pytest.raises(DataError, match=message):
        number_labels(splits)


def test_classes_are_chosen_by_number_and_with_a_hint():
    names, count, numbers = choose_labels(None, 4, ["3", "1"])
    assert (names, count, numbers.tolist()) == (None, 2, [-1, 1, -1, 0])
    with pytest.raises(DataError, match="no class 'Baq'; did you mean 'Bag'"):
        choose_labels(("Bag", "Coat"), 2, ["Baq"])
    with pytest.raises(DataError, match="twice: 'Bag'"):
        choose_labels(("Bag", "Coat"), 2, ["Bag", "Bag"])


def test_chosen_classes_are_numbered_like_the_model():
    names, count, numbers = choose_labels(("ant", "bee", "cat"), 3, ["cat", "ant"], ["Ant", "Cat"])
    assert (names, count, numbers.tolist()) == (("Ant", "Cat"), 2, [0, -1, 1])


def test_match_labels_prefers_exact_names():
    assert match_labels(("A", "a"), ["a", "A"]).tolist() == [1, 0]
    assert match_labels(("t-shirt", "Dress"), ["dress", "T_shirt"]).tolist() == [1, 0]


def test_match_labels_names_the_differences():
    with pytest.raises(
        DataError,
        match=r"data \(2\) and of the model \(3\) differ: only the data has 'bee'; only the model has 'cat', 'dog'",
    ):
        match_labels(("ant", "bee"), ["cat", "ant", "dog"])
    with pytest.raises(DataError, match=r"data \(1\) and of 'tuned' \(2\) differ"):
        match_labels(("ant",), ["ant", "dog"], "'tuned'")


@pytest.mark.parametrize(
    ("count", "labels", "fine"),
    [
        (3, ("a", "b", "c"), True),
        (3, None, True),
        (2, None, True),
        (2, ("a", "b"), False),
        (4, None, False),
    ],
)
def test_data_and_model_have_the_same_classes(count, labels, fine):
    if fine:
        check_classes("pets", count, labels, "org/model", 3)
    else:
        with pytest.raises(DataError, match=rf"'pets' has {count} classes, but 'org/model' has 3; choose it"):
            check_classes("pets", count, labels, "org/model", 3, "choose it")
