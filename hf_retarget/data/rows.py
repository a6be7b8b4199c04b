"""Labelled pictures that are read one by one: rows of a table, files of a folder, items of a Python dataset."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from hf_retarget.errors import DataError
from hf_retarget.untrusted import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_READ_ALL = 10_000  # up to so many pictures, a digest reads all;
_READ_SOME = 2_000  # beyond, about so many, evenly spaced
_AT_ONCE = 500
_SMALL = 64 * 2**20  # bytes
_ORIENTATION = 0x0112  # the number of this EXIF entry


MAX_IMAGE_BYTES = 256 << 20
"""Of one picture."""
FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""Pictures that are decoded. Of the others that PIL knows, some call programs (EPS) or are no pictures at all."""


class Rows(Protocol):
    """Pictures and their labels, as they were found: numbers or names."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Sequence[Any]:
        """The labels of all rows, without looking at the pictures."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """What the numbers among the labels stand for."""

    def image(self, row: int) -> Image:
        """Decode one picture; raises whatever the decoder does."""

    def name(self, row: int) -> str:
        """What to call this row in a message."""

    def raw(self, rows: Sequence[int]) -> list[bytes]:
        """Bytes that differ where pictures differ."""


@dataclass(frozen=True)
class TableRows:
    """Rows of a `datasets.Dataset` whose image column is not decoded."""

    dataset: Any
    image_column: str
    label_column: str
    names: tuple[str, ...] | None
    places: tuple[Path, ...] | None = None
    """Folders below which a row may name a file instead of holding it; None if the table is one of Python's own."""

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def labels(self) -> Sequence[Any]:
        """The label column."""
        table = self.dataset.select_columns([self.label_column]).with_format("arrow")[:]
        labels: list[Any] = table.column(0).to_pylist()
        return labels

    @cached_property
    def _cells(self) -> Sequence[Any]:
        """The encoded pictures; those of a small table all at once, as rows one by one take longer than decoding."""
        cells: Sequence[Any] = self.dataset[self.image_column]
        return cells[:] if self.dataset.data.nbytes <= _SMALL else cells

    def image(self, row: int) -> Image:
        """Decode one picture."""
        cell = self._cells[row]
        if not cell or (cell["bytes"] is None and not cell["path"]):
            raise ValueError("there is no picture")
        return open_image(self._locate(cell["path"]) if cell["bytes"] is None else cell["bytes"])

    def name(self, row: int) -> str:
        """The row's number, and the file it came from if the table knows."""
        cell = self._cells[row]
        return f"row {row}" + (f" ({Path(cell['path']).name})" if cell and cell["path"] else "")

    def raw(self, rows: Sequence[int]) -> list[bytes]:
        """The encoded pictures; of those outside the table, the file's bytes."""
        cells = self.dataset[list(rows)][self.image_column]
        return [(cell["bytes"] or self._file_of(cell["path"])) if cell else b"" for cell in cells]

    def _file_of(self, path: str | None) -> bytes:
        try:
            return _bytes_of(self._locate(path)) if path else b""
        except ValueError:
            return b""

    def _locate(self, path: str) -> Path:
        """The file that a row names, if it may: a table of a stranger must not read what else is on this machine."""
        if self.places is None:
            return Path(path)
        for place in self.places:
            below = (place / path).resolve()
            if below.is_relative_to(place.resolve()):
                return below
        raise ValueError("the row holds no picture, but names a file outside the data")


@dataclass(frozen=True)
class FileRows:
    """Files of a folder.

    Example:
        >>> FileRows(Path("pets"), (Path("pets/cat/1.jpg"),), (0,), ("cat", "dog")).name(0)
        'cat/1.jpg'
    """

    folder: Path
    paths: tuple[Path, ...]
    labels: Sequence[int]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, row: int) -> Image:
        """Decode one file."""
        return open_image(self.paths[row])

    def name(self, row: int) -> str:
        """The path inside the folder."""
        return self.paths[row].relative_to(self.folder).as_posix()

    def raw(self, rows: Sequence[int]) -> list[bytes]:
        """The files as they are."""
        return [_bytes_of(self.paths[row]) for row in rows]


@dataclass(frozen=True)
class ItemRows:
    """Items of a torch dataset or of any sequence of (image, label): PIL images, arrays or tensors.

    Example:
        >>> ItemRows([(np.zeros((2, 2), np.uint8), 1)], (1,), None).image(0).size
        (2, 2)
    """

    dataset: Any
    labels: Sequence[Any]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.dataset)

    def image(self, row: int) -> Image:
        """Ask for one item."""
        return as_image(self.dataset[row][0])

    def name(self, row: int) -> str:
        """The item's number."""
        return f"item {row}"

    def raw(self, rows: Sequence[int]) -> list[bytes]:
        """The decoded pictures: there is nothing else to go by."""
        found = []
        for row in rows:
            try:
                picture = self.image(row)
                found.append(repr((picture.mode, picture.size)).encode() + picture.tobytes())
            except Exception:  # whatever the dataset raises: `Split` names it when the picture is needed
                found.append(b"")
        return found


def open_image(data: bytes | str | Path) -> Image:
    """Decode a picture and turn it as its EXIF orientation says, as `datasets` does; raises whatever PIL does."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = data if isinstance(data, bytes) else read_bytes(data, MAX_IMAGE_BYTES)
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_IMAGE_BYTES:,} are read")
    try:
        with Image.open(io.BytesIO(content), formats=_formats()) as picture:
            picture.load()
            turned = picture.getexif().get(_ORIENTATION, 1) != 1
            return ImageOps.exif_transpose(picture) if turned else picture
    except UnidentifiedImageError:
        raise ValueError("it is no image that can be read") from None


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()  # else PIL does not know all of them
    return tuple(each for each in FORMATS if each in Image.OPEN)


def as_image(value: Any) -> Image:
    """A PIL image from a PIL image, an array (height × width × channels) or a tensor (channels × height × width).

    Example:
        >>> as_image(torch.zeros(3, 2, 4)).size
        (4, 2)
    """
    from PIL import Image

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
                "give images before normalisation: the model's own is applied here"
            )
        value = np.round(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise DataError(f"{_describe(value)} is not an image; give bytes from 0 to 255, or floats from 0 to 1")
    return Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[-1] == 1 else value)


def digest_rows(rows: Rows) -> str:
    """A hash of the pictures: all of them, or of a large set some, evenly spaced, so that it stays cheap.

    Example:
        >>> digest_rows(ItemRows([], (), None)) == digest_rows(ItemRows([], (), None))
        True
    """
    count = len(rows)
    every = 1 if count <= _READ_ALL else count // _READ_SOME
    picked = range(0, count, every)
    digest = hashlib.sha256(f"{count}".encode())
    for start in range(0, len(picked), _AT_ONCE):
        for data in rows.raw(picked[start : start + _AT_ONCE]):
            digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def _bytes_of(path: str | Path | None) -> bytes:
    try:
        return read_bytes(path, MAX_IMAGE_BYTES) if path else b""
    except (OSError, ValueError):  # `Split` names it when the picture is needed
        return b""


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (
        f" of shape {list(shape)} and type {value.dtype}" if shape is not None else ""
    )
