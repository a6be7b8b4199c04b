"""Headers of safetensors files: names, shapes and types of tensors, without their numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_retarget.errors import ModelError

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
