"""The files of a model, written wholly or not at all."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hf_retarget.files import atomic_path
from hf_retarget.models.read import SAFE


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors, the same bytes for the same content."""
    from safetensors.torch import save_file

    with atomic_path(folder / SAFE) as temporary:
        save_file(tensors, temporary, {"format": "pt"})  # transformers asks for the entry
