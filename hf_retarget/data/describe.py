"""What is known of a dataset before its images are downloaded: labels, and how many images there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_retarget.data.files import check_hub_card
from hf_retarget.data.labels import Names, number_labels, select_classes
from hf_retarget.data.load import count_held_out, count_validation, is_on_hub, open_source
from hf_retarget.data.options import DataOptions
from hf_retarget.data.source import Source, choose_splits
from hf_retarget.data.tables import ask_hub, find_builder, find_columns, try_loading
from hf_retarget.errors import DataError
from hf_retarget.hub import clean_token


@dataclass(frozen=True)
class DataFacts:
    """A dataset, as far as anybody tells without looking at images."""

    name: str
    labels: Names | None
    """The names of the classes, in order, after `classes` has chosen among them."""
    classes: int | None
    images: Mapping[str, int | None]
    """How many each split has; None if nobody tells."""
    training: int | None
    """Images that are left to train on; None if nobody tells."""
    download: int | None
    """Bytes to download; 0 if the data is on this machine, None if nobody tells."""
    revision: str | None = None
    notes: tuple[str, ...] = ()


def describe_data(reference: Any, options: DataOptions, *, token: str | None = None) -> DataFacts:
    """Find a dataset, and read what it says of itself; no image of the Hub is downloaded.

    Example:
        >>> facts = describe_data("fashion-mnist", DataOptions(classes=("Bag", "Coat")))
        >>> facts.classes, dict(facts.images)
        (2, {'test': 1500, 'train': 6000})
    """
    reference = options.reference if isinstance(reference, str) and not reference else reference
    if is_on_hub(reference):
        return _on_hub(str(reference), options, token)
    source = open_source(reference, options)
    train, test = choose_splits(source, options)
    rows = {split: source.splits[split]() for split in (train, test) if split is not None}
    names, numbers = number_labels(rows)
    count = len(names) if names else max(int(each.max()) for each in numbers.values() if len(each)) + 1
    labels, classes = _chosen(names, count, options)
    images = {split: len(each) for split, each in sorted(rows.items())}
    training = _count_training(images[train], test is not None, options, classes, count)
    return DataFacts(source.name, labels, classes, images, training, 0, source.revision, source.notes)


def _count_training(
    images: int | None, has_test: bool, options: DataOptions, chosen: int | None, classes: int | None
) -> int | None:
    """What `load_data` will leave of a split; of some of its classes, their share."""
    if images is None:
        return None
    if options.classes and chosen and classes:
        images = round(images * chosen / classes)
    if options.limit is not None:
        images = min(images, options.limit)
    if not has_test:
        images -= count_held_out(images)
    return images - count_validation(images, options)


def _chosen(names: Names | None, count: int | None, options: DataOptions) -> tuple[Names | None, int | None]:
    if not options.classes:
        return names, count
    if count is not None:
        select_classes(names, count, options.classes)  # says which are not there
    return tuple(options.classes) if names else None, len(options.classes)


def _on_hub(reference: str, options: DataOptions, token: str | None) -> DataFacts:
    name, _, revision = reference.partition("@")
    asked, token = revision or options.revision, clean_token(token)
    try_loading(partial(check_hub_card, name, asked, token), f"dataset '{name}' cannot be found on the Hub")
    load = partial(find_builder, name, options.config, asked, token)
    builder = try_loading(partial(ask_hub, load, name), f"dataset '{name}' cannot be found on the Hub")
    info = builder.info
    splits = {split: (about.num_examples or None) for split, about in (info.splits or {}).items()}
    training = None
    if splits:
        train, test = choose_splits(Source(name, dict.fromkeys(splits, _never)), options)  # says which are not there
        training = _count_training(splits[train], test is not None, options, None, None)
    notes: tuple[str, ...] = ()
    names: Names | None = None
    if info.features is None:
        notes = ("its card does not list the labels; they are known once the images are here",)
    else:
        _, label = find_columns(info.features, options)
        names = tuple(info.features[label].names) if hasattr(info.features[label], "names") else None
    labels, classes = _chosen(names, len(names) if names else None, options)
    images = dict(sorted(splits.items()))
    return DataFacts(name, labels, classes, images, training, info.download_size, builder.hash, notes)


def _never() -> Any:
    raise DataError("the images are not here")
