"""Loads a dataset from a reference, split and with numbered labels, or only describes it."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_retarget.data.batches import ImageData, Split
from hf_retarget.data.files import EMBEDDED, KINDS, open_embedded, open_files, open_image_folder, open_table_folder
from hf_retarget.data.hub import find_on_hub, open_hub
from hf_retarget.data.labels import Names, choose_labels, infer_classes, number_labels
from hf_retarget.data.preprocess import Preprocess
from hf_retarget.data.tables import (
    ItemRows,
    Rows,
    Source,
    choose_splits,
    find_columns,
    hash_rows,
    label_names,
    open_items,
)
from hf_retarget.errors import DataError
from hf_retarget.recipe.options import DataOptions

NO_DATA = "none"
"""The reference for a port without images."""

_HELD_OUT = 0.1  # of the training split, if there is no test split
_UNREAD = hashlib.sha256().digest()
"""The hash of an unreadable image."""


def load_data(
    reference: Any,
    options: DataOptions,
    preprocess: Preprocess,
    *,
    model_labels: Sequence[str] | None = None,
    model: str = "the model",
    token: str | None = None,
    need_labels: bool = True,
) -> ImageData:
    """Find a dataset, check it, split it, and number its labels like the model.

    `reference` is an embedded name, a Hub id, an image folder, parquet or arrow files, a `datasets.Dataset` or
    `DatasetDict`, a torch dataset or any sequence of (image, label), or a mapping from split names to any of these; if
    it is empty, `options.reference` is used.

    Example:
        >>> gray = Preprocess(input_size=(1, 28, 28), mean=(0.5,), std=(0.5,))
        >>> data = load_data("fashion-mnist", DataOptions(), gray)
        >>> data.classes, len(data.train), len(data.validation), len(data.test)
        (10, 5400, 600, 1500)
    """
    source = _open(reference, options, token)
    train, test, rows = _open_splits(source, options)
    labelled = not any(each.unlabelled for each in rows.values())
    if not labelled:
        _check_unlabelled(rows, options, need_labels)
    names, targets = number_labels(rows)
    count = infer_classes(names, targets) if labelled else max(1, len(model_labels or ()))  # all have label 0
    names, classes, numbers = choose_labels(names, count, options.classes, model_labels, model)
    first = rows[train]
    if len(first) and (preprocess.transform or isinstance(first, ItemRows)):  # fail early, on the first item
        preprocess = preprocess.fit(first.item(0) if preprocess.transform else first.image(0))
    found = {
        split: Split(split, rows[split], torch.arange(len(each)), each, preprocess).renumber(numbers)
        for split, each in targets.items()
    }
    divided, notes = _divide(found, train, test, options)
    hashed = {split: hash_rows(each) for split, each in rows.items()}
    if test is not None and (again := set(hashed[test]) & set(hashed[train]) - {_UNREAD}):
        count = sum(each in again for each in hashed[test])
        notes.insert(
            0, f"{count} of {len(hashed[test])} test images are also training images: scores on them are too high"
        )
    single = test is None and len(source.splits) == 1
    if labelled and len(divided["train"].targets.unique()) < 2:
        raise DataError(f"'{source.name}' has training images of only one class; at least two are needed")
    splits = {name: replace(split, name=f"{source.name}, {name}") for name, split in divided.items()}
    return ImageData(
        source.name,
        names,
        classes,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        fingerprint=_fingerprint(rows, hashed, splits.values(), options, preprocess),
        revision=source.revision,
        notes=(*source.notes, *notes, *([f"images: {preprocess.sentence}"] if preprocess.transform else [])),
        held_out=notes[-1] if single else "",
        labelled=labelled,
    )


def _check_unlabelled(rows: Mapping[str, Rows], options: DataOptions, need_labels: bool) -> None:
    if need_labels:
        raise DataError(next(each.unlabelled for each in rows.values() if each.unlabelled))
    if not all(each.unlabelled for each in rows.values()):
        bare = next(split for split, each in rows.items() if each.unlabelled)
        raise DataError(f"only some splits have labels ('{bare}' has none); give labels to all, or to none")
    if options.classes:
        raise DataError("images without labels cannot be selected by class; leave out --data-classes")


@dataclass(frozen=True)
class DataDescription:
    """What is known of a dataset without reading images; None where unknown."""

    name: str
    labels: Names | None
    """The names of the classes, in order, after selection by `DataOptions.classes`."""
    classes: int | None
    images: Mapping[str, int | None]
    """The number of images in each split, of the selected classes if the label of each image is known."""
    divided: Mapping[str, int | None]
    """The number of images to train, validate and test on."""
    download: int | None
    """Bytes to download; 0 if the data is on this machine."""
    revision: str | None = None
    notes: tuple[str, ...] = ()
    counts: Mapping[str, tuple[int, ...]] | None = None
    """The number of `training` and `test` images of each class; None if labels are unknown."""


def describe_data(reference: Any, options: DataOptions, *, token: str | None = None) -> DataDescription:
    """Find a dataset and describe it, without downloading images.

    Example:
        >>> facts = describe_data("fashion-mnist", DataOptions(classes=("Bag", "Coat")))
        >>> facts.classes, dict(facts.images)
        (2, {'test': 300, 'train': 1200})
    """
    if isinstance(reference, str) and is_hub_dataset(reference or options.reference):
        return _describe_hub(reference or options.reference, options, token)
    source = _open(reference, options)
    train, test, rows = _open_splits(source, options)
    names, targets = number_labels(rows)
    labelled = not any(each.unlabelled for each in rows.values())
    count = infer_classes(names, targets) if labelled else 0
    labels, classes, numbers = choose_labels(names, count, options.classes)
    images = {
        split: int((numbers[targets[split]] >= 0).sum()) if labelled else len(each)
        for split, each in sorted(rows.items())
    }
    chosen = {"training": numbers[targets[train]]} | ({} if test is None else {"test": numbers[targets[test]]})
    counts = {name: tuple(each[each >= 0].bincount(minlength=classes).tolist()) for name, each in chosen.items()}
    return DataDescription(
        name=source.name,
        labels=labels,
        classes=classes if labelled else None,
        images=images,
        divided=_count_divided(images, train, test, options),
        download=0,
        revision=source.revision,
        notes=source.notes,
        counts=counts if labelled else None,
    )


def _describe_hub(reference: str, options: DataOptions, token: str | None) -> DataDescription:
    name, builder = find_on_hub(reference, options, token)
    info = builder.info
    images = {split: (about.num_examples or None) for split, about in sorted((info.splits or {}).items())}
    names, divided = None, dict[str, int | None]()
    notes = list[str]()
    if images:
        train, test = choose_splits(name, list(info.splits), options)
        divided = _count_divided(images, train, test, options)
    if info.features is None:
        notes.append("its card does not list the labels; they will be known after the download")
    else:
        column = find_columns(info.features, options)[1]
        names = label_names(info.features[column]) if column else None
    if options.classes and images:
        notes.append("images are counted over all classes; those selected will be known after the download")
    labels, classes = names, len(names) if names else len(options.classes) or None
    if names:
        labels, classes, _ = choose_labels(names, len(names), options.classes)
    return DataDescription(name, labels, classes, images, divided, info.download_size, builder.hash, tuple(notes))


def is_hub_dataset(reference: str) -> bool:
    """Whether a reference names a dataset on the Hub and nothing on this machine.

    Example:
        >>> is_hub_dataset("uoft-cs/cifar10"), is_hub_dataset("fashion-mnist"), is_hub_dataset("./photos")
        (True, False, False)
    """
    if not reference or reference in EMBEDDED or glob.has_magic(reference):
        return False
    path = Path(reference).expanduser()
    named = reference.count("/") <= 1 and not reference.startswith((".", "/", "~")) and path.suffix not in KINDS
    return named and not path.exists()


def _open(reference: Any, options: DataOptions, token: str | None = None) -> Source:
    """Resolve a reference, and open the dataset without reading images."""
    if not isinstance(reference, str | Path):
        return open_items(reference, options)
    text = str(reference) if reference != "" else options.reference
    path = Path(text).expanduser()
    if text in EMBEDDED:
        return open_embedded(text, EMBEDDED[text], options)
    if text and path.is_dir():
        if any(next(path.rglob(f"*{ending}"), None) for ending in KINDS):
            return open_table_folder(path, options)
        return open_image_folder(path)
    if path.is_file():
        return open_files([path], path.name, options)
    if glob.has_magic(text):
        if found := sorted(Path(each) for each in glob.glob(str(path), recursive=True)):
            return open_files(found, path.name, options)
        raise DataError(f"no file matches '{text}'")
    if is_hub_dataset(text):
        return open_hub(text, options, token)
    raise DataError(
        f"there is no data at '{text}'; give an embedded name ({', '.join(EMBEDDED)}), a Hub id such as "
        "'uoft-cs/cifar10', an image folder, or parquet or arrow files"
    )


def _open_splits(source: Source, options: DataOptions) -> tuple[str, str | None, dict[str, Rows]]:
    train, test = choose_splits(source.name, list(source.splits), options)
    wanted = (train, test, options.validation_split)
    return train, test, {split: source.splits[split]() for split in wanted if split is not None}


def _divide(
    splits: Mapping[str, Split], train: str, test: str | None, options: DataOptions
) -> tuple[dict[str, Split], list[str]]:
    """Make training, validation and test splits; held-out images come from the training split."""
    notes = []
    if options.limit is not None:
        splits = {name: split.divide(options.limit, "limit", options.seed)[0] for name, split in splits.items()}
    for name, split in splits.items():
        if not len(split):
            raise DataError(f"there are no images in the split '{name}'" + " of these classes" * bool(options.classes))
    rest = splits[train]
    counts = _count_divided({name: len(each) for name, each in splits.items()}, train, test, options)
    if test is not None:
        tested = splits[test]
        if options.test_split is None and not test.casefold().startswith("test"):
            notes.append(f"there is no split named test: '{test}' is used instead")
    else:
        tested, rest = rest.divide(counts["test"] or 0, "test", options.seed)
        notes.append(f"no test split: {_HELD_OUT:.0%} of '{train}' held out ({len(tested)} images)")
    if options.validation_split is not None:
        validation = splits[options.validation_split]
    else:
        validation, rest = rest.divide(counts["validation"] or 0, "validation", options.seed)
    return {"train": rest, "validation": validation, "test": tested}, notes


def _count_divided(
    images: Mapping[str, int | None], train: str, test: str | None, options: DataOptions
) -> dict[str, int | None]:
    """The sizes of the splits that `_divide` makes."""
    found = {
        name: each if each is None or options.limit is None else min(each, options.limit)
        for name, each in images.items()
    }
    rest, tested, asked = found[train], found[test] if test is not None else None, options.validation_split
    if rest is None:
        return {}
    if test is None:
        tested = max(1, round(_HELD_OUT * rest))
        rest -= tested
    if asked is not None:
        return {"train": rest, "validation": found[asked], "test": tested}
    validation = max(1, round(options.validation * rest)) if options.validation else 0
    return {"train": rest - validation, "validation": validation, "test": tested}


def _fingerprint(
    rows: Mapping[str, Rows],
    hashed: Mapping[str, list[bytes]],
    splits: Iterable[Split],
    options: DataOptions,
    preprocess: Preprocess,
) -> str:
    """A hash of content and options, independent of where the data is."""
    chosen = {**asdict(options), "reference": ""}
    if options.validation_split is None:  # added later: keep the fingerprints of earlier results
        del chosen["validation_split"]
    facts = {"options": chosen, "preprocess": preprocess.facts}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, each in rows.items():
        digest.update(hashlib.sha256(f"{len(each)}".encode() + b"".join(hashed[name])).hexdigest().encode())
    for split in splits:
        digest.update(torch.stack([split.indices, split.targets]).numpy().tobytes())
    return digest.hexdigest()
