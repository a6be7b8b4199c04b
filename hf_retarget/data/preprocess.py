"""Preprocessing of images for a model: size, crop, colours, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from timm.data.transforms_factory import create_transform
from timm.models import PretrainedCfg
from torch import Tensor

from hf_retarget.errors import DataError, ModelError
from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.config import check_entry
from hf_retarget.models.timm_models import is_timm
from hf_retarget.untrusted import read_json
from hf_retarget.words import nearest

_MODES = {1: "L", 3: "RGB"}  # input channels → PIL mode
_DECISIVE = {"input_size", "mean", "std"}  # a configuration with none of these does not describe the input

# Crops and flips, milder than timm's defaults, which suit hundreds of epochs from scratch.
_AUGMENTATION: dict[str, Any] = {"scale": (0.35, 1.0), "hflip": 0.5, "color_jitter": None}


@dataclass(frozen=True)
class Preprocess:
    """The input that a model expects, in terms of timm's `pretrained_cfg`; defaults are those of ImageNet.

    Example:
        >>> Preprocess.of({"input_size": [3, 32, 32], "crop_pct": 1.0}).input_size
        (3, 32, 32)
    """

    input_size: tuple[int, ...] = (3, 224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"
    transform: Callable[[Any], Tensor] | None = field(default=None, repr=False)
    """A custom function from an item of the dataset to the input, which replaces all of the above."""

    @property
    def sentence(self) -> str:
        """A description of what is done to images.

        Example:
            >>> Preprocess(mean=(0.5,), std=(0.25,)).sentence
            'resized and cropped to 224×224 (bicubic, 88% of the image), mean 0.5, deviation 0.25'
            >>> Preprocess((1, 16, 16), transform=as_tensor).sentence
            'tensors of 1×16×16, as they are'
        """
        if self.transform is not None:
            how = "as they are" if self.transform is as_tensor else f"made by {_name(self.transform)}"
            return f"tensors of {'×'.join(map(str, self.input_size))}, {how}"
        mean, std = (" ".join(f"{each:.3g}" for each in values) for values in (self.mean, self.std))
        size = "×".join(map(str, self.input_size[1:]))
        crop = f"{self.interpolation}, {self.crop_pct:.0%} of the image"
        return f"resized and cropped to {size} ({crop}), mean {mean}, deviation {std}"

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that the input depends on, as plain values."""
        found = {name: value for name, value in vars(self).items() if name != "transform"}
        if self.transform is None:
            return found
        return {"input_size": self.input_size, "transform": _name(self.transform)}

    @property
    def config(self) -> dict[str, Any]:
        """The entries for timm's `pretrained_cfg`; for tensors used as they are, a neutral normalisation."""
        if self.transform is None:
            return self.facts
        if len(self.input_size) != 3:  # no images
            return {}
        channels = self.input_size[0]
        return {"input_size": self.input_size, "mean": (0.0,) * channels, "std": (1.0,) * channels, "crop_pct": 1.0}

    def fit(self, item: Any) -> Preprocess:
        """With the input size that `transform` gives to an item."""
        return self if self.transform is None else replace(self, input_size=tuple(self.shape()(item).shape))

    @classmethod
    def of(cls, config: Mapping[str, Any], image_size: int | None = None, in_chans: int | None = None) -> Preprocess:
        """Read a model's `pretrained_cfg`, with timm's defaults for what it lacks.

        `image_size` overrides height and width. `in_chans` overrides the number of channels, which timm does not adapt
        in `pretrained_cfg` when a model is built with another number.

        Example:
            >>> Preprocess.of({"mean": [0.5, 0.5, 0.5]}, image_size=28, in_chans=1).mean
            (0.5,)
        """
        # timm's resolve_data_config fills in the same defaults, but neither adapts nor checks the channels.
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

    def shape(self, augment: bool = False) -> Callable[[Any], Tensor]:
        """Return a function that converts, resizes and crops an image to bytes, for `normalise`.

        Augmentation draws from the global generators of `random` and torch; `Split.batches` seeds and restores them.

        Example:
            >>> from PIL import Image
            >>> Preprocess(input_size=(3, 32, 32)).shape()(Image.new("L", (50, 40))).shape
            torch.Size([3, 32, 32])
        """
        if self.transform is not None:
            if augment:
                raise DataError(
                    f"{self.sentence}: they cannot be augmented; leave out augment, or augment in preprocess="
                )
            return partial(_make_tensor, self.transform)
        channels, height, width = self.input_size
        options = _AUGMENTATION if augment else {"crop_pct": self.crop_pct, "crop_mode": self.crop_mode}
        by_timm = create_transform(
            (channels, height, width),
            is_training=augment,
            interpolation=self.interpolation,
            mean=self.mean,  # the padding colour of crop_mode 'border'
            normalize=False,
            **options,
        )
        # Images that already have the right size, as in many small datasets, skip timm's slower transform.
        scaled = int(width / self.crop_pct), int(height / self.crop_pct)
        unchanged = scaled if scaled == (width, height) and not augment else None

        def shape(image: Image) -> Tensor:
            if image.mode.startswith("I"):  # 16 bits: PIL would clip values above 255 instead of scaling them
                image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
            if image.mode != _MODES[channels]:
                image = image.convert(_MODES[channels])
            if image.size == unchanged:
                return torch.from_numpy(np.array(image).reshape(height, width, channels)).permute(2, 0, 1)
            tensor: Tensor = by_timm(image)
            return tensor

        return shape

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert the bytes of an image or a batch to floats, normalised by mean and standard deviation.

        Example:
            >>> Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3).normalise(torch.tensor([[[255]]] * 3)).flatten()
            tensor([1., 1., 1.])
        """
        if self.transform is not None:
            return pixels
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels.float().div_(255).sub_(mean).div_(std)


Wanted = str | Path | Mapping[str, Any] | Callable[[Any], Tensor]
"""A requested preprocessing: "none", a timm data configuration or its JSON file, or a function from item to tensor."""


def choose_preprocess(checkpoint: Checkpoint, image_size: int | None = None, asked: Wanted | None = None) -> Preprocess:
    """Choose the preprocessing of a checkpoint: the one asked for, or that of its configuration.

    A custom model without a configuration gets tensors as they are, and images as floats from 0 to 1. `image_size`
    overrides height and width; raises ModelError if the model has a fixed input size.
    """
    own = tuple(checkpoint.config.get("input_size") or ())[1:]
    if image_size and checkpoint.config.get("fixed_input_size") and own != (image_size, image_size):
        # Position tables and windows depend on the image size.
        size = "×".join(map(str, own))
        raise ModelError(
            f"'{checkpoint.reference}' takes images of {size} only, not of {image_size}×{image_size}; "
            "leave out the image size, or build the model for this size (timm's img_size)"
        )
    channels = checkpoint.options.get("in_chans")
    if channels is None and not checkpoint.config.get("input_size"):
        channels = next((weight.shape[1] for weight in checkpoint.weights.values() if weight.dim() == 4), None)
    known = checkpoint.library != "timm" or is_timm(checkpoint.architecture)
    described = known or bool(checkpoint.config.keys() & _DECISIVE)
    if callable(asked) or asked == "none" or (asked is None and not described and not image_size):
        if image_size:
            raise DataError(f"images used as they are cannot be resized to {image_size}×{image_size}; leave out one")
        # The size is a placeholder until `fit` sees data.
        return Preprocess((channels or 3, 224, 224), transform=asked if callable(asked) else as_tensor)
    config = checkpoint.config if asked is None else _read_config(asked)
    return Preprocess.of(config, image_size, channels)


def _read_config(asked: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a data configuration from a mapping, from a file, or from the config.json of a timm model."""
    found: Any = asked
    where = "preprocess" if isinstance(asked, Mapping) else str(asked)
    if not isinstance(asked, Mapping):
        try:
            found = read_json(Path(asked).expanduser())
        except (OSError, ValueError) as error:
            words = "pass none, or a JSON file with a timm data configuration (input_size, mean, std, …)"
            raise DataError(f"cannot read the preprocessing '{asked}': {error}; {words}") from error
        found = found.get("pretrained_cfg", found) if isinstance(found, dict) else found
    if not isinstance(found, Mapping) or not found.keys() & _DECISIVE:
        raise DataError(f"'{where}' is not a data configuration: it has none of timm's {', '.join(sorted(_DECISIVE))}")
    names = {each.name for each in fields(Preprocess)} - {"transform"}
    for name in found.keys() - names - {each.name for each in fields(PretrainedCfg)}:
        if hint := nearest(name, sorted(names)):
            raise DataError(f"'{where}' has the entry '{name}'{hint}")
    return {name: check_entry(name, found[name], where) for name in names & found.keys()}


def as_tensor(item: Any) -> Tensor:
    """Convert to a tensor: floats as they are; bytes and images as floats from 0 to 1, channels first.

    Example:
        >>> as_tensor(torch.tensor([-1.5, 2.0]))
        tensor([-1.5000,  2.0000])
        >>> as_tensor(np.full((4, 6, 3), 255, np.uint8)).shape
        torch.Size([3, 4, 6])
    """
    if isinstance(item, Tensor):
        return item.float() / 255 if item.dtype == torch.uint8 else item.float()
    array = np.array(item)
    if array.dtype.kind not in "fiub":
        raise DataError(f"a {type(item).__name__} is not a tensor, array or image; pass a function with preprocess=")
    found = torch.from_numpy(array)
    if found.ndim == 2:
        found = found[None]
    elif found.ndim == 3 and found.shape[-1] in _MODES and found.shape[0] not in _MODES:
        found = found.permute(2, 0, 1)
    return as_tensor(found)


def _make_tensor(transform: Callable[[Any], Tensor], item: Any) -> Tensor:
    found = transform(item)
    if not isinstance(found, Tensor) or not found.ndim:
        raise DataError(f"{_name(transform)} must return a tensor, not a {type(found).__name__}")
    return found.float()


def _name(transform: Callable[[Any], Tensor]) -> str:
    return "none" if transform is as_tensor else getattr(transform, "__qualname__", type(transform).__name__)


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(float(value) for value in values)
    if len(values) not in _MODES:
        raise DataError(f"the model's mean or std has {len(values)} values; supported are 1 and 3 channels")
    return (sum(values) / len(values),) * channels
