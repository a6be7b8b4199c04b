"""Labels as they are found (numbers or names), and the numbers a model knows them by."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_retarget.data.rows import Rows
from hf_retarget.errors import DataError

Names = tuple[str, ...]


def number_labels(splits: Mapping[str, Rows]) -> tuple[Names | None, dict[str, Tensor]]:
    """The label names, if there are any, and the labels of each split as numbers; the first split decides the order.

    Example:
        >>> from hf_retarget.data.rows import ItemRows
        >>> number_labels({"train": ItemRows([None] * 3, ["dog", "cat", "dog"], None)})
        (('cat', 'dog'), {'train': tensor([1, 0, 1])})
    """
    found = {split: _numbers(split, rows) for split, rows in splits.items()}
    first, (names, _) = next(iter(found.items()))
    numbers = {}
    for split, (own, values) in found.items():
        if names is not None and own is not None and own != names:
            used = [own[value] for value in values.unique()]
            if strange := [name for name in used if name not in names]:
                raise DataError(f"'{split}' has labels that '{first}' does not have: {_quote(strange)}")
            values = torch.tensor([names.index(name) if name in names else -1 for name in own])[values]
        numbers[split] = values
    return names, numbers


def select_classes(names: Names | None, count: int, wanted: Sequence[str]) -> Tensor:
    """The new number of each old label if only `wanted` are kept, in this order; -1 for those that are not.

    Labels without names are called by their numbers.

    Example:
        >>> select_classes(("ant", "bee", "cat"), 3, ["cat", "ant"])
        tensor([ 1, -1,  0])
    """
    known = names or tuple(str(number) for number in range(count))
    for name in wanted:
        if name not in known:
            raise DataError(f"there is no class '{name}'; {suggest(name, known)}")
    if len(set(wanted)) < len(wanted):
        raise DataError(f"classes are named twice: {_quote([name for name in wanted if wanted.count(name) > 1])}")
    return torch.tensor([wanted.index(name) if name in wanted else -1 for name in known])


def match_labels(names: Names, model_names: Sequence[str]) -> Tensor:
    """The model's number of each of the data's labels, by name; upper case and `_` or `-` for a space do not matter.

    Example:
        >>> match_labels(("ankle boot", "bag"), ["Bag", "Ankle_boot"])
        tensor([1, 0])
    """
    ours, theirs = [_plain(name) for name in names], [_plain(name) for name in model_names]
    if len(set(ours)) < len(names) or len(set(theirs)) < len(model_names):  # plain names do not tell them apart
        ours, theirs = list(names), list(model_names)
    if set(ours) != set(theirs):
        only_data = [name for name, plain in zip(names, ours, strict=True) if plain not in theirs]
        only_model = [name for name, plain in zip(model_names, theirs, strict=True) if plain not in ours]
        facts = [f"only the data has {_quote(only_data)}"] if only_data else []
        facts += [f"only the model has {_quote(only_model)}"] if only_model else []
        raise DataError(
            f"the labels of the data ({len(names)}) and of the model ({len(model_names)}) differ: {'; '.join(facts)}. "
            "Choose the data the model was tuned on, or keep some classes with 'classes'"
        )
    place = {name: number for number, name in enumerate(theirs)}
    return torch.tensor([place[name] for name in ours])


def suggest(name: str, known: Sequence[str]) -> str:
    """A hint for a name that is not among those known.

    Example:
        >>> suggest("labl", ["image", "label"])
        "did you mean 'label'?"
        >>> suggest("x", ["image", "label"])
        "there are 'image', 'label'"
    """
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {_quote(known, 12)}"


def _numbers(split: str, rows: Rows) -> tuple[Names | None, Tensor]:
    labels, names = rows.labels, rows.names
    if len(labels) != len(rows):
        raise DataError(f"'{split}' has {len(rows)} images and {len(labels)} labels")
    if labels and all(isinstance(label, str) for label in labels):
        names = names or tuple(sorted(set(labels)))
        place = {name: number for number, name in enumerate(names)}
        values: list[int | None] = [place.get(label, -1) for label in labels]
    else:
        values = [_integer(label) for label in labels]
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"'{split}', {rows.name(row)}: {labels[row]!r} is not a label; give one number or one name")
        if value < 0 or (names is not None and value >= len(names)):
            limit = f"0 … {len(names) - 1}, as there are {len(names)} label names" if names else "0 or above"
            raise DataError(f"'{split}', {rows.name(row)}: label {labels[row]!r} is out of range; it must be {limit}")
    return names, torch.tensor(values, dtype=torch.long)


def _integer(label: Any) -> int | None:
    """Also of numpy's and torch's numbers, and of floats that are whole, as pandas writes them."""
    try:
        return int(label) if not isinstance(label, str) and float(label) == int(label) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def _quote(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
