"""config.json as timm has it on the Hub: read into plain values, and written from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.models.build import constructor_arguments, is_factory, is_timm, known_to_timm, near_timm_names
from hf_retarget.models.shape import MAX_SIZE, MAX_TEXT, check_arguments
from hf_retarget.untrusted import read_json

CONFIG = "config.json"

MAX_SIDE, MIN_CROP = 4096, 0.05
"""Pixels of a side of an image, and the share of it that is kept."""
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming", "random")
CROPS = ("center", "squash", "border")
"""As timm knows them."""

_ABOUT_WEIGHTS = ("license", "tag", "origin_url", "paper_name", "paper_ids", "notes", "description")
"""Entries that are true of the weights timm has, not of any others of the same architecture."""

_LABELS = ("label_names", "label_descriptions", "label_offset")


@dataclass(frozen=True)
class Description:
    """What is known of a model besides its weights; the fields are those of `Checkpoint`."""

    architecture: str
    options: Mapping[str, Any]
    num_classes: int | None
    labels: tuple[str, ...] | None
    config: Mapping[str, Any]
    library: str = "timm"


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as a dictionary."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' cannot be read as JSON: {error}; save the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' holds a {type(config).__name__} instead of an object; save the model again")
    return config


def describe_config(raw: Mapping[str, Any], where: str, arch: str | None = None) -> Description:
    """What a config.json says. `arch` overrules its architecture, and only that may be a `module:factory`.

    Example:
        >>> describe_config({"architecture": "resnet18", "num_classes": 10}, "tuned/").num_classes
        10
    """
    if arch is None:
        _check_format(raw, where)
    nested = raw.get("pretrained_cfg", raw)  # long ago timm wrote both into one
    if not isinstance(nested, dict) or not isinstance(raw.get("model_args") or {}, dict):
        raise ModelError(f"config.json in '{where}' is malformed: pretrained_cfg and model_args must be objects")
    options = dict(raw.get("model_args") or {})
    classes = options.pop("num_classes", None)
    classes = raw.get("num_classes", nested.get("num_classes", classes))
    if classes is not None and (type(classes) is not int or not 0 <= classes <= MAX_SIZE):
        raise ModelError(f"config.json in '{where}' has num_classes {classes!r}; it must be a whole number up to 2²⁰")
    architecture = arch or raw["architecture"]
    if options:
        options = check_arguments(options, constructor_arguments(architecture), where)
        _check_image_size(options.get("img_size"), where)
    labels = read_labels(raw) or read_labels(nested)
    return Description(architecture, options, classes, labels, _with_input(check_images(nested, where), options))


def describe_architecture(name: str, options: Mapping[str, Any], *, pretrained: bool) -> Description:
    """What timm knows of a name, with or without tag; of a `module:factory`, only that it is one.

    With `pretrained`, the weights are timm's own, and what it says about them (classes, licence, tag) is kept.

    Example:
        >>> describe_architecture("resnet18.a1_in1k", {}, pretrained=True).config["license"]
        'apache-2.0'
    """
    if is_factory(name):
        return Description(name, dict(options), None, None, {})
    import timm

    known = timm.get_pretrained_cfg(name)
    config = known.to_dict() if known else {}
    labels = read_labels(config) if pretrained else None
    dropped = _LABELS if pretrained else (*_LABELS, *_ABOUT_WEIGHTS)
    kept = {key: value for key, value in known_to_timm(config).items() if key not in dropped}
    classes = config.get("num_classes") if pretrained else None
    return Description(name.partition(".")[0], dict(options), classes, labels, _with_input(kept, options))


def describe_module(model: nn.Module) -> dict[str, Any]:
    """The configuration a model from Python carries, without what is true only of weights that timm has.

    Example:
        >>> describe_module(nn.Linear(2, 2))
        {}
    """
    carried = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if not isinstance(carried, dict):
        return {}
    return {key: value for key, value in known_to_timm(carried).items() if key not in (*_LABELS, *_ABOUT_WEIGHTS)}


def compose_config(description: Description, model: nn.Module) -> dict[str, Any]:
    """The config.json of a model, in the order timm writes it."""
    nested = {key: value for key, value in known_to_timm(description.config).items() if key not in _LABELS}
    nested.pop("architecture", None)
    nested.update(num_classes=description.num_classes, custom_load=False)
    if description.options.get("in_chans", 3) not in (1, 3):
        nested["first_conv"] = None  # else timm takes the weights for those of an RGB model and draws new ones
    config: dict[str, Any] = {"architecture": description.architecture, "num_classes": description.num_classes}
    if isinstance(features := getattr(model, "num_features", None), int):
        config["num_features"] = features
    if isinstance(pool := getattr(model, "global_pool", None), str) and pool:
        config["global_pool"] = pool
    if description.labels:
        config["label_names"] = list(description.labels)
    if description.options:
        config["model_args"] = dict(description.options)
    config["pretrained_cfg"] = nested
    return config


def _check_format(raw: Mapping[str, Any], where: str) -> None:
    """Refuse what names no architecture, or code of its own."""
    architecture = raw.get("architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"config.json in '{where}' names no architecture; say which with --arch")
    if ":" in architecture:
        # A configuration from somebody else must not decide which code is called, or which other model is loaded.
        if is_factory(architecture):
            advice = f"names the code '{architecture}'; if you trust it, say --arch {architecture} yourself"
        else:
            advice = f"names another model, '{architecture}', instead of an architecture; load that one, or correct it"
        raise ModelError(f"config.json in '{where}' {advice}")
    if not is_timm(architecture):
        raise ModelError(
            f"config.json in '{where}' names '{architecture}', which is no timm model; {near_timm_names(architecture)}"
        )


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Label names, as a list or by number; none if a number is missing or transformers made them up.

    Example:
        >>> read_labels({"id2label": {"1": "dog", "0": "cat"}}), read_labels({"id2label": {"0": "LABEL_0"}})
        (('cat', 'dog'), None)
    """
    names = config.get("label_names") or config.get("labels") or config.get("id2label")
    if isinstance(names, dict):
        try:
            by_number = {int(number): name for number, name in names.items()}
        except (TypeError, ValueError):
            return None
        if set(by_number) != set(range(len(by_number))):
            return None
        names = [by_number[number] for number in range(len(by_number))]
    if not isinstance(names, (list, tuple)) or not names:
        return None
    labels = tuple(str(name) for name in names)
    return None if labels == tuple(f"LABEL_{number}" for number in range(len(labels))) else labels


def check_images(entries: Mapping[str, Any], where: str, file: str = CONFIG) -> dict[str, Any]:
    """What a configuration says about images, heads and licences, in timm's words; all else is left out.

    So nothing that a file says about where weights are reaches timm.

    Example:
        >>> check_images({"crop_pct": 0.9, "url": "https://…"}, "tuned/")
        {'crop_pct': 0.9}
    """
    for name in ("file", "state_dict"):
        if entries.get(name):
            raise ModelError(f"{file} in '{where}' has '{name}', which would say where weights are; remove it")
    kept = {}
    for name, entry in entries.items():
        if name in _IMAGES:
            value, (accepts, words) = _frozen(entry), _IMAGES[name]
            if value is not None and not accepts(value):
                raise ModelError(f"{file} in '{where}' has {name} {value!r:.100}; it must be {words}")
            kept[name] = value
    return kept


def _check_image_size(size: Any, where: str) -> None:
    sides = _frozen(size) if isinstance(size, (list, tuple)) else (size, size)
    if size is not None and (len(sides) != 2 or not all(_is_count(each) and each <= MAX_SIDE for each in sides)):
        raise ModelError(
            f"config.json in '{where}' has img_size {size!r:.50}; it must be one or two numbers up to {MAX_SIDE}"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(_is_count(each) and each <= MAX_SIDE for each in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (1, 2) and all(_is_count(each) for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, tuple) and len(value) <= 100 and all(map(_is_text, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e6


def _is_mean(value: Any) -> bool:
    return isinstance(value, tuple) and 0 < len(value) <= 1024 and all(map(_is_number, value))


def _is_deviation(value: Any) -> bool:
    return _is_mean(value) and all(each > 0 for each in value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and MIN_CROP <= value <= 10


_SIZE = f"channels, height and width, each up to {MAX_SIDE}"
_IMAGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("input_size", "test_input_size", "min_input_size"),
        (_is_size, _SIZE),
    ),
    **dict.fromkeys(("pool_size", "test_pool_size"), (_is_pair, "height and width")),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), (_is_share, f"a number from {MIN_CROP} to 10")),
    "fixed_input_size": (lambda value: isinstance(value, bool), "true or false"),
    "mean": (_is_mean, "a list of numbers"),
    "std": (_is_deviation, "a list of numbers above 0"),
    "num_classes": (lambda value: type(value) is int and 0 <= value <= MAX_SIZE, "a whole number up to 2²⁰"),
    "interpolation": (lambda value: value in INTERPOLATIONS, f"one of {', '.join(INTERPOLATIONS)}"),
    "crop_mode": (lambda value: value in CROPS, f"one of {', '.join(CROPS)}"),
    **dict.fromkeys(("license", "license_link", "tag"), (_is_text, "a text")),
    **dict.fromkeys(("origin_url", "paper_name", "description"), (_is_text, "a text")),
    **dict.fromkeys(("first_conv", "classifier", "paper_ids", "notes"), (_is_texts, "a text, or a list of texts")),
}
"""Entries of a configuration that are read, what they may be, and how to say so."""


def _with_input(config: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the input that the constructor arguments ask for, which overrule it."""
    channels, height, width = config.get("input_size") or (3, 224, 224)
    size = options.get("img_size") or (height, width)
    height, width = (size, size) if isinstance(size, int) else size
    wanted = (options.get("in_chans") or channels, height, width)
    if "input_size" in config and wanted != config["input_size"]:
        return {**config, "input_size": wanted}
    return config


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples they were, so that configurations can be compared."""
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
