"""Weights on disk: which files hold them, and what is in them, with or without numbers. Pickles only if asked for."""

from __future__ import annotations

import json
import pickle
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_retarget.errors import ModelError
from hf_retarget.files import atomic_path, load_tensors
from hf_retarget.untrusted import read_json


def fits(tensor: Tensor, place: Tensor | None) -> bool:
    """Whether a tensor has the shape of the place it is meant for.

    Example:
        >>> fits(torch.zeros(2), torch.zeros(3)), fits(torch.zeros(2), None)
        (False, False)
    """
    return place is not None and place.shape == tensor.shape


def most_common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that most of the floating-point numbers have.

    Example:
        >>> most_common_dtype({"w": torch.zeros(9, dtype=torch.float16), "b": torch.zeros(3)})
        torch.float16
    """
    numbers: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] += tensor.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


def find_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is NaN, infinite or complex; None if there is none.

    Example:
        >>> find_not_finite({"w": torch.tensor([1.0]), "b": torch.tensor([float("nan")])})
        'b'
    """
    return next((name for name, tensor in weights.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # 8-bit floats have no `isfinite`
        tensor = tensor.float()
    return bool(tensor.isfinite().all())


def without_numbers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same names, shapes and types on the meta device, where they take no memory.

    Example:
        >>> without_numbers({"w": torch.zeros(2)})["w"].is_meta
        True
    """
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}


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


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of some safetensors files, on the meta device; a file that is not whole is an error."""
    found: dict[str, Tensor] = {}
    for path in files:
        found |= _read(path)
    if not found:
        raise ModelError("there are no tensors in the weights")
    return found


def write_hollow(path: Path, tensors: Mapping[str, Any]) -> None:
    """A file with the same tensors as one elsewhere, and a hole where the numbers are, which takes no room on disk."""
    entries = {
        name: {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": list(each.data_offsets)}
        for name, each in tensors.items()
    }
    header = json.dumps(entries).encode()
    end = max((each["data_offsets"][1] for each in entries.values()), default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelError(f"the weights '{path}' are missing")
    tensors = {}
    try:
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                part = file.get_slice(name)
                tensors[name] = torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype(), path), device="meta")
    except (SafetensorError, OSError, RuntimeError, OverflowError, TypeError, ValueError) as error:
        fact = str(error).partition("\n")[0]  # torch adds a page about itself
        raise ModelError(
            f"'{path}' is not a whole safetensors file: {fact}; was it cut off? Copy or download it again"
        ) from error
    return tensors


def _dtype(name: str, path: Path) -> torch.dtype:
    if name not in _DTYPES:
        raise ModelError(f"'{path}' holds tensors of type '{name}', which cannot be ported")
    return _DTYPES[name]


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors, the same bytes for the same content."""
    from safetensors.torch import save_file

    with atomic_path(folder / SAFE) as temporary:
        save_file(tensors, temporary, {"format": "pt"})  # transformers asks for the entry
