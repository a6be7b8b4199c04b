"""Checkpoints: the weights of one side of a port with the description of their model; saving models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hf_retarget.document import ModelFacts
from hf_retarget.errors import ModelError, NotFiniteError
from hf_retarget.models.classifier import resize_classifier
from hf_retarget.models.config import Description
from hf_retarget.models.timm_models import TimmLibrary
from hf_retarget.models.transformers_models import TransformersLibrary
from hf_retarget.models.weights import find_not_finite, fit_weights, fits, seeded

Library = TimmLibrary | TransformersLibrary

LIBRARIES: Mapping[str, Library] = {"transformers": TransformersLibrary(), "timm": TimmLibrary()}
"""In the order in which they are tried; timm is the fallback."""


def find_library(raw: Mapping[str, Any]) -> Library:
    """The library that a config.json is for.

    Example:
        >>> type(find_library({"model_type": "vit", "architectures": ["ViTForImageClassification"]})).__name__
        'TransformersLibrary'
        >>> type(find_library({"architecture": "resnet18"})).__name__
        'TimmLibrary'
    """
    return next(library for library in LIBRARIES.values() if library.claims(raw))


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint(Description):
    """Weights as stored, with the architecture that they fit."""

    num_classes: int
    reference: str
    """As given by the user."""
    weights: dict[str, Tensor] = field(repr=False)
    """The whole state dict, in its stored dtypes."""
    dtype: torch.dtype
    """The most common floating-point dtype."""
    revision: str | None = None
    """The commit, for models from the Hub."""
    hub_id: str | None = None
    """The Hub id, for models from the Hub: `timm/resnet18.a1_in1k`."""
    base_models: tuple[str, ...] = ()
    """The base models named in the model card."""
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The sha256 of each file that was read."""
    notes: tuple[str, ...] = ()
    """Remarks for the user about how it was read."""
    module: nn.Module | None = field(default=None, repr=False)
    """The module itself, if it was passed from Python and can only be copied."""

    @property
    def facts(self) -> ModelFacts:
        """Its entry in port.json."""
        return ModelFacts(
            reference=self.reference,
            architecture=self.architecture,
            classes=self.num_classes,
            library=self.library,
            options=dict(self.options),
            revision=self.revision,
            hub_id=self.hub_id,
            base_models=tuple(self.base_models),
            license=self.config.get("license"),
            license_link=self.config.get("license_link"),
            hashes=dict(self.hashes),
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def build(self, num_classes: int | None = None, *, seed: int = 0) -> nn.Module:
        """The model in float32 on the CPU, in evaluation mode, with these weights.

        With another number of classes, the classifier gets random weights from the seed.
        """
        model = self._make(num_classes, seed, empty=False).float()
        room = model.state_dict()
        fitting = {name: tensor for name, tensor in self.weights.items() if fits(tensor, room.get(name))}
        model.load_state_dict(fitting, strict=False)
        return model.requires_grad_(True).eval()

    def skeleton(self, num_classes: int | None = None) -> nn.Module:
        """The model with parameters on the meta device: names and shapes only."""
        return self._make(num_classes, seed=0, empty=True)

    def in_float32(self) -> dict[str, Tensor]:
        """The weights in float32, in which everything is computed."""
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in self.weights.items()}

    def _make(self, num_classes: int | None, seed: int, *, empty: bool) -> nn.Module:
        classes = self.num_classes if num_classes is None else num_classes
        if self.module is None:
            return LIBRARIES[self.library].build(replace(self, num_classes=classes), empty=empty, seed=seed)
        with seeded(seed):
            return resize_classifier(copy.deepcopy(self.module).cpu(), classes)


def save_model(
    folder: str | Path,
    weights: Mapping[str, Tensor] | None,
    like: Checkpoint,
    *,
    num_classes: int | None = None,
    labels: tuple[str, ...] | None = None,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights as a model of the same architecture as `like`; equal content gives equal bytes.

    Tensors are stored in the dtypes of `like`, or in `dtype`. `config` replaces entries of the configuration, such as
    input_size. Label names are only written if given. Without weights, only the configuration is written.
    """
    classes = like.num_classes if num_classes is None else num_classes
    if labels is not None and len(labels) != classes:
        raise ModelError(f"there are {len(labels)} label names for {classes} classes; give one for each, or none")
    about = replace(like, num_classes=classes, labels=labels, config={**like.config, **(config or {})})
    model = about.skeleton()
    stored: dict[str, Tensor] = {}
    if weights is not None:
        fault = f"these are not weights of '{like.architecture}'"
        ordered = fit_weights(weights, model.state_dict(), str(folder), fault)
        stored = _distinct({name: _stored(name, tensor, like, dtype) for name, tensor in ordered.items()})
    folder = Path(folder)
    try:
        LIBRARIES[like.library].write(folder, stored, about, model)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the model to '{folder}': {error}") from error
    return folder


def _stored(name: str, tensor: Tensor, like: Checkpoint, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu()
    if find_not_finite({name: tensor}):
        raise NotFiniteError(f"'{name}' holds NaN or infinite values; such a model is not saved")
    if not tensor.is_floating_point():
        return tensor.contiguous()
    known = like.weights.get(name)
    wanted = dtype or (known.dtype if known is not None and known.is_floating_point() else like.dtype)
    narrow = tensor.to(wanted)
    if find_not_finite({name: narrow}):
        raise ModelError(
            f"'{name}' has values up to {float(tensor.abs().max()):.3g}, too large for {wanted}; "
            "save in float32 or bfloat16"
        )
    return narrow.contiguous()


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, such as tied weights, since safetensors refuses them.

    `huggingface_hub.save_torch_state_dict` would leave them out, and some libraries would then miss them.
    """
    seen: set[int] = set()
    distinct = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        distinct[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return distinct
