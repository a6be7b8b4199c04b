"""What the shapes of stored tensors say about a model of timm: channels and classes, unless they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.build import is_timm, sized_model
from hf_retarget.models.classifier import classifier_names, count_classes
from hf_retarget.models.config import Description

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
