"""preprocessor_config.json, in which transformers says how a model wants its images, and the same in timm's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_retarget.models.config import read_config

PREPROCESSOR = "preprocessor_config.json"

_INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""PIL's numbers, and timm's names."""

_SQUASHED_FROM = 384
"""ConvNext's processor crops images of less than this many pixels only."""


def read_processor(folder: Path) -> dict[str, Any] | None:
    """The file as it is, if there is one."""
    path = folder / PREPROCESSOR
    return read_config(path) if path.is_file() else None


def describe_images(processor: Mapping[str, Any] | None, channels: int, image_size: Any) -> dict[str, Any]:
    """How images are made, as in timm's `pretrained_cfg`; `image_size` is what the model says of itself.

    Example:
        >>> describe_images({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, 3, None)
        {'input_size': (3, 224, 224), 'crop_pct': 0.875, 'crop_mode': 'center'}
    """
    if processor is None:
        size = _pair(image_size)
        return {"input_size": (channels, *size)} if size else {}
    found: dict[str, Any] = {}
    if shape := _shape(processor):
        size, share, mode = shape
        found |= {"input_size": (channels, *size), "crop_pct": share, "crop_mode": mode}
    if (name := _INTERPOLATION.get(processor.get("resample", -1))) is not None:
        found["interpolation"] = name
    if processor.get("do_normalize", True):
        found |= {key: tuple(processor[f"image_{key}"]) for key in ("mean", "std") if processor.get(f"image_{key}")}
    else:
        found |= {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    return found


def compose_processor(processor: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The file for a model whose images are as `config` says: the one there was, if it says the same.

    Example:
        >>> compose_processor(None, {"input_size": (3, 32, 32), "mean": (0.5,) * 3})["size"]
        {'height': 32, 'width': 32}
    """
    if "input_size" not in config:
        return dict(processor) if processor else None
    channels, height, width = config["input_size"]
    wanted = {
        name: config[name]
        for name in ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
        if name in config
    }
    if processor and _agrees(describe_images(processor, channels, None), wanted):
        return dict(processor)
    numbers = {name: number for number, name in _INTERPOLATION.items()}
    share = config.get("crop_pct") or 1.0
    scaled = {"height": int(height / share), "width": int(width / share)}
    squashed = config.get("crop_mode") == "squash" or share == 1.0
    composed = {
        "image_processor_type": "ViTImageProcessor" if squashed and share == 1.0 else "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": scaled if squashed else {"shortest_edge": min(scaled.values())},
        "resample": numbers.get(config.get("interpolation", "bicubic"), 3),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.get("mean", (0.5,) * channels)),
        "image_std": list(config.get("std", (0.5,) * channels)),
    }
    if share != 1.0:
        composed |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return composed


def _agrees(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in one if name in other)


def _shape(processor: Mapping[str, Any]) -> tuple[tuple[int, int], float, str] | None:
    """Height and width, the share of the image that they are of, and how it gets that far."""
    size = processor.get("size")
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if processor.get("do_center_crop") and (crop := _pair(processor.get("crop_size"))):
        whole = _pair(size) or ((edge, edge) if edge else crop)
        squashed = isinstance(size, Mapping) and "height" in size
        return crop, round(min(crop) / min(whole), 6), "squash" if squashed else "center"
    if "crop_pct" in processor and isinstance(edge, int):  # ConvNext's way
        cropped = edge < _SQUASHED_FROM
        return (edge, edge), (processor["crop_pct"] or 0.875) if cropped else 1.0, "center" if cropped else "squash"
    if (square := _pair(size)) is not None:
        return square, 1.0, "squash"
    return ((edge, edge), 1.0, "center") if isinstance(edge, int) else None


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        return (size["height"], size["width"]) if {"height", "width"} <= set(size) else None
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (size, size) if isinstance(size, int) else None
