"""Which versions made a result: part of what is written beside it."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import hf_retarget

_LIBRARIES = ("torch", "timm", "datasets", "accelerate", "safetensors", "numpy", "scipy")
_OPTIONAL = ("transformers",)


def describe_environment() -> dict[str, Any]:
    """What the bits of a result depend on besides the inputs: versions, and the threads that share a sum."""
    import torch

    return {**list_versions(), "threads": torch.get_num_threads()}


def list_versions() -> dict[str, str]:
    """This package, Python, and the libraries on which figures may depend.

    Example:
        >>> list(list_versions())[:3]
        ['hf-retarget', 'python', 'torch']
    """
    ours = {"hf-retarget": hf_retarget.__version__, "python": platform.python_version()}
    found = ours | {name: version(name) for name in _LIBRARIES}
    for name in _OPTIONAL:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
