"""Images of the tasks, in memory and in the size of the networks, so that no step waits for a decoder."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Larger sets of images and trained networks, if present: see `where` in the tasks."""
EMBEDDED = ROOT / "hf_retarget" / "data" / "embedded"

Splits = dict[str, "Pictures"]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images and labels as pairs (array, label), which `hf_retarget` accepts from Python."""

    arrays: np.ndarray
    targets: Sequence[int]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.arrays[number], self.targets[number]


def load_images(name: str, size: int, cache: Path | None = None) -> Splits:
    """The training and test images of a set: mnist, fashion-mnist, cifar10, flowers or turned-flowers.

    Example:
        >>> len(load_images("fashion-mnist", 28)["train"]) >= 6000
        True
    """
    kept = cache / f"{name}-{size}.npz" if cache else None
    if kept and kept.exists():
        with np.load(kept) as file:
            names = tuple(file["classes"].tolist())
            return {side: Pictures(file[side], file[f"{side}_targets"].tolist(), names) for side in ("train", "test")}
    if name == "turned-flowers":
        return {side: _turn(each) for side, each in load_images("flowers", size, cache).items()}
    splits = _mnist() if name == "mnist" and find_images(name) else _tables(name, size)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        arrays = {side: pictures.arrays for side, pictures in splits.items()}
        labels = {f"{side}_targets": np.array(pictures.targets) for side, pictures in splits.items()}
        np.savez(kept, **arrays, **labels, classes=np.array(splits["train"].classes))
    return splits


def find_images(name: str) -> Path | None:
    """The location of a set of images; None if it is missing."""
    name = name.removeprefix("turned-")
    places = [SHARED / "data" / name.replace("-", "_"), EMBEDDED / name]
    return next((place for place in places if place.is_dir()), None)


def _mnist() -> Splits:
    folder = SHARED / "data" / "mnist"
    splits = {}
    for side, prefix in (("train", "train"), ("test", "t10k")):
        pixels = gzip.decompress((folder / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())
        arrays = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)
        splits[side] = Pictures(arrays, list(labels[8:]), tuple("0123456789"))
    return splits


def _tables(name: str, size: int) -> Splits:
    from datasets import load_dataset

    folder = find_images(name if name != "mnist" else "fashion-mnist")
    if folder is None:
        raise FileNotFoundError(f"there are no images '{name}' in '{SHARED / 'data'}'")
    files = {side: str(folder / f"{side}.parquet") for side in ("train", "test")}
    splits = {}
    for side, table in load_dataset("parquet", data_files=files).items():
        arrays = np.stack([np.asarray(_cut(picture, size)) for picture in table["image"]])
        splits[str(side)] = Pictures(arrays, list(table["label"]), tuple(table.features["label"].names))
    return splits


def _turn(pictures: Pictures) -> Pictures:
    """Kind and orientation of a flower: each image once, rotated according to its number; four times the classes."""
    quarters = [number % 4 for number in range(len(pictures))]
    arrays = np.stack([np.rot90(each, turns) for each, turns in zip(pictures.arrays, quarters, strict=True)])
    targets = [4 * label + turns for label, turns in zip(pictures.targets, quarters, strict=True)]
    return Pictures(arrays, targets, tuple(f"{each}, {turns * 90}°" for each in pictures.classes for turns in range(4)))


def _cut(picture: Image.Image, size: int) -> Image.Image:
    """The central square, scaled; images of the right size are not changed."""
    mode = "L" if picture.mode == "L" else "RGB"
    return ImageOps.fit(picture.convert(mode), (size, size), Image.Resampling.BICUBIC)
