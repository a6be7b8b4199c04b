"""A checkpoint: the weights of one side of a port, and all that is known about the model they belong to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.models.build import seeded
from hf_retarget.models.classifier import resize_classifier
from hf_retarget.models.config import Description
from hf_retarget.models.library import LIBRARIES
from hf_retarget.models.weights import fits


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights as they are stored, with the architecture that they fit."""

    reference: str
    """As the user gave it."""
    architecture: str
    """A timm architecture without tag, `module:factory`, a class of transformers, or the class name of a model given
    from Python."""
    options: Mapping[str, Any]
    """Constructor arguments, without `num_classes`."""
    num_classes: int
    labels: tuple[str, ...] | None
    """Label names in the order of the classifier, if they are known."""
    config: Mapping[str, Any] = field(repr=False)
    """Configuration in timm's words: input_size, mean, std, interpolation, crop_pct, classifier, license …"""
    weights: dict[str, Tensor] = field(repr=False)
    """The whole state dict, in the dtypes it is stored in."""
    dtype: torch.dtype
    """What most of the floating-point numbers are stored as."""
    revision: str | None = None
    """The commit, for models from the Hub."""
    hub_id: str | None = None
    """What the Hub calls it, if it came from there: `timm/resnet18.a1_in1k`."""
    base_models: tuple[str, ...] = ()
    """What it was made from, as the card in its folder names it."""
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """From the names of the files that were read to their sha256."""
    module: nn.Module | None = field(default=None, repr=False)
    """The model itself, if it was given from Python and can only be copied."""
    library: str = "timm"
    """Whose format it is read and saved in: a key of `LIBRARIES`."""

    def build(self, num_classes: int | None = None, *, seed: int = 0) -> nn.Module:
        """The model in float32 on the CPU, in evaluation mode, with these weights.

        With another number of classes the classifier is new, and the seed decides about its weights.
        """
        wanted = self.num_classes if num_classes is None else num_classes
        model = self._make(wanted, seed, empty=False).float()
        room = model.state_dict()
        fitting = {name: tensor for name, tensor in self.weights.items() if fits(tensor, room.get(name))}
        model.load_state_dict(fitting, strict=False)
        return model.requires_grad_(True).eval()

    def skeleton(self, num_classes: int | None = None) -> nn.Module:
        """The model without memory for its parameters: names and shapes only."""
        return self._make(self.num_classes if num_classes is None else num_classes, seed=0, empty=True)

    def in_float32(self) -> dict[str, Tensor]:
        """The weights as they are computed with: half precision is only a way to store them."""
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in self.weights.items()}

    def describe(self, num_classes: int, labels: tuple[str, ...] | None = None) -> Description:
        """All that is known of the model besides its weights, for so many classes."""
        return Description(self.architecture, self.options, num_classes, labels, self.config, self.library)

    def _make(self, num_classes: int, seed: int, *, empty: bool) -> nn.Module:
        if self.module is None:
            return LIBRARIES[self.library].build(self.describe(num_classes), empty=empty, seed=seed)
        with seeded(seed):
            return resize_classifier(copy.deepcopy(self.module).cpu(), num_classes)
