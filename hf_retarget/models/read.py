"""Weights on disk: which files hold them, and what is in them. Safetensors; pickles only if asked for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_retarget.errors import ModelError
from hf_retarget.files import load_tensors
from hf_retarget.models.tensors import find_not_finite
from hf_retarget.untrusted import read_json

SAFE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *PICKLES)

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
"""Where training scripts put the weights among the rest; averaged weights first, as timm does."""


def weight_files(folder: Path, where: str, *, allow_pickle: bool = False) -> list[Path]:
    """The files that hold the weights of a folder: one, the shards of an index, or, if asked for, a pickle."""
    if (folder / SAFE).is_file():
        return [folder / SAFE]
    if (folder / INDEX).is_file():
        return [folder / name for name in shard_names(folder / INDEX)]
    safe = sorted(folder.glob("*.safetensors"))
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if len(safe) == 1:
        return safe
    if allow_pickle and pickles:
        return [folder / PICKLE] if (folder / PICKLE) in pickles else pickles[:1]
    if len(safe) > 1:
        raise ModelError(
            f"'{where}' holds several weight files ({', '.join(path.name for path in safe[:3])} …) and no {SAFE}; "
            "name one of them, with --arch"
        )
    if pickles:
        raise ModelError(pickle_only(where, pickles[0].name))
    raise ModelError(f"'{where}' holds no weights: there is no {SAFE} in it")


def pickle_only(where: str, name: str) -> str:
    """The refusal of weights that could run code.

    Example:
        >>> pickle_only("org/model", "pytorch_model.bin").partition(",")[0]
        "'org/model' has its weights only as a pickle ('pytorch_model.bin')"
    """
    return (
        f"'{where}' has its weights only as a pickle ('{name}'), which can run code when it is read; "
        "convert it to safetensors, or say --allow-pickle (only tensors are then read from it)"
    )


def shard_names(index: Path) -> list[str]:
    """The files a model.safetensors.index.json names, each once, in order."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"'{index}' cannot be read: {type(error).__name__}: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"'{index}' names '{name}', which is no safetensors file beside it")
    return names


def read_weights(files: Iterable[Path], *, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of some files, in the dtypes they are stored in."""
    weights: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise ModelError(f"the weights '{path}' are missing")
        found = _read_safe(path) if path.suffix == ".safetensors" else _read_pickle(path, allow_pickle)
        if broken := find_not_finite(found):
            raise ModelError(f"'{broken}' in '{path}' holds NaN or infinite numbers; the model was saved when broken")
        weights |= found
    if not weights:
        raise ModelError("there are no tensors in the weights")
    return weights


def _read_safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)[0]
    except OSError as error:
        raise ModelError(
            f"'{path}' is not a whole safetensors file: {error}; was it cut off? Copy or download it again"
        ) from error


def _read_pickle(path: Path, allowed: bool) -> dict[str, Tensor]:
    if not allowed:
        raise ModelError(pickle_only(str(path), path.name))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        fact = str(error).partition("\n")[0]
        raise ModelError(
            f"'{path}' cannot be read as a pickle of tensors: {fact}; save only model.state_dict()"
        ) from error
    weights = _unwrap(content)
    if weights is None:
        raise ModelError(f"'{path}' holds no state dict; save model.state_dict(), as safetensors if possible")
    return weights


def _unwrap(content: Any) -> dict[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    for wrapper in _WRAPPERS:
        if isinstance(inner := content.get(wrapper), Mapping) and inner:
            return _unwrap(inner)
    tensors = {name: value.detach() for name, value in content.items() if isinstance(value, Tensor)}
    return tensors or None
