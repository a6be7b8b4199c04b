"""Images and labels: where they come from, how they are prepared, and in which order they are drawn."""

from importlib import import_module
from typing import TYPE_CHECKING

from hf_retarget.data.options import DataOptions

if TYPE_CHECKING:
    from hf_retarget.data.embedded import EMBEDDED
    from hf_retarget.data.images import Batch, ImageData, Split
    from hf_retarget.data.load import load_data
    from hf_retarget.data.preprocess import Preprocess

# Recipes need the options only, and should not wait for torch.
_LAZY = {
    "EMBEDDED": "embedded",
    "Batch": "images",
    "ImageData": "images",
    "Preprocess": "preprocess",
    "Split": "images",
    "load_data": "load",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_retarget.data' has no attribute {name!r}")
    return getattr(import_module(f"hf_retarget.data.{_LAZY[name]}"), name)


__all__ = ["EMBEDDED", "Batch", "DataOptions", "ImageData", "Preprocess", "Split", "load_data"]
