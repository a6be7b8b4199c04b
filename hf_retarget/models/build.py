"""Builds a model from a reference, with or without memory for its weights."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.models.classifier import resize_classifier
from hf_retarget.models.shape import TooLargeError, parameters_of


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
    except TooLargeError:
        raise
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
    if is_factory(reference):
        return _from_factory(reference, options)
    return _from_timm(reference, options)


def sized_model(
    architecture: str,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    empty: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Build a model with so many classes, from its constructor arguments and timm's configuration.

    A factory that takes no `num_classes` builds the model as it is, and its classifier is exchanged. The same seed
    gives the same weights, and torch's own random numbers go on as if nothing had been drawn.

    Example:
        >>> sized_model("test_vit", 10, {"in_chans": 1}).num_classes
        10
    """
    make = empty_model if empty else random_model
    given = dict(options or {})
    factory = is_factory(architecture)
    if config and not factory:
        given["pretrained_cfg"] = known_to_timm(config)
    if num_classes is not None and (not factory or _accepts(_factory(architecture), "num_classes")):
        given["num_classes"] = num_classes
    with seeded(seed):
        model = make(architecture, **given)
        return model if num_classes is None else resize_classifier(model, num_classes)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of the CPU from this seed, and those of before afterwards.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(1)
        >>> with seeded(0):
        ...     bool(torch.rand(1) == first)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach other devices, and stay there
        yield


def is_factory(reference: str) -> bool:
    """Whether a reference is a `module:factory`.

    Example:
        >>> is_factory("torchvision.models:resnet18"), is_factory("hf-hub:timm/resnet18.a1_in1k")
        (True, False)
    """
    scheme, colon, _ = reference.partition(":")
    return bool(colon) and scheme not in ("hf-hub", "local-dir", "hf_hub", "local_dir")


def is_timm(architecture: str) -> bool:
    """Whether timm has an architecture of this name.

    Example:
        >>> is_timm("resnet18"), is_timm("ResNet")
        (True, False)
    """
    import timm

    return ":" not in architecture and bool(timm.is_model(architecture))


def known_to_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that timm knows and that do not say where weights are; it stumbles over others.

    Example:
        >>> known_to_timm({"crop_pct": 0.9, "url": "https://…", "mine": 1})
        {'crop_pct': 0.9}
    """
    from dataclasses import fields

    from timm.models import PretrainedCfg
    from timm.models._pretrained import filter_pretrained_cfg

    known = {field.name for field in fields(PretrainedCfg)} - {"state_dict"}
    kept = {name: value for name, value in config.items() if name in known}
    return dict(filter_pretrained_cfg(kept, remove_source=True))


def _factory(reference: str) -> Callable[..., Any]:
    module_name, _, factory_name = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"'{reference}' cannot be imported: {error}") from error
    if not callable(factory):
        raise ModelError(f"'{reference}' is {type(factory).__name__}, not something that builds a model")
    return factory  # type: ignore[no-any-return]


def _accepts(factory: Callable[..., Any], option: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # no signature to be had
        return False
    return any(each.name == option or each.kind is each.VAR_KEYWORD for each in parameters)


def _from_factory(reference: str, options: dict[str, Any]) -> nn.Module:
    factory = _factory(reference)
    try:
        model = factory(**options)
    except TooLargeError as error:
        raise TooLargeError(f"'{reference}' cannot be built: {error}") from error
    except Exception as error:  # whatever the constructor of the model raises
        raise ModelError(f"'{reference}' cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{reference}' returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_timm(reference: str, options: dict[str, Any]) -> nn.Module:
    import timm

    if ":" not in reference and not timm.is_model(reference):
        raise ModelError(f"'{reference}' is not a timm model; {near_timm_names(reference)}")
    try:
        return timm.create_model(reference, pretrained=False, **options)
    except TooLargeError as error:
        raise TooLargeError(f"'{reference}' cannot be built: {error}") from error
    except Exception as error:  # timm raises whatever the constructor of the model does
        raise ModelError(f"'{reference}' cannot be built: {type(error).__name__}: {error}") from error


@cache
def constructor_arguments(architecture: str) -> frozenset[str]:
    """What the class that a bare name of timm builds can be told, or what a `module:factory` takes.

    Example:
        >>> "img_size" in constructor_arguments("test_vit"), "checkpoint_path" in constructor_arguments("test_vit")
        (True, False)
    """
    if is_factory(architecture):
        return parameters_of(_factory(architecture))
    return parameters_of(type(empty_model(architecture)))


def near_timm_names(name: str) -> str:
    """The end of a sentence about a name that timm does not have.

    Example:
        >>> near_timm_names("resnet81")
        "did you mean 'resnet18' or 'resnet61q' or 'resnet51q'?"
    """
    import timm

    near = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "timm.list_models() lists the names"
