"""The libraries whose models are read, built and saved: what is particular to each is in one place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from hf_retarget.models.config import Description
from hf_retarget.models.timm_library import TimmLibrary
from hf_retarget.models.transformers_library import TransformersLibrary


class Library(Protocol):
    """What has to be known of a library."""

    companions: tuple[str, ...]
    """Files besides config.json and the weights that say something about a model, if they are there."""
    tells_all: bool
    """Whether a model from Python can be built again from its description."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json is one of this library."""

    def describe(self, raw: Mapping[str, Any], folder: Path, where: str, arch: str | None = None) -> Description:
        """What config.json and the files beside it say; `arch` overrules the architecture."""

    def describe_model(self, model: nn.Module) -> Description | None:
        """What a model from Python says of itself; None if it is none of this library."""

    def build(self, about: Description, *, empty: bool = False, seed: int = 0) -> nn.Module:
        """A model that answers images with logits, with random weights from the seed, or without memory for them."""

    def convert(self, weights: Mapping[str, Tensor], about: Description) -> dict[str, Tensor] | None:
        """Stored tensors under the names of the model, as the library itself renames them; None if it cannot."""

    def write(self, folder: Path, weights: dict[str, Tensor], about: Description, model: nn.Module) -> None:
        """Save weights, under the names that the model has for them, as the library saves them."""


LIBRARIES: Mapping[str, Library] = {"transformers": TransformersLibrary(), "timm": TimmLibrary()}
"""In the order in which they are asked; timm has the last word."""


def find_library(raw: Mapping[str, Any]) -> Library:
    """The library that a config.json belongs to.

    Example:
        >>> type(find_library({"model_type": "vit", "architectures": ["ViTForImageClassification"]})).__name__
        'TransformersLibrary'
        >>> type(find_library({"architecture": "resnet18"})).__name__
        'TimmLibrary'
    """
    return next(library for library in LIBRARIES.values() if library.claims(raw))
