"""Data that Python has already: `datasets`, torch datasets, and sequences of (image, label)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hf_retarget.data.options import DataOptions
from hf_retarget.data.rows import ItemRows, as_image
from hf_retarget.data.source import Source
from hf_retarget.data.tables import open_tables
from hf_retarget.errors import DataError


def open_items(data: Any, options: DataOptions, labels: Sequence[str] | None = None) -> Source:
    """One split, or a mapping from the names of splits to their items.

    Example:
        >>> from PIL import Image
        >>> pairs = [(Image.new("L", (8, 8)), "cat"), (Image.new("L", (8, 8)), "dog")]
        >>> len(open_items({"train": pairs}, DataOptions()).splits["train"]())
        2
    """
    import datasets

    if not isinstance(data, Mapping):
        data = {"train": data}
    if not data:
        raise DataError("the mapping from splits to data is empty; give at least {'train': …}")
    name = type(next(iter(data.values()))).__name__
    if all(isinstance(split, datasets.Dataset) for split in data.values()):
        return open_tables(name, {str(split): table for split, table in data.items()}, options)
    return Source(name, {str(split): partial(_open_rows, items, labels) for split, items in data.items()})


def _open_rows(items: Any, labels: Sequence[str] | None) -> ItemRows:
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise DataError(f"a {type(items).__name__} has no length or no items by number; give a map-style dataset")
    if not len(items):
        raise DataError(f"the {type(items).__name__} is empty")
    try:
        image, _ = items[0]
    except (TypeError, ValueError) as error:
        raise DataError(f"the items of a {type(items).__name__} are not pairs (image, label)") from error
    as_image(image)  # says what is wrong with all images before any is needed
    names = labels or _names(items)
    return ItemRows(items, _targets(items), tuple(map(str, names)) if names else None)


def _names(items: Any) -> Sequence[str] | None:
    """torchvision's datasets call them `classes`; a subset has those of the whole."""
    return getattr(items, "classes", None) or (_names(items.dataset) if hasattr(items, "dataset") else None)


def _targets(items: Any) -> list[Any]:
    """From `targets` or a subset's whole if possible: asking for each item decodes its image."""
    if hasattr(items, "dataset") and hasattr(items, "indices"):
        whole = _targets(items.dataset)
        return [whole[index] for index in items.indices]
    targets = getattr(items, "targets", None)
    if targets is not None and getattr(items, "target_transform", None) is None and len(targets) == len(items):
        return list(targets.tolist() if hasattr(targets, "tolist") else targets)
    return [items[number][1] for number in range(len(items))]
