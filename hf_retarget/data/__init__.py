"""Images and labels: loading them, preparing them for a model, and drawing minibatches."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_retarget.data.batches import Batch, BatchCache, ImageData, Split, derive_seed
    from hf_retarget.data.embedded import EMBEDDED
    from hf_retarget.data.labels import check_classes, match_labels
    from hf_retarget.data.load import DataFacts, describe_data, load_data
    from hf_retarget.data.preprocess import Preprocess, choose_preprocess

__all__ = [
    "EMBEDDED",
    "Batch",
    "BatchCache",
    "DataFacts",
    "ImageData",
    "Preprocess",
    "Split",
    "check_classes",
    "choose_preprocess",
    "derive_seed",
    "describe_data",
    "load_data",
    "match_labels",
]

# Imported on first use: torch takes seconds, and `--help` does not need it.
_MODULES = {
    "batches": ("Batch", "BatchCache", "ImageData", "Split", "derive_seed"),
    "embedded": ("EMBEDDED",),
    "labels": ("check_classes", "match_labels"),
    "load": ("DataFacts", "describe_data", "load_data"),
    "preprocess": ("Preprocess", "choose_preprocess"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"hf_retarget.data.{module}"), name)
    raise AttributeError(f"module 'hf_retarget.data' has no attribute {name!r}")
