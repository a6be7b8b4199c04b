"""timm's models, and modules of any other origin, which are described in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.files import write_json
from hf_retarget.models.build import sized_model
from hf_retarget.models.classifier import count_classes
from hf_retarget.models.config import Description, compose_config, describe_config, describe_module
from hf_retarget.models.fit import convert_with_timm, find_channels, rebuild, taking_channels
from hf_retarget.models.weights import without_numbers, write_weights


class TimmLibrary:
    """How timm saves models on the Hub."""

    companions: tuple[str, ...] = ()
    tells_all = False  # what a module does besides, nobody can read off it

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """All that nobody else claims."""
        return True

    def describe(self, raw: Mapping[str, Any], folder: Path, where: str, arch: str | None = None) -> Description:
        """What config.json says."""
        return describe_config(raw, where, arch)

    def describe_model(self, model: nn.Module) -> Description:
        """What timm knows of a model, if it can be built again; of any other, only its class."""
        classes, config = count_classes(model), describe_module(model)
        name, options = str(config.get("architecture", "")), {}
        about = Description(name, {}, classes, None, config)
        if channels := find_channels(model.state_dict(), about):
            options, config = {"in_chans": channels}, taking_channels(config, channels)
        again = rebuild(name, classes, options, config)
        # Constructor arguments leave traces in the printed form; only a model that prints the same, with
        # tensors of the same shapes, is known to be timm's.
        known = again is not None and str(again) == str(model) and _shapes(again) == _shapes(model)
        return Description(name if known else type(model).__name__, options if known else {}, classes, None, config)

    def build(self, about: Description, *, empty: bool = False, seed: int = 0) -> nn.Module:
        """By timm, or by the factory that the architecture names."""
        return sized_model(about.architecture, about.num_classes, about.options, about.config, empty=empty, seed=seed)

    def convert(self, weights: Mapping[str, Tensor], about: Description) -> dict[str, Tensor] | None:
        """As timm renames and resizes the tensors of its older or foreign checkpoints."""
        hollow = any(tensor.is_meta for tensor in weights.values())
        if hollow:  # timm computes with them; zeros take no memory before somebody writes to them
            weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        classes = about.num_classes or 0
        found = convert_with_timm(weights, about.architecture, classes, about.options, about.config)
        return without_numbers(found) if found and hollow else found

    def write(self, folder: Path, weights: dict[str, Tensor], about: Description, model: nn.Module) -> None:
        """model.safetensors and config.json."""
        write_weights(folder, weights)
        write_json(folder / "config.json", compose_config(about, model))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
