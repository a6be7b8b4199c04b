"""Saves a model as a folder that its library loads: model.safetensors, config.json and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hf_retarget.errors import ModelError, NotFiniteError
from hf_retarget.models.checkpoint import LIBRARIES, Checkpoint
from hf_retarget.models.weights import find_not_finite, fit_weights


def save_model(
    folder: str | Path,
    weights: Mapping[str, Tensor],
    like: Checkpoint,
    *,
    num_classes: int | None = None,
    labels: tuple[str, ...] | None = None,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights as a model of the same architecture as `like`, the same bytes for the same content.

    Tensors are stored as `like` has them, or in `dtype`. `config` replaces entries of its configuration, such as
    input_size. Label names are only written if they are given.
    """
    classes = like.num_classes if num_classes is None else num_classes
    if labels is not None and len(labels) != classes:
        raise ModelError(f"there are {len(labels)} label names for {classes} classes; give one for each, or none")
    about = replace(like, num_classes=classes, labels=labels, config={**like.config, **(config or {})})
    model = about.skeleton()
    ordered = fit_weights(weights, model.state_dict(), str(folder), f"they are no weights of '{like.architecture}'")
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
        raise NotFiniteError(f"'{name}' holds NaN or infinite numbers, and such a model is not saved")
    if not tensor.is_floating_point():
        return tensor.contiguous()
    known = like.weights.get(name)
    wanted = dtype or (known.dtype if known is not None and known.is_floating_point() else like.dtype)
    narrow = tensor.to(wanted)
    if find_not_finite({name: narrow}):
        raise ModelError(
            f"'{name}' has numbers up to {float(tensor.abs().max()):.3g}, too large for {wanted}; "
            "save in float32 or bfloat16"
        )
    return narrow.contiguous()


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory, as tied weights do: all but the first are copied.

    `huggingface_hub.save_torch_state_dict` would leave them out, and then not every library finds them.
    """
    seen: set[int] = set()
    distinct = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        distinct[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return distinct
