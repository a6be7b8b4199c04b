"""Labelled images as rows of a `datasets` table or a Python dataset; choosing columns and splits."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from hf_retarget.data.labels import Names, suggest
from hf_retarget.errors import DataError
from hf_retarget.recipe.options import DataOptions
from hf_retarget.untrusted import read_bytes

FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that are decoded. Some of PIL's other formats start programs (EPS) or are not images."""
MAX_IMAGE_BYTES = 256 << 20
_LONGEST = 10_000  # times the shorter side

TRAIN = ("train", "training")
TEST = ("test", "testing", "validation", "valid", "val", "dev")
"""Common names of splits, in order of preference."""
USUAL_COLUMNS = {
    "image": ("image", "img", "images", "picture", "photo"),
    "label": ("label", "labels", "fine_label", "class", "target", "category"),
}

_HASH_ALL = 10_000  # up to this number, all images are hashed,
_HASH_SOME = 2_000  # otherwise about this many, evenly spaced
_READ_AT_ONCE = 500
_SMALL_TABLE = 64 * 2**20  # bytes


class Rows(ABC):
    """Images and their original labels, numbers or names."""

    labels: Sequence[Any]
    names: Names | None
    """The names of numeric labels."""
    unlabelled: str = ""
    """If there are no labels, an error message for users that need them; the labels are then all 0."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, row: int) -> bytes:
        """Read one encoded image, or other bytes that identify it."""

    @abstractmethod
    def name(self, row: int) -> str:
        """The name of a row in messages."""

    def image(self, row: int) -> Image.Image:
        """Decode one image; raises whatever the decoder raises."""
        return open_image(self.read(row))

    def item(self, row: int) -> Any:
        """The dataset's own item for a custom preprocessing: an image, or a tensor or array as it is."""
        return self.image(row)

    def read_all(self, rows: Sequence[int]) -> list[bytes]:
        """Read several images; empty for those that cannot be read."""
        return [read_or_empty(self.read, row) for row in rows]


@dataclass(frozen=True)
class Source:
    """A dataset whose splits are opened only when they are used."""

    name: str
    splits: Mapping[str, Callable[[], Rows]]
    revision: str | None = None
    notes: tuple[str, ...] = ()


def choose_splits(name: str, splits: Sequence[str], options: DataOptions) -> tuple[str, str | None]:
    """Choose the training split, and the test split if there is one.

    Example:
        >>> choose_splits("pets", ["validation", "train", "extra"], DataOptions())
        ('train', 'validation')
    """
    for asked in (options.train_split, options.test_split, options.validation_split):
        if asked is not None and asked not in splits:
            raise DataError(f"'{name}' has no split '{asked}'{suggest(asked, splits)}")
    by_name = {split.casefold(): split for split in reversed(splits)}
    train = options.train_split or next((by_name[each] for each in TRAIN if each in by_name), None)
    if train is None and len(splits) > 1:
        raise DataError(
            f"'{name}' has the splits {', '.join(map(repr, splits))}; choose the training split "
            "with 'train_split' (--data-train-split)"
        )
    train = train or splits[0]
    if options.test_split == train:
        raise DataError(f"'{train}' cannot be both the training and the test split; change one of them")
    found = (by_name[each] for each in TEST if each in by_name)
    test = options.test_split or next((each for each in found if each not in (train, options.validation_split)), None)
    if options.validation_split in (train, test) and options.validation_split is not None:
        raise DataError(
            f"'{options.validation_split}' cannot be the validation split: it is used to train or test; choose another"
        )
    return train, test


# ---- tables of `datasets`


def open_tables(
    name: str,
    tables: Any,
    options: DataOptions,
    *,
    revision: str | None = None,
    places: tuple[Path, ...] | None = None,
) -> Source:
    """Open a `datasets.Dataset`, or a mapping from split names to several.

    Rows may refer to files below `places` (anywhere, if None).
    """
    if not isinstance(tables, Mapping):
        tables = {tables.split or "train": tables}
    splits = {str(split): partial(TableRows.of, table, options, places) for split, table in tables.items()}
    return Source(name, splits, revision)


@dataclass(frozen=True)
class TableRows(Rows):
    """Rows of a `datasets.Dataset` whose image column is not decoded."""

    dataset: Any
    image_column: str
    labels: Sequence[Any]
    names: Names | None
    places: tuple[Path, ...] | None
    """Folders with the files to which rows may refer instead of containing an image; None allows any file."""
    unlabelled: str = ""

    @classmethod
    def of(cls, table: Any, options: DataOptions, places: tuple[Path, ...] | None) -> TableRows:
        """Find the columns of images and of labels."""
        import datasets

        table = table.with_format(None)
        image, label = find_columns(table.features, options)
        undecoded = table.cast_column(image, datasets.Image(decode=False))
        if label is None:
            missing = f"no column holds labels; there are {', '.join(map(repr, table.features))}"
            return cls(undecoded, image, [0] * len(table), None, places, missing)
        labels = table.select_columns([label]).with_format("arrow")[:].column(0).to_pylist()
        return cls(undecoded, image, labels, label_names(table.features[label]), places)

    @cached_property
    def _cells(self) -> Sequence[Any]:
        """The encoded images; those of a small table at once, as reading single rows is slower than decoding."""
        cells: Sequence[Any] = self.dataset[self.image_column]
        return cells[:] if self.dataset.data.nbytes <= _SMALL_TABLE else cells

    def read(self, row: int) -> bytes:
        return self._read(self._cells[row])

    def name(self, row: int) -> str:
        cell = self._cells[row]
        return f"row {row}" + (f" ({Path(cell['path']).name})" if cell and cell["path"] else "")

    def read_all(self, rows: Sequence[int]) -> list[bytes]:
        return [read_or_empty(self._read, cell) for cell in self.dataset[list(rows)][self.image_column]]

    def _read(self, cell: dict[str, Any] | None) -> bytes:
        if not cell or not (cell["bytes"] or cell["path"]):
            raise ValueError("there is no image")
        return cell["bytes"] or read_bytes(self._locate(cell["path"]), MAX_IMAGE_BYTES)

    def _locate(self, path: str) -> Path:
        """The file to which a row refers. A downloaded table must not read other files of this machine."""
        if self.places is None:
            return Path(path)
        for place in self.places:
            below = (place / path).resolve()
            if below.is_relative_to(place.resolve()):
                return below
        raise ValueError("the row contains no image, and names a file outside the data")


def find_columns(features: Mapping[str, Any], options: DataOptions) -> tuple[str, str | None]:
    """Find the columns of images and labels: those asked for, the only candidates, or those with a usual name.

    The label column is None if no column could contain labels.
    """
    import datasets

    def could_be_images(feature: Any) -> bool:  # encoded but not declared as images: bytes, or bytes and a path
        if isinstance(feature, dict):
            return set(feature) == {"bytes", "path"}
        return getattr(feature, "dtype", None) in ("binary", "large_binary")

    def could_be_labels(feature: Any) -> bool:
        kinds = ("int", "uint", "float", "bool", "string", "large_string")
        return isinstance(feature, datasets.Value) and feature.dtype.startswith(kinds)

    image = _pick("image", options.image_column, features, datasets.Image, could_be_images)
    declared = any(isinstance(each, datasets.ClassLabel) for each in features.values())
    if options.label_column is None and not declared and not any(map(could_be_labels, features.values())):
        return image, None
    return image, _pick("label", options.label_column, features, datasets.ClassLabel, could_be_labels)


def label_names(feature: Any) -> Names | None:
    """The label names declared by a column."""
    import datasets

    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _pick(
    kind: str, asked: str | None, features: Mapping[str, Any], declared: type, could_be: Callable[[Any], bool]
) -> str:
    certain = [name for name, feature in features.items() if isinstance(feature, declared)]
    possible = [name for name, feature in features.items() if could_be(feature)]
    able, likely = [*certain, *possible], certain or possible
    if asked is not None:
        if asked not in features:
            raise DataError(f"there is no column '{asked}'{suggest(asked, list(features))}")
        if asked not in able:
            better = f"candidates: {', '.join(map(repr, able))}" if able else "no other column does either"
            raise DataError(f"column '{asked}' does not hold {kind}s; {better}")
        return asked
    if not likely:
        raise DataError(f"no column holds {kind}s; there are {', '.join(map(repr, features))}")
    usual = likely if len(likely) == 1 else [name for name in USUAL_COLUMNS[kind] if name in likely]
    if not usual:
        raise DataError(
            f"several columns could hold {kind}s: {', '.join(map(repr, likely))}; "
            f"choose one with '{kind}_column' (--data-{kind}-column)"
        )
    return usual[0]


# ---- Python datasets


def open_items(data: Any, options: DataOptions) -> Source:
    """Open data from Python: one split, or a mapping from split names to items.

    Example:
        >>> pairs = [(np.zeros((8, 8), np.uint8), "cat"), (np.ones((8, 8), np.uint8), "dog")]
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
        return open_tables(name, data, options)
    return Source(name, {str(split): partial(ItemRows.of, items) for split, items in data.items()})


@dataclass(frozen=True)
class ItemRows(Rows):
    """Items of a torch dataset or sequence: (image, label) or only images, which are PIL images, arrays or tensors."""

    dataset: Any
    labels: Sequence[Any]
    names: Names | None
    unlabelled: str = ""

    @classmethod
    def of(cls, items: Any) -> ItemRows:
        """Check the first item, and collect all labels."""
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
            raise DataError(f"a {type(items).__name__} has no length or cannot be indexed; give a map-style dataset")
        if not len(items):
            raise DataError(f"the {type(items).__name__} is empty")
        missing = f"the items of a {type(items).__name__} are not pairs (image, label)"
        if isinstance(first := items[0], (Image.Image, np.ndarray, torch.Tensor)):
            return cls(items, [0] * len(items), None, missing)
        try:
            _, _ = first
        except (TypeError, ValueError) as error:
            raise DataError(missing) from error
        names, whole = None, items
        while not names and whole is not None:  # torchvision's datasets have `classes`; look inside subsets
            names, whole = getattr(whole, "classes", None), getattr(whole, "dataset", None)
        return cls(items, _targets(items), tuple(map(str, names)) if names else None)

    def read(self, row: int) -> bytes:
        try:
            image = self.image(row)
        except DataError:  # a tensor that is not an image
            array = np.asarray(self.item(row))
            return repr((array.dtype, array.shape)).encode() + array.tobytes()
        return repr((image.mode, image.size)).encode() + image.tobytes()

    def name(self, row: int) -> str:
        return f"item {row}"

    def image(self, row: int) -> Image.Image:
        return as_image(self.item(row))

    def item(self, row: int) -> Any:
        return self.dataset[row] if self.unlabelled else self.dataset[row][0]


def _targets(items: Any) -> list[Any]:
    """The labels, from `targets` if possible, since reading an item decodes its image."""
    if hasattr(items, "dataset") and hasattr(items, "indices"):
        whole = _targets(items.dataset)
        return [whole[index] for index in items.indices]
    targets = getattr(items, "targets", None)
    if targets is not None and getattr(items, "target_transform", None) is None and len(targets) == len(items):
        return list(targets.tolist() if hasattr(targets, "tolist") else targets)
    return [items[number][1] for number in range(len(items))]


# ---- images


def open_image(content: bytes) -> Image.Image:
    """Decode an image and apply its EXIF orientation, as `datasets` does; raise whatever PIL raises."""
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_IMAGE_BYTES:,} are read")
    Image.init()  # registers the less common formats
    try:
        with Image.open(io.BytesIO(content), formats=[each for each in FORMATS if each in Image.OPEN]) as image:
            if max(image.size) > _LONGEST * min(image.size):  # scaled, it would fill the memory
                raise ValueError(f"its sides of {image.width} and {image.height} pixels are too different")
            ImageOps.exif_transpose(image, in_place=True)  # also loads it
            if image.mode in ("F", "LAB"):  # PIL would clip floats at 255, and does not convert LAB
                raise ValueError(f"its pixels have mode {image.mode}; save it in colour or greyscale with 8 bits")
            return image
    except UnidentifiedImageError:
        raise ValueError("it is not an image that can be read") from None


def as_image(value: Any) -> Image.Image:
    """Convert an array (height × width × channels) or tensor (channels × height × width) to a PIL image.

    Example:
        >>> as_image(torch.zeros(3, 2, 4)).size
        (4, 2)
    """
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, torch.Tensor):
        value = (value.permute(1, 2, 0) if value.ndim == 3 else value).cpu().numpy()
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3):
        raise DataError(f"{_describe(value)} is not an image; give PIL images, arrays or tensors")
    if value.dtype.kind == "f":
        if not (value.min() >= 0 and value.max() <= 1):
            raise DataError(
                f"an image has values from {value.min():.3g} to {value.max():.3g}, not from 0 to 1; "
                "give images before normalisation, which the model's configuration takes care of, or pass "
                'preprocess="none"'
            )
        value = np.round(value * 255).astype(np.uint8)  # torchvision's to_pil_image would round down
    if value.dtype != np.uint8:
        raise DataError(f"{_describe(value)} is not an image; give bytes from 0 to 255, or floats from 0 to 1")
    return Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[-1] == 1 else value)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = f" of shape {list(shape)} and type {value.dtype}" if shape is not None else ""
    return f"a {type(value).__name__}{kind}"


def hash_rows(rows: Rows) -> list[bytes]:
    """The sha256 of each image or, in a large set, of an evenly spaced sample."""
    count = len(rows)
    picked = range(0, count, 1 if count <= _HASH_ALL else count // _HASH_SOME)
    parts = (picked[start : start + _READ_AT_ONCE] for start in range(0, len(picked), _READ_AT_ONCE))
    return [hashlib.sha256(data).digest() for part in parts for data in rows.read_all(part)]


def read_or_empty(read: Callable[..., bytes], *arguments: Any) -> bytes:
    """Return the result of `read`, or empty bytes if it fails: `Split` reports the error when the image is used."""
    try:
        return read(*arguments)
    except Exception:  # decoders and datasets may raise anything
        return b""
