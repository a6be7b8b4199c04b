"""Stored tensors and the model they are meant for: brought together if only names differ, and named if they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_retarget.errors import ModelError
from hf_retarget.models.build import seeded
from hf_retarget.models.tensors import fits, most_common_dtype

_PREFIXES = ("module.", "_orig_mod.", "timm_model.", "model.")
"""What DistributedDataParallel, torch.compile, transformers and Lightning put before every name."""

_COUNTER = "num_batches_tracked"


def strip_prefixes(weights: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """The tensors without a prefix that all of them have, unless the model has it too.

    Example:
        >>> list(strip_prefixes({"module.fc.bias": torch.zeros(2)}, ["fc.bias"]))
        ['fc.bias']
    """
    stripped = dict(weights)
    while not any(name in expected for name in stripped):
        prefix = next((each for each in _PREFIXES if all(name.startswith(each) for name in stripped)), None)
        if prefix is None:
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped


def fit_weights(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, advice: str
) -> dict[str, Tensor]:
    """The tensors in the model's order, if there is exactly one for each of its places; else an error names the first.

    BatchNorm's counters may be missing: they have no influence, and some formats leave them out.

    Example:
        >>> fit_weights({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "a.pth", "why?")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.ModelError: 'a.pth' does not fit: 1 tensor has another shape (w is [2], not [3]); why?
    """
    counters = {name: torch.zeros_like(place) for name, place in expected.items() if name.endswith(_COUNTER)}
    whole = {**counters, **weights}
    if differing := describe_differences(whole, expected):
        raise ModelError(f"'{where}' does not fit: {differing}; {advice}")
    return {name: whole[name] for name in expected}


def describe_differences(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What differs between tensors and the places for them, each kind with its first; empty if nothing does.

    Example:
        >>> describe_differences({"a": torch.zeros(1)}, {"b": torch.zeros(2, 2)})
        '1 tensor is missing (b [2, 2]), 1 tensor is unexpected (a [1])'
    """
    missing = [f"{name} {list(place.shape)}" for name, place in expected.items() if name not in weights]
    unexpected = [f"{name} {list(tensor.shape)}" for name, tensor in weights.items() if name not in expected]
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(place.shape)}"
        for name, place in expected.items()
        if name in weights and not fits(weights[name], place)
    ]
    kinds = [
        (missing, "is missing", "are missing"),
        (unexpected, "is unexpected", "are unexpected"),
        (shapes, "has another shape", "have other shapes"),
    ]
    return ", ".join(_count(found, one, many) for found, one, many in kinds if found)


def _count(items: list[str], one: str, many: str) -> str:
    if len(items) == 1:
        return f"1 tensor {one} ({items[0]})"
    return f"{len(items)} tensors {many} (first: {items[0]})"


def convert_with_timm(
    weights: Mapping[str, Tensor],
    architecture: str,
    num_classes: int,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Tensor] | None:
    """The tensors as timm renames and resizes those of its older or foreign checkpoints; nothing if it cannot.

    timm may fill gaps with random numbers without a word. Two draws tell: what depends on the seed was not stored.

    Example:
        >>> convert_with_timm({"w": torch.zeros(1)}, "test_vit", 10, {}, {}) is None
        True
    """
    import timm

    if not weights:
        return None  # an empty dictionary would make timm look for weights elsewhere
    # All of it is made here: nothing that a file says may decide where timm looks for weights.
    stored = {
        **{name: config[name] for name in ("input_size", "fixed_input_size") if name in config},
        "num_classes": num_classes,
        "first_conv": None,
        "classifier": None,
        "state_dict": dict(weights),
    }
    draws = []
    for seed in (0, 1):
        try:
            with seeded(seed):
                model = timm.create_model(
                    architecture, pretrained=True, pretrained_cfg=stored, num_classes=num_classes, **options
                )
        except Exception:  # a filter of timm meets tensors it was not written for: anything may happen
            return None
        draws.append(model.state_dict())
    if any(not torch.equal(tensor, draws[1][name]) for name, tensor in draws[0].items()):
        return None
    dtype = most_common_dtype(weights)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in draws[0].items()}
