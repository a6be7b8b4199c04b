"""Image folders: one folder for each class, with or without folders for the splits above them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from hf_retarget.data.rows import FORMATS, FileRows
from hf_retarget.data.source import SPLITS, Source
from hf_retarget.errors import DataError


def open_image_folder(folder: Path) -> Source:
    """Find splits, classes and images: `train/cat/1.jpg` or, without splits, `cat/1.jpg`."""
    below = _folders(folder)
    splits = [each for each in below if each.name.casefold() in SPLITS and _folders(each)]
    if splits and len(splits) < len(below):
        strange = next(each.name for each in below if each not in splits)
        raise DataError(
            f"'{folder}' has both splits ('{splits[0].name}') and other folders ('{strange}'); move them out"
        )
    places = {each.name: each for each in splits} or {"train": folder}
    found = {split: _list(place) for split, place in places.items()}
    if not any(paths for paths, _ in found.values()):
        raise DataError(_why_empty(folder))
    strangers = [path for _, others in found.values() for path in others]
    notes = [_name_strangers(folder, strangers)] if strangers else []
    names = tuple(sorted({_class(places[split], path) for split, (paths, _) in found.items() for path in paths}))
    number = {name: place for place, name in enumerate(names)}
    return Source(
        name=folder.name,
        splits={
            split: partial(
                FileRows, places[split], tuple(paths), [number[_class(places[split], path)] for path in paths], names
            )
            for split, (paths, _) in found.items()
        },
        notes=tuple(notes),
    )


def _list(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images inside the class folders, and the other files."""
    suffixes = _suffixes()
    files = [
        path
        for each in _folders(folder)
        for path in sorted(each.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    images = [path for path in files if path.suffix.casefold() in suffixes]
    return images, [path for path in files if path.suffix.casefold() not in suffixes]


def _class(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0]


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


@cache
def _suffixes() -> frozenset[str]:
    from PIL import Image

    return frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)


def _name_strangers(folder: Path, strangers: list[Path]) -> str:
    first = strangers[0].relative_to(folder).as_posix()
    return f"{len(strangers)} files that are not images were left out (first: {first})"


def _why_empty(folder: Path) -> str:
    flat = [path for path in folder.iterdir() if path.is_file() and path.suffix.casefold() in _suffixes()]
    if flat:
        return f"'{folder}' has images ({flat[0].name} …) but no class folders; put those of each class into one folder"
    return f"there are no images in '{folder}'; they should lie there as 'train/cat/1.jpg' or 'cat/1.jpg'"
