"""Datasets on disk: image folders, parquet and arrow files, saved `datasets`. No files outside them are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from hf_retarget.data.labels import Names
from hf_retarget.data.tables import FORMATS, MAX_IMAGE_BYTES, TEST, TRAIN, Rows, Source, open_tables
from hf_retarget.errors import DataError
from hf_retarget.recipe.options import DataOptions
from hf_retarget.untrusted import read_bytes, read_json, split_card
from hf_retarget.words import plural

EMBEDDED = {"fashion-mnist": Path(__file__).parent / "embedded" / "fashion-mnist"}
"""Datasets included in the package: name → folder with one parquet file per split."""
KINDS = {".parquet": "parquet", ".arrow": "arrow"}
BUILDERS = ("parquet", "arrow", "imagefolder", "webdataset")
"""Accepted builders of `datasets`. Some of the others connect to databases or read arbitrary files."""
_SPLITS = {"train": TRAIN, "test": ("test", "testing", "eval", "evaluation"), "validation": TEST[2:]}


# ---- image folders


def open_image_folder(folder: Path) -> Source:
    """Find splits, classes and images: `train/cat/1.jpg` or, without splits, `cat/1.jpg`.

    Unlabelled images are not in class folders: `1.jpg`, or `train/1.jpg` and `test/1.jpg`.
    """
    # Not load_dataset("imagefolder"): it drops the labels of a single class or of uneven depth, follows metadata.csv
    # and unpacks archives. Not torchvision's ImageFolder: it refuses empty classes, and orders images differently.
    below = _folders(folder)
    splits = [each for each in below if each.name.casefold() in (*TRAIN, *TEST) and _folders(each)]
    if splits and len(splits) < len(below):
        other = next(each.name for each in below if each not in splits)
        raise DataError(f"'{folder}' has both splits ('{splits[0].name}') and other folders ('{other}'); remove these")
    named = [each for each in below if each.name.casefold() in (*TRAIN, *TEST)]
    flat = named if named and named == below and not splits else [folder]
    images: dict[Path, list[Path]] = {}
    others: list[Path] = []
    for place in splits or flat:
        found = _files_of_classes(place)  # empty if there are no class folders
        images[place] = [path for path in found if _is_image(path)]
        others += [path for path in found if not _is_image(path)]
    if not any(images.values()):
        rows = {"train" if place == folder else place.name: _list_flat(place) for place in flat}
        if any(each.paths for each in rows.values()):
            return Source(folder.name, {name: partial(lambda rows: rows, each) for name, each in rows.items()})
        raise DataError(f"there are no images in '{folder}'; put them there as 'train/cat/1.jpg' or 'cat/1.jpg'")
    notes: tuple[str, ...] = ()
    if others:
        first = others[0].relative_to(folder).as_posix()
        notes = (f"left out {plural(len(others), 'file')} in non-image formats (first: {first})",)
    labels = {place: [path.relative_to(place).parts[0] for path in paths] for place, paths in images.items()}
    names = tuple(sorted({label for each in labels.values() for label in each}))
    if odd := next((name for name in names if name.encode(errors="ignore") != os.fsencode(name)), None):
        raise DataError(f"the name of the folder {odd!r} in '{folder}' is not UTF-8; rename it")
    opened = {
        place.name if splits else "train": partial(FileRows, place, images[place], labels[place], names)
        for place in images
    }
    return Source(folder.name, opened, notes=notes)


def _list_flat(folder: Path) -> FileRows:
    """The unlabelled images directly in a folder."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and _is_image(path))
    first = paths[0].name if paths else ""
    missing = f"'{folder}' has images ({first} …) but no class folders; put those of each class into one folder"
    return FileRows(folder, paths, [0] * len(paths), None, missing)


@dataclass(frozen=True)
class FileRows(Rows):
    """Image files below a folder."""

    folder: Path
    paths: Sequence[Path]
    labels: Sequence[Any]
    names: Names | None
    unlabelled: str = ""

    def read(self, row: int) -> bytes:
        return read_bytes(self.paths[row], MAX_IMAGE_BYTES)

    def name(self, row: int) -> str:
        return self.paths[row].relative_to(self.folder).as_posix()


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _files_of_classes(folder: Path) -> list[Path]:
    return [
        path
        for each in _folders(folder)
        for path in sorted(each.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _is_image(path: Path) -> bool:
    return Image.registered_extensions().get(path.suffix.casefold()) in FORMATS


# ---- parquet, arrow and saved datasets


def open_files(paths: Sequence[Path], name: str, options: DataOptions) -> Source:
    """Open parquet or arrow files, all of one kind, with splits by their names."""
    from datasets import load_dataset

    kinds = {KINDS.get(path.suffix.casefold()) for path in paths}
    kind = kinds.pop()
    if kinds or kind is None:
        raise DataError(f"'{name}' must be all parquet or all arrow files; choose files of one kind")
    splits: dict[str, list[str]] = {}
    for path in paths:
        splits.setdefault(name_split(path), []).append(str(path.resolve()))
    if len(splits) > 1 and (others := splits.get("")):
        named = next(each for each in splits if each)
        raise DataError(
            f"'{name}' has both files named after splits ('{named}') and others ('{Path(others[0]).name}'); choose one"
        )
    with loading(f"'{name}' cannot be read"):
        tables = load_dataset(kind, data_files={split or "train": files for split, files in splits.items()})
    return open_tables(name, tables, options, places=tuple({path.resolve().parent for path in paths}))


def name_split(path: Path) -> str:
    """The split of a file according to its name or its folder's, as `datasets` does it; empty if there is none.

    Example:
        >>> [name_split(Path(each)) for each in ("train-00000-of-00002.parquet", "val/0.parquet", "contest.parquet")]
        ['train', 'validation', '']
    """
    for word in (*re.split(r"[-._ 0-9]+", path.stem.casefold()), path.parent.name.casefold()):
        if found := next((split for split, names in _SPLITS.items() if word in names), None):
            return found
    shard = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}", path.stem)
    return shard[1] if shard and shard[1] != "data" else ""  # save_to_disk calls all its files data


def open_table_folder(folder: Path, options: DataOptions) -> Source:
    """Open a folder of parquet or arrow files, with splits by their names, or one written by `save_to_disk`."""
    from datasets import load_dataset_builder, load_from_disk

    folder = folder.resolve()
    saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
    if not saved and not (folder / "README.md").exists():  # a card may declare several configurations
        files = [path for ending in KINDS for path in folder.rglob(f"*{ending}")]
        parents = {
            each.parent.parent if each.parent.name.casefold() in (*TRAIN, *TEST) else each.parent for each in files
        }
        inside = sorted(place.relative_to(folder).as_posix() for place in parents if place.is_relative_to(folder))
        if len(inside) > 1:  # `datasets` would join all of them
            raise DataError(f"'{folder}' holds several datasets: {', '.join(map(repr, inside[:5]))}; give one of them")
    with loading(f"'{folder}' cannot be read"):
        if saved:
            _check_saved(folder)
            tables = load_from_disk(str(folder))
        else:
            check_card(folder / "README.md", f"'{folder}'")
            builder = load_dataset_builder(str(folder), name=options.config)
            check_files(builder, lambda file: Path(file).resolve().is_relative_to(folder), str(folder))
            builder.download_and_prepare()
            tables = builder.as_dataset()
    return open_tables(folder.name, tables, options, places=(folder,))


def open_embedded(name: str, folder: Path, options: DataOptions) -> Source:
    """Open a dataset included in the package in memory, so that nothing is written to a cache."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from datasets import Dataset

    tables = {path.stem: Dataset(pq.read_table(path)) for path in sorted(folder.glob("*.parquet"))}
    return open_tables(name, tables, options, places=())


@contextmanager
def loading(failure: str, *, bars: bool = False) -> Iterator[None]:
    """Turn errors of `datasets` into a DataError that begins with `failure`; hide progress bars unless `bars`.

    Example:
        >>> with loading("no data"):
        ...     1 / 0
        Traceback (most recent call last):
        hf_retarget.errors.DataError: no data: division by zero
    """
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden = are_progress_bars_disabled()
    if not bars:
        disable_progress_bars()
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of `datasets`, the Hub, pyarrow or the network
        cause: BaseException = error
        while type(cause).__name__ == "DatasetGenerationError" and cause.__cause__ is not None:
            cause = cause.__cause__  # the outer error carries no information
        reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
        raise DataError(f"{failure}: {reason[:500]}") from error
    finally:
        if not hidden:
            enable_progress_bars()


# ---- refusing files outside a dataset


def check_card(card: Path, where: str) -> None:
    """Refuse a README.md that refers to files outside the dataset, before `datasets` reads it."""
    try:
        entries, _ = split_card(read_bytes(card).decode())
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"README.md of {where} cannot be read: {' '.join(str(error).split())}") from error
    for pattern in _patterns(entries.get("configs") if isinstance(entries, dict) else None):
        parts = pattern.replace("\\", "/").split("/")
        if ":" in pattern or parts[0] in ("", "~") or ".." in parts:
            raise DataError(f"README.md of {where} names the data files '{pattern}', which are not its own; correct it")


def check_files(builder: Any, is_own: Callable[[str], bool], where: str) -> None:
    """Refuse a dataset that is not images, or that uses files outside it."""
    if builder.name not in BUILDERS:
        raise DataError(f"'{where}' is not a dataset of images: `datasets` reads it as '{builder.name}'")
    for file in data_files(builder):
        if not is_own(file):
            raise DataError(f"'{where}' names the data file '{file}', which is not its own; correct its README.md")


def data_files(builder: Any) -> list[str]:
    """The files that `datasets` will read."""
    return [str(file) for files in (builder.config.data_files or {}).values() for file in files]


def _check_saved(folder: Path) -> None:
    """Refuse splits and files outside the folder, which `save_to_disk` never writes."""
    try:
        splits = read_json(folder / "dataset_dict.json")["splits"] if (folder / "dataset_dict.json").exists() else ["."]
        for split in splits:
            place = (folder / split).resolve()
            for file in [each["filename"] for each in read_json(place / "state.json")["_data_files"]]:
                inside = (place / file).resolve()
                if not inside.is_relative_to(folder) or inside.suffix != ".arrow":
                    raise DataError(f"'{folder}' names the data file '{file}', which is not its own; save it again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{folder}' is damaged: {type(error).__name__}: {error}; save it again") from error


def _patterns(value: Any, key: str = "") -> Iterator[str]:
    """All strings that `datasets` interprets as data files or folders."""
    if isinstance(value, str):
        if key in ("data_files", "data_dir", "path"):
            yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _patterns(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _patterns(each, key)
