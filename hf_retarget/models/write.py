"""The files of a model, written wholly or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_retarget.files import atomic_path
from hf_retarget.models.read import SAFE


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors, the same bytes for the same content.

    Example:
        >>> write_weights(Path("ported"), model.state_dict())      # doctest: +SKIP
    """
    from safetensors.torch import save_file

    with atomic_path(folder / SAFE) as temporary:
        save_file(tensors, temporary, {"format": "pt"})  # transformers asks for the entry


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration.

    Example:
        >>> write_json(Path("ported/config.json"), {"architecture": "resnet18"})      # doctest: +SKIP
    """
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
