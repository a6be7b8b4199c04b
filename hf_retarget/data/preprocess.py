"""From pictures to the numbers a model was trained on: size, crop, colours, mean and deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_retarget.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB"}
"""Input channels → PIL's name for such pictures."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Crops and flips, milder than timm's defaults, which are made for training from scratch over hundreds of epochs.
AUGMENTATION: dict[str, Any] = {"scale": (0.35, 1.0), "hflip": 0.5, "color_jitter": None}


@dataclass(frozen=True)
class Preprocess:
    """How a model wants its images; the fields are named as in timm's `pretrained_cfg`.

    Example:
        >>> Preprocess.of({"input_size": [3, 32, 32], "crop_pct": 1.0}).input_size
        (3, 32, 32)
    """

    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"

    @classmethod
    def of(cls, config: Mapping[str, Any], image_size: int | None = None, in_chans: int | None = None) -> Preprocess:
        """Read it from a model's `pretrained_cfg`; what is absent there is as in timm.

        `image_size` overrides height and width, `in_chans` the number of channels: timm keeps the three of the
        pretrained weights in `pretrained_cfg` when a model is built with another number.

        Example:
            >>> Preprocess.of({"mean": [0.5, 0.5, 0.5]}, image_size=28, in_chans=1).mean
            (0.5,)
        """
        default = cls()
        channels, height, width = config.get("input_size") or default.input_size
        channels = in_chans or channels
        if channels not in MODES:
            raise DataError(f"the model takes images of {channels} channels; only 1 (gray) and 3 (colour) can be made")
        if image_size is not None and image_size < 1:
            raise DataError(f"image_size is {image_size}; give the height and width of the model's input in pixels")
        return cls(
            input_size=(channels, image_size or height, image_size or width),
            mean=_for_channels(config.get("mean") or default.mean, channels),
            std=_for_channels(config.get("std") or default.std, channels),
            interpolation=config.get("interpolation") or default.interpolation,
            crop_pct=config.get("crop_pct") or default.crop_pct,
            crop_mode=config.get("crop_mode") or default.crop_mode,
        )

    def transform(self, augment: bool = False) -> Callable[[Image], Tensor]:
        """A function from one picture to one input of the model.

        Augmentation draws from the global generators of `random` and torch; `Split.batches` seeds and restores them.

        Example:
            >>> from PIL import Image
            >>> Preprocess(input_size=(3, 32, 32)).transform()(Image.new("L", (50, 40))).shape
            torch.Size([3, 32, 32])
        """
        shape = self.shape(augment)
        return lambda picture: self.normalise(shape(picture))

    def shape(self, augment: bool = False) -> Callable[[Image], Tensor]:
        """The part of `transform` that sees single pictures: colours, size and crop, to bytes.

        Example:
            >>> from PIL import Image
            >>> Preprocess(input_size=(1, 32, 32)).shape()(Image.new("RGB", (50, 40), "white")).max()
            tensor(255, dtype=torch.uint8)
        """
        from timm.data.transforms_factory import create_transform

        options = AUGMENTATION if augment else {"crop_pct": self.crop_pct, "crop_mode": self.crop_mode}
        bend = create_transform(
            self.input_size,
            is_training=augment,
            interpolation=self.interpolation,
            mean=self.mean,  # what crop_mode 'border' fills up with
            normalize=False,
            **options,
        )
        channels, height, width = self.input_size
        # Pictures that have the right size already, as those of small datasets often do, need not go through timm.
        scaled = int(width / self.crop_pct), int(height / self.crop_pct)
        untouched = scaled if scaled == (width, height) and not augment else None

        def shape(picture: Image) -> Tensor:
            picture = in_mode(picture, MODES[channels])
            if picture.size == untouched:
                return torch.from_numpy(np.array(picture).reshape(height, width, channels)).permute(2, 0, 1)
            tensor: Tensor = bend(picture)
            return tensor

        return shape

    def normalise(self, pixels: Tensor) -> Tensor:
        """The part of `transform` that may see a whole batch at once: bytes to floats of mean 0 and deviation 1.

        Example:
            >>> Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3).normalise(torch.tensor([[[255]]] * 3)).flatten()
            tensor([1., 1., 1.])
        """
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels.float().div_(255).sub_(mean).div_(std)


def in_mode(picture: Image, mode: str) -> Image:
    """The picture in gray ("L") or colour ("RGB").

    Example:
        >>> from PIL import Image
        >>> in_mode(Image.new("P", (2, 2)), "RGB").mode
        'RGB'
    """
    if picture.mode == mode:
        return picture
    if picture.mode.startswith("I"):  # 16 bits: PIL would cut all values above 255 instead of scaling them
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return picture.convert(mode)


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (sum(values) / len(values),) * channels
