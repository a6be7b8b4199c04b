"""The classifier of a model: where it is, how many classes it has, and how it is given another size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hf_retarget.errors import ModelError


def classifier_names(model: nn.Module, config: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The parameters of a model's classifier: as timm's configuration says, as the model says, or the last layer.

    Example:
        >>> classifier_names(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        ('2.weight', '2.bias')
    """
    names = [name for name, _ in model.named_parameters()]
    if config is None:
        config = getattr(model, "pretrained_cfg", None) or {}
    for modules in (configured_modules(config), _told(model), _last(model)):
        if found := under(modules, names):
            return found
    return ()


def under(modules: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Those of the tensors that belong to one of the modules.

    Example:
        >>> under(["head"], ["stem.weight", "head.weight", "header.weight"])
        ('head.weight',)
    """
    roots = list(modules)
    return tuple(name for name in names if any(not root or name.startswith(f"{root}.") for root in roots))


def configured_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that timm's configuration names as the classifier: none, one, or several if the model is distilled.

    Example:
        >>> configured_modules({"classifier": ("head", "head_dist")})
        ('head', 'head_dist')
    """
    named = config.get("classifier") or ()
    return (named,) if isinstance(named, str) else tuple(named)


def count_classes(model: nn.Module) -> int:
    """How many classes a model tells apart; 0 if it has no classifier.

    Example:
        >>> count_classes(nn.Linear(4, 3))
        3
    """
    said = getattr(model, "num_classes", None)
    if isinstance(said, int):
        return said
    weights = [model.get_parameter(name) for name in classifier_names(model)]
    return max((len(weight) for weight in weights if weight.dim() > 1), default=0)


def resize_classifier(model: nn.Module, num_classes: int) -> nn.Module:
    """Give a model a new, freshly initialised classifier, in place, unless it has the right size already.

    Example:
        >>> resize_classifier(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), 5)[-1]
        Linear(in_features=8, out_features=5, bias=True)
    """
    if count_classes(model) == num_classes:
        return model
    if callable(reset := getattr(model, "reset_classifier", None)):
        reset(num_classes)
        return model
    modules = _last(model)
    if not modules or not num_classes:
        raise ModelError(
            f"{type(model).__name__} cannot be given {num_classes} classes: it has no classifier that could be found "
            "and no reset_classifier(num_classes); add that method to the model"
        )
    where, _, name = modules[0].rpartition(".")
    if not name:
        raise ModelError(f"{type(model).__name__} is a single layer; wrap it into a module to change its classes")
    parent = model.get_submodule(where)
    setattr(parent, name, _like(getattr(parent, name), num_classes))
    return model


def _told(model: nn.Module) -> tuple[str, ...]:
    """What timm's models return from `get_classifier`, by name; nothing for other models."""
    if not callable(get := getattr(model, "get_classifier", None)):
        return ()
    told = get()
    wanted = {id(each) for each in (told if isinstance(told, (tuple, list)) else [told])}
    return tuple(name for name, module in model.named_modules() if name and id(module) in wanted)


def _last(model: nn.Module) -> tuple[str, ...]:
    """The last linear or convolutional layer, with as many outputs as there are classes if that is known."""
    classes = getattr(model, "num_classes", None)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, _ConvNd))]
    if isinstance(classes, int):
        layers = [(name, module) for name, module in layers if len(module.weight) == classes]
    return (layers[-1][0],) if layers else ()


def _like(layer: nn.Module, outputs: int) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs, bias=layer.bias is not None)
    if isinstance(layer, _ConvNd) and layer.groups == 1:
        kind: Any = type(layer)
        return kind(  # type: ignore[no-any-return]
            layer.in_channels,
            outputs,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            dilation=layer.dilation,
            bias=layer.bias is not None,
        )
    raise ModelError(f"a classifier of type {type(layer).__name__} cannot be resized")
