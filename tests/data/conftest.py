"""Small images that encode their numbers, in every supported form of data."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_retarget.data import Preprocess

NAMES = ("ant", "bee", "cat")


def picture(number: int) -> Image.Image:
    """Noise, so that crops and flips are visible, with a first pixel that encodes the number."""
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    pixels[0, 0] = number % 256, number // 256, 7
    return Image.fromarray(pixels)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def preprocess() -> Preprocess:
    """Keeps the pixels, from 0 to 1, so that the output identifies the image."""
    return Preprocess(input_size=(3, 8, 8), mean=(0.0,) * 3, std=(1.0,) * 3, crop_pct=1.0)


@pytest.fixture
def pairs() -> list[tuple[Image.Image, int]]:
    """Image k is of class k % 3."""
    return [(picture(number), number % 3) for number in range(60)]


@pytest.fixture
def numbers() -> Callable:
    """The numbers of the images in a batch of inputs."""
    return lambda inputs: [round(float(255 * (each[0, 0, 0] + 256 * each[1, 0, 0]))) for each in inputs]


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes `count` images into a class folder."""

    def write(place: str, count: int = 10, start: int = 0) -> Path:
        folder = tmp_path / "images"
        (folder / place).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + count):
            (folder / place / f"{number:03}.png").write_bytes(png(number))
        return folder

    return write


@pytest.fixture
def table() -> Callable:
    """A `datasets.Dataset` of images; image k is of class k % 3."""

    def make(count: int = 60, names: tuple[str, ...] | None = NAMES, image: str = "image", label: str = "label"):
        kind = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
        return datasets.Dataset.from_dict(
            {
                image: [{"bytes": png(number), "path": None} for number in range(count)],
                label: [number % 3 for number in range(count)],
            },
            features=datasets.Features({image: datasets.Image(), label: kind}),
        )

    return make
