"""Labels of datasets (numbers or names), mapped to the numbers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_retarget.errors import DataError
from hf_retarget.models.heads import match_names, simplify_names
from hf_retarget.untrusted import MAX_INTEGER
from hf_retarget.words import nearest

if TYPE_CHECKING:
    from hf_retarget.data.tables import Rows

Names = tuple[str, ...]

MAX_CLASSES = 2**16
"""ImageNet-21k has 21,843."""


def number_labels(splits: Mapping[str, Rows]) -> tuple[Names | None, dict[str, Tensor]]:
    """Return the label names, if there are any, and the labels of each split as numbers.

    The first split determines the order of the names.
    """
    found = {split: _numbers(split, rows) for split, rows in splits.items()}
    first, (names, _) = next(iter(found.items()))
    numbers = {}
    for split, (own, values) in found.items():
        if names is not None and own is not None and own != names:
            used = [own[value] for value in values.unique()]
            if unknown := [name for name in used if name not in names]:
                raise DataError(f"'{split}' has labels that '{first}' does not have: {_quote(unknown)}")
            values = torch.tensor([names.index(name) if name in names else -1 for name in own])[values]
        numbers[split] = values
    return names, numbers


def infer_classes(names: Names | None, numbers: Mapping[str, Tensor]) -> int:
    """The number of classes: of names or, without names, of numbers up to the highest label."""
    count = len(names) if names else max((int(each.max()) + 1 for each in numbers.values() if len(each)), default=0)
    images = sum(map(len, numbers.values()))
    if count > MAX_CLASSES or (names is None and count > max(1024, 16 * images)):
        most = f", and at most {MAX_CLASSES:,} are accepted" if count > MAX_CLASSES else f" for {images:,} images"
        raise DataError(f"there are {count:,} classes{most}; are these labels? They are names, or numbers from 0")
    return count


def choose_labels(
    names: Names | None,
    count: int,
    wanted: Sequence[str],
    model_names: Sequence[str] | None = None,
    model: str = "the model",
) -> tuple[Names | None, int, Tensor]:
    """Keep the classes in `wanted`, in this order (all if empty), then number them like the model.

    Labels without names are named by their numbers. Returns the names, the number of classes, and the new number of
    each old label (-1: left out).

    Example:
        >>> choose_labels(("ant", "bee", "cat"), 3, ["cat", "ant"])
        (('cat', 'ant'), 2, tensor([ 1, -1,  0]))
    """
    known = names or tuple(map(str, range(count)))
    numbers = torch.arange(count)
    if unknown := [name for name in wanted if name not in known]:
        raise DataError(f"there is no class '{unknown[0]}'{suggest(unknown[0], known)}")
    if twice := [name for name in wanted if wanted.count(name) > 1]:
        raise DataError(f"classes are listed twice: {_quote(twice)}")
    if wanted:
        numbers = torch.tensor([wanted.index(name) if name in wanted else -1 for name in known])
        names, count = tuple(wanted) if names else None, len(wanted)
    if model_names:
        if names is not None:
            numbers = match_labels(names, model_names, model)[numbers].where(numbers >= 0, -1)
        elif count > len(model_names):
            raise DataError(f"label {count - 1} is out of range: {model} has {len(model_names)} labels, from 0")
        names, count = tuple(model_names), len(model_names)
    return names, count, numbers


def match_labels(names: Names, model_names: Sequence[str], model: str = "the model") -> Tensor:
    """Return the model's number of each label, matched by name, ignoring case, `_` and `-`.

    Example:
        >>> match_labels(("ankle boot", "bag"), ["Bag", "Ankle_boot"])
        tensor([1, 0])
    """
    # Not `Dataset.align_labels_with_mapping`: it lower-cases all names, even if they differ only in case.
    numbers = match_names(names, model_names)
    if numbers is None:
        ours, theirs = simplify_names(names, model_names)
        only_data = [name for name, plain in zip(names, ours, strict=True) if plain not in theirs]
        only_model = [name for name, plain in zip(model_names, theirs, strict=True) if plain not in ours]
        facts = [f"only the data has {_quote(only_data)}"] if only_data else []
        facts += [f"only the model has {_quote(only_model)}"] if only_model else []
        raise DataError(
            f"the labels of the data ({len(names)}) and of {model} ({len(model_names)}) differ: {'; '.join(facts)}. "
            "Use the data the model was tuned on, or select classes (--data-classes)"
        )
    return torch.tensor(numbers)


def check_classes(
    name: str,
    classes: int,
    labels: Sequence[str] | None,
    model: str,
    model_classes: int,
    advice: str = "use the data it was tuned on, or fine-tune it first (hf-retarget finetune)",
) -> None:
    """Raise DataError if the classes of the data cannot be those of a model.

    Data without label names may have fewer classes, as the last ones need not occur.
    """
    if classes > model_classes or (classes < model_classes and labels is not None):
        raise DataError(f"'{name}' has {classes} classes, but '{model}' has {model_classes}; {advice}")


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or a list of all.

    Example:
        >>> suggest("labl", ["image", "label"]), suggest("x", ["image", "label"])
        ("; did you mean 'label'?", "; there are 'image', 'label'")
    """
    return nearest(name, known) or f"; there are {_quote(known, 12)}"


def _numbers(split: str, rows: Rows) -> tuple[Names | None, Tensor]:
    labels, names = rows.labels, rows.names
    if labels and all(isinstance(label, str) for label in labels):
        names = names or tuple(sorted(set(labels)))
        place = {name: number for number, name in enumerate(names)}
        values: list[int | None] = [place.get(label, -1) for label in labels]
    else:
        values = [_integer(label) for label in labels]
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"'{split}', {rows.name(row)}: {labels[row]!r} is not a label; give a number or a name")
        if value < 0 or (names is not None and value >= len(names)):
            limit = f"0 … {len(names) - 1}, as there are {len(names)} label names" if names else "0 or above"
            raise DataError(f"'{split}', {rows.name(row)}: label {labels[row]!r} is out of range; it must be {limit}")
    return names, torch.tensor(values, dtype=torch.long)


def _integer(label: Any) -> int | None:
    """Convert numbers of numpy and torch, and integral floats, as pandas writes them; None for anything else."""
    try:
        whole = not isinstance(label, str) and float(label) == int(label) and abs(int(label)) <= MAX_INTEGER
        return int(label) if whole else None
    except (TypeError, ValueError, OverflowError):
        return None


def _quote(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
