"""From images to the input a model was trained on: size, crop, colours, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_retarget.errors import DataError, ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

    from hf_retarget.models import Checkpoint

_MODES = {1: "L", 3: "RGB"}  # input channels → PIL's name

# Crops and flips, milder than timm's defaults, which are meant for hundreds of epochs from scratch.
_AUGMENTATION: dict[str, Any] = {"scale": (0.35, 1.0), "hflip": 0.5, "color_jitter": None}


@dataclass(frozen=True)
class Preprocess:
    """The input a model expects; the fields are named as in timm's `pretrained_cfg`, the defaults are ImageNet's.

    Example:
        >>> Preprocess.of({"input_size": [3, 32, 32], "crop_pct": 1.0}).input_size
        (3, 32, 32)
    """

    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"

    @classmethod
    def of(cls, config: Mapping[str, Any], image_size: int | None = None, in_chans: int | None = None) -> Preprocess:
        """Read a model's `pretrained_cfg`, with timm's defaults for what it lacks.

        `image_size` overrides height and width, `in_chans` the number of channels: timm keeps the three of the
        pretrained weights in `pretrained_cfg` when a model is built with another number.

        Example:
            >>> Preprocess.of({"mean": [0.5, 0.5, 0.5]}, image_size=28, in_chans=1).mean
            (0.5,)
        """
        # timm's resolve_data_config fills in the same defaults, but neither adapts channels nor refuses any.
        default = cls()
        channels, height, width = config.get("input_size") or default.input_size
        channels = in_chans or channels
        if channels not in _MODES:
            raise DataError(f"the model takes images of {channels} channels; supported are 1 (gray) and 3 (colour)")
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

    def shape(self, augment: bool = False) -> Callable[[Image], Tensor]:
        """Return a function from one image to bytes of the right colours, size and crop, for `normalise`.

        Augmentation draws from the global generators of `random` and torch; `Split.batches` seeds and restores them.

        Example:
            >>> from PIL import Image
            >>> Preprocess(input_size=(3, 32, 32)).shape()(Image.new("L", (50, 40))).shape
            torch.Size([3, 32, 32])
        """
        from timm.data.transforms_factory import create_transform

        options = _AUGMENTATION if augment else {"crop_pct": self.crop_pct, "crop_mode": self.crop_mode}
        by_timm = create_transform(
            self.input_size,
            is_training=augment,
            interpolation=self.interpolation,
            mean=self.mean,  # the colour that crop_mode 'border' pads with
            normalize=False,
            **options,
        )
        channels, height, width = self.input_size
        # Images that have the right size already, as in many small datasets, do not need timm's slower transform.
        scaled = int(width / self.crop_pct), int(height / self.crop_pct)
        unchanged = scaled if scaled == (width, height) and not augment else None

        def shape(image: Image) -> Tensor:
            image = _in_mode(image, _MODES[channels])
            if image.size == unchanged:
                return torch.from_numpy(np.array(image).reshape(height, width, channels)).permute(2, 0, 1)
            tensor: Tensor = by_timm(image)
            return tensor

        return shape

    def normalise(self, pixels: Tensor) -> Tensor:
        """Turn the bytes of an image or a batch into floats, minus mean, over deviation.

        Example:
            >>> Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3).normalise(torch.tensor([[[255]]] * 3)).flatten()
            tensor([1., 1., 1.])
        """
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels.float().div_(255).sub_(mean).div_(std)


def choose_preprocess(checkpoint: Checkpoint, image_size: int | None = None) -> Preprocess:
    """Choose the preprocessing of a checkpoint: from its configuration, or with the channels of its first convolution.

    `image_size` overrides the height and width; ModelError if the model is bound to its own.
    """
    own = tuple(checkpoint.config.get("input_size") or ())[1:]
    if image_size and checkpoint.config.get("fixed_input_size") and own != (image_size, image_size):
        # Position tables and windows have the size of the images.
        size = "×".join(map(str, own))
        raise ModelError(
            f"'{checkpoint.reference}' takes images of {size} only, not of {image_size}×{image_size}; "
            "leave out the image size, or build the model for this size (timm's img_size)"
        )
    channels = checkpoint.options.get("in_chans")
    if channels is None and not checkpoint.config.get("input_size"):
        channels = next((weight.shape[1] for weight in checkpoint.weights.values() if weight.dim() == 4), None)
    return Preprocess.of(checkpoint.config, image_size, channels)


def _in_mode(image: Image, mode: str) -> Image:
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):  # 16 bits: PIL would clip values above 255 instead of scaling them
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image.convert(mode)


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (sum(values) / len(values),) * channels
