"""Stored tensors and the model they are meant for: sizes read off them, names brought together, differences named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.build import is_timm, seeded, sized_model
from hf_retarget.models.classifier import classifier_names, count_classes
from hf_retarget.models.config import Description
from hf_retarget.models.weights import fits, most_common_dtype

_NOTHING = torch.empty(0)


def infer_sizes(weights: Mapping[str, Tensor], about: Description, model: nn.Module) -> Description:
    """The description, completed from tensors that are under the model's names."""
    if "in_chans" not in about.options and (channels := find_channels(weights, about)):
        options = {**about.options, "in_chans": channels}
        about = replace(about, options=options, config=taking_channels(about.config, channels))
    if about.num_classes is not None:
        return about
    sizes = [len(weights[name]) for name in classifier_names(model) if name in weights and weights[name].dim() > 1]
    return replace(about, num_classes=sizes[0] if sizes else count_classes(model))


def find_channels(weights: Mapping[str, Tensor], about: Description) -> int | None:
    """How many channels the first convolution has, if it is another number than the same model for colours has there.

    To say so is to say `in_chans`, even where timm would find it out: from the size of the images in its configuration.
    """
    first = about.config.get("first_conv")
    names = [first] if isinstance(first, str) else list(first or ())
    stored = {name: weights[name] for each in names if weights.get(name := f"{each}.weight", _NOTHING).dim() == 4}
    if not stored:
        return None
    coloured = rebuild(about.architecture, about.num_classes, about.options, taking_channels(about.config, 3))
    places = coloured.state_dict() if coloured is not None else {}
    for name, tensor in stored.items():
        if name in places:
            ours, theirs = places[name].shape[1], tensor.shape[1]
            return theirs if ours == 3 != theirs else None
    return None


def taking_channels(config: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """The configuration of a model that takes images of so many channels.

    Example:
        >>> taking_channels({"input_size": (3, 28, 28)}, 1)
        {'input_size': (1, 28, 28)}
    """
    return {**config, "input_size": (channels, *config.get("input_size", (3, 224, 224))[1:])}


def rebuild(name: str, classes: int | None, options: Mapping[str, Any], config: Mapping[str, Any]) -> nn.Module | None:
    """The model that timm builds under a name, without weights; None if it cannot.

    Example:
        >>> rebuild("resnet81", 10, {}, {}) is None
        True
    """
    if not name or not is_timm(name):
        return None
    try:
        return sized_model(name, classes, options, config, empty=True)
    except ModelError:
        return None


_PREFIXES = ("module.", "_orig_mod.", "timm_model.", "model.")
"""What DistributedDataParallel, torch.compile, transformers and Lightning put before every name."""

_COUNTER = "num_batches_tracked"


def strip_prefixes(weights: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """The tensors without a prefix that all of them have, unless the model has it too.

    Example:
        >>> list(strip_prefixes({"module.fc.bias": torch.zeros(2)}, ["fc.bias"]))
        ['fc.bias']
    """
    stripped = dict(weights)
    while not any(name in expected for name in stripped):
        prefix = next((each for each in _PREFIXES if all(name.startswith(each) for name in stripped)), None)
        if prefix is None:
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped


def fit_weights(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, advice: str
) -> dict[str, Tensor]:
    """The tensors in the model's order, if there is exactly one for each of its places; else an error names the first.

    BatchNorm's counters may be missing: they have no influence, and some formats leave them out.

    Example:
        >>> fit_weights({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "a.pth", "why?")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.ModelError: 'a.pth' does not fit: 1 tensor has another shape (w is [2], not [3]); why?
    """
    counters = {name: torch.zeros_like(place) for name, place in expected.items() if name.endswith(_COUNTER)}
    whole = {**counters, **weights}
    if differing := describe_differences(whole, expected):
        raise ModelError(f"'{where}' does not fit: {differing}; {advice}")
    return {name: whole[name] for name in expected}


def describe_differences(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What differs between tensors and the places for them, each kind with its first; empty if nothing does.

    Example:
        >>> describe_differences({"a": torch.zeros(1)}, {"b": torch.zeros(2, 2)})
        '1 tensor is missing (b [2, 2]), 1 tensor is unexpected (a [1])'
    """
    missing = [f"{name} {list(place.shape)}" for name, place in expected.items() if name not in weights]
    unexpected = [f"{name} {list(tensor.shape)}" for name, tensor in weights.items() if name not in expected]
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(place.shape)}"
        for name, place in expected.items()
        if name in weights and not fits(weights[name], place)
    ]
    kinds = [
        (missing, "is missing", "are missing"),
        (unexpected, "is unexpected", "are unexpected"),
        (shapes, "has another shape", "have other shapes"),
    ]
    return ", ".join(_count(found, one, many) for found, one, many in kinds if found)


def _count(items: list[str], one: str, many: str) -> str:
    if len(items) == 1:
        return f"1 tensor {one} ({items[0]})"
    return f"{len(items)} tensors {many} (first: {items[0]})"


def convert_with_timm(
    weights: Mapping[str, Tensor],
    architecture: str,
    num_classes: int,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Tensor] | None:
    """The tensors as timm renames and resizes those of its older or foreign checkpoints; nothing if it cannot.

    timm may fill gaps with random numbers without a word. Two draws tell: what depends on the seed was not stored.

    Example:
        >>> convert_with_timm({"w": torch.zeros(1)}, "test_vit", 10, {}, {}) is None
        True
    """
    import timm

    if not weights:
        return None  # an empty dictionary would make timm look for weights elsewhere
    # All of it is made here: nothing that a file says may decide where timm looks for weights.
    stored = {
        **{name: config[name] for name in ("input_size", "fixed_input_size") if name in config},
        "num_classes": num_classes,
        "first_conv": None,
        "classifier": None,
        "state_dict": dict(weights),
    }
    draws = []
    for seed in (0, 1):
        try:
            with seeded(seed):
                model = timm.create_model(
                    architecture, pretrained=True, pretrained_cfg=stored, num_classes=num_classes, **options
                )
        except Exception:  # a filter of timm meets tensors it was not written for: anything may happen
            return None
        draws.append(model.state_dict())
    if any(not torch.equal(tensor, draws[1][name]) for name, tensor in draws[0].items()):
        return None
    dtype = most_common_dtype(weights)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in draws[0].items()}
