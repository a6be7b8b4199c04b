"""From a reference to images that are split, numbered and ready to draw."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_retarget.data import tables
from hf_retarget.data.division import Part
from hf_retarget.data.embedded import EMBEDDED
from hf_retarget.data.folder import open_image_folder
from hf_retarget.data.images import ImageData, Split
from hf_retarget.data.items import open_items
from hf_retarget.data.labels import Names, match_labels, number_labels, select_classes, suggest
from hf_retarget.data.options import DataOptions
from hf_retarget.data.preprocess import Preprocess
from hf_retarget.data.rows import Rows, digest_rows
from hf_retarget.data.source import Source, choose_splits
from hf_retarget.errors import DataError

_HELD_OUT = 0.1  # of the training split, if there is no other to test on

MAX_CLASSES = 2**16
"""ImageNet-21k has 21,843."""

Parts = Mapping[str, Part]


def load_data(
    reference: Any,
    options: DataOptions,
    preprocess: Preprocess,
    *,
    model_labels: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    token: str | None = None,
) -> ImageData:
    """Find a dataset, check it, split it, and number its labels as the model does.

    `reference` is an embedded name, a Hub id, an image folder, parquet or arrow files, a `datasets.Dataset` or
    `DatasetDict`, a torch dataset or any sequence of (image, label), or a mapping from split names to such; if it is
    empty, `options.reference` counts. `labels` names the classes of a sequence that has no `classes` of its own.

    Example:
        >>> gray = Preprocess(input_size=(1, 28, 28), mean=(0.5,), std=(0.5,))
        >>> data = load_data("fashion-mnist", DataOptions(), gray)
        >>> data.classes, len(data.train), len(data.validation), len(data.test)
        (10, 5400, 600, 1500)
    """
    _check(options)
    source = open_source(options.reference if reference == "" else reference, options, labels=labels, token=token)
    train, test = choose_splits(source, options)
    rows = {split: source.splits[split]() for split in (train, test) if split is not None}
    names, numbers = number_labels(rows)
    parts: Parts = {split: Part.of(values) for split, values in numbers.items()}
    names, classes, parts = _keep_classes(names, parts, options.classes)
    if model_labels:
        names, classes, parts = _number_as_model(names, classes, parts, tuple(model_labels))
    divided, notes = _divide(parts, train, test, options)
    if len(divided["train"].targets.unique()) < 2:
        raise DataError(f"'{source.name}' has training images of one class only; at least two are needed")
    sides = {"train": train, "validation": train, "test": test or train}
    splits = {
        name: Split(f"{source.name}, {name}", rows[sides[name]], part.indices, part.targets, preprocess)
        for name, part in divided.items()
    }
    fingerprint = _fingerprint(rows.values(), splits, options, preprocess)
    return ImageData(
        source.name,
        names,
        classes,
        **splits,
        fingerprint=fingerprint,
        revision=source.revision,
        notes=(*source.notes, *notes),
    )


def open_source(
    reference: Any, options: DataOptions, *, labels: Sequence[str] | None = None, token: str | None = None
) -> Source:
    """Find what a reference means, without reading images.

    Example:
        >>> sorted(open_source("fashion-mnist", DataOptions()).splits)
        ['test', 'train']
    """
    if not isinstance(reference, str | Path):
        return open_items(reference, options, labels)
    text, path = str(reference), Path(reference).expanduser()
    if text in EMBEDDED:
        return tables.open_embedded(text, EMBEDDED[text], options)
    if text and path.is_dir():
        if any(next(path.rglob(f"*{ending}"), None) for ending in tables.KINDS):
            return tables.open_table_folder(path, options)
        return open_image_folder(path)
    if path.is_file():
        return tables.open_files([path], path.name, options)
    if glob.has_magic(text):
        if found := sorted(Path(each) for each in glob.glob(str(path), recursive=True)):
            return tables.open_files(found, path.name, options)
        raise DataError(f"no file matches '{text}'")
    if is_on_hub(text):
        return _open_hub(text, options, token)
    raise DataError(
        f"there is no data at '{text}'; give an embedded name ({', '.join(EMBEDDED)}), a Hub id such as "
        "'uoft-cs/cifar10', an image folder, or parquet or arrow files"
    )


def is_on_hub(reference: Any) -> bool:
    """Whether a reference means a dataset of the Hub, and nothing that is here.

    Example:
        >>> is_on_hub("uoft-cs/cifar10"), is_on_hub("fashion-mnist"), is_on_hub("./photos")
        (True, False, False)
    """
    if not isinstance(reference, str) or not reference or reference in EMBEDDED or glob.has_magic(reference):
        return False
    path = Path(reference).expanduser()
    named = reference.count("/") <= 1 and not reference.startswith((".", "/", "~")) and path.suffix not in tables.KINDS
    return named and not path.exists()


def _open_hub(name: str, options: DataOptions, token: str | None) -> Source:
    try:
        return tables.open_hub(name, options, token)
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionError) or options.revision or "@" in name:
            raise  # it is there, but does not have what was asked for
        here = f"; nor is it a file or folder here, nor embedded: {suggest(name, list(EMBEDDED))}"
        raise DataError(f"{error}{here}") from error


def _check(options: DataOptions) -> None:
    if not 0 <= options.validation < 1:
        raise DataError(f"validation is {options.validation}; give a share from 0 up to, but without, 1")
    if options.limit is not None and options.limit < 2:
        raise DataError(f"limit is {options.limit}; at least two images of each split are needed")


def _keep_classes(names: Names | None, parts: Parts, wanted: Names) -> tuple[Names | None, int, Parts]:
    """Only the classes wanted, or all; and how many there are."""
    highest = max((int(part.targets.max()) for part in parts.values() if len(part)), default=-1)
    count = len(names) if names else highest + 1
    if count > MAX_CLASSES:
        raise DataError(f"there are {count:,} classes, and at most {MAX_CLASSES:,} are accepted; are these labels?")
    if not wanted:
        return names, count, parts
    numbers = select_classes(names, count, wanted)
    kept = {split: part.renumbered(numbers) for split, part in parts.items()}
    return tuple(wanted) if names else None, len(wanted), kept


def _number_as_model(names: Names | None, count: int, parts: Parts, model_names: Names) -> tuple[Names, int, Parts]:
    """By name if the data has names; else its numbers must be among the model's."""
    if names is None:
        if count > len(model_names):
            raise DataError(f"label {count - 1} is out of range: the model knows {len(model_names)} labels, from 0 on")
        return model_names, len(model_names), parts
    numbers = match_labels(names, model_names)
    return model_names, len(model_names), {split: part.renumbered(numbers) for split, part in parts.items()}


def _divide(parts: Parts, train: str, test: str | None, options: DataOptions) -> tuple[dict[str, Part], list[str]]:
    """Training, validation and test rows; what is held out comes from the training split."""
    notes = []
    if options.limit is not None:
        parts = {split: part.divided(options.limit, "limit", options.seed)[0] for split, part in parts.items()}
    for split, part in parts.items():
        if not len(part):
            raise DataError(f"there are no images in the split '{split}'" + " of these classes" * bool(options.classes))
    rest = parts[train]
    if test is not None:
        tested = parts[test]
        if options.test_split is None and not test.casefold().startswith("test"):
            notes.append(f"no split is called test: '{test}' is used to test")
    else:
        tested, rest = rest.divided(count_held_out(len(rest)), "test", options.seed)
        notes.append(f"no test split: {_HELD_OUT:.0%} of '{train}' held out ({len(tested)} images)")
    validation, rest = rest.divided(count_validation(len(rest), options), "validation", options.seed)
    return {"train": rest, "validation": validation, "test": tested}, notes


def count_held_out(images: int) -> int:
    """How many of a split are held out to test on, if there is no other."""
    return max(1, round(_HELD_OUT * images))


def count_validation(images: int, options: DataOptions) -> int:
    """How many of the training images are for validation."""
    return max(1, round(options.validation * images)) if options.validation else 0


def _fingerprint(
    rows: Iterable[Rows], splits: Mapping[str, Split], options: DataOptions, preprocess: Preprocess
) -> str:
    """Where the data lies does not count, only what it is."""
    facts = {"options": {**asdict(options), "reference": ""}, "preprocess": asdict(preprocess)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for each in rows:
        digest.update(digest_rows(each).encode())
    for split in splits.values():
        digest.update(torch.stack([split.indices, split.targets]).numpy().tobytes())
    return digest.hexdigest()
