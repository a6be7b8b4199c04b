"""Builds a model from a reference, with or without memory for its weights."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from torch import nn

from hf_retarget.errors import ModelError


def empty_model(reference: str, **options: Any) -> nn.Module:
    """Build a model whose parameters take no memory: enough to trace it.

    Buffers are real, because their values may decide what can be permuted.

    Example:
        >>> next(empty_model("test_vit").parameters()).is_meta
        True
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            return random_model(reference, **options)
    except ModelError:
        return random_model(reference, **options)  # some constructors compute with their own weights


def random_model(reference: str, **options: Any) -> nn.Module:
    """Build a model with freshly initialised weights from a timm name, `hf-hub:…`, `local-dir:…` or `module:factory`.

    Example:
        >>> type(random_model("test_vit", num_classes=10)).__name__
        'VisionTransformer'
        >>> type(random_model("torch.nn:Linear", in_features=2, out_features=3)).__name__
        'Linear'
    """
    scheme, colon, rest = reference.partition(":")
    if colon and scheme not in ("hf-hub", "local-dir", "hf_hub", "local_dir"):
        return _from_factory(scheme, rest, options)
    return _from_timm(reference, options)


def _from_factory(module_name: str, factory_name: str, options: dict[str, Any]) -> nn.Module:
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"'{module_name}:{factory_name}' cannot be imported: {error}") from error
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{module_name}:{factory_name}' returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_timm(reference: str, options: dict[str, Any]) -> nn.Module:
    import timm

    local = ":" in reference
    if not local and not timm.is_model(reference):
        near = difflib.get_close_matches(reference, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "timm.list_models() lists the names"
        raise ModelError(f"'{reference}' is not a timm model; {hint}")
    try:
        return timm.create_model(reference, pretrained=False, **options)
    except Exception as error:  # timm raises whatever the constructor of the model does
        raise ModelError(f"'{reference}' cannot be built: {type(error).__name__}: {error}") from error
