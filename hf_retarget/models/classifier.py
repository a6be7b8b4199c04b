"""The classifier of a model: finding it, counting its classes, and resizing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def classifier_names(model: nn.Module, config: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The parameters of a classifier, according to timm's configuration, the model itself, or those of the last layer.

    Example:
        >>> classifier_names(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        ('2.weight', '2.bias')
    """
    names = [name for name, _ in model.named_parameters()]
    if config is None:
        config = getattr(model, "pretrained_cfg", None) or {}
    for modules in (configured_modules(config), _announced(model), _last(model)):
        if found := under(modules, names):
            return found
    return ()


def under(modules: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The tensors of some modules.

    Example:
        >>> under(["head"], ["stem.weight", "head.weight", "header.weight"])
        ('head.weight',)
    """
    roots = list(modules)
    return tuple(name for name in names if any(not root or name.startswith(f"{root}.") for root in roots))


def configured_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classifier's modules according to timm's configuration: several for distilled models."""
    named = config.get("classifier") or ()
    return (named,) if isinstance(named, str) else tuple(named)


def count_classes(model: nn.Module) -> int:
    """The number of classes of a model; 0 without a classifier.

    Example:
        >>> count_classes(nn.Linear(4, 3))
        3
    """
    announced = getattr(model, "num_classes", None)
    if isinstance(announced, int):
        return announced
    weights = [model.get_parameter(name) for name in classifier_names(model)]
    return max((len(weight) for weight in weights if weight.dim() > 1), default=0)


def resize_classifier(model: nn.Module, num_classes: int) -> nn.Module:
    """Replace the classifier of a model in place by a newly initialized one, unless it already has the right size.

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
            f"{type(model).__name__} cannot be given {num_classes} classes: no classifier was found, and it has no "
            "method reset_classifier(num_classes); add that method to the model"
        )
    where, _, name = modules[0].rpartition(".")
    if not name:
        raise ModelError(f"{type(model).__name__} is a single layer; wrap it in a module to change its classes")
    parent = model.get_submodule(where)
    setattr(parent, name, _resized(getattr(parent, name), num_classes))
    return model


def check_shapes(model: nn.Module, input_size: tuple[int, ...], classes: int) -> None:
    """Run the model once on zeros, so that a wrong image size is found before long work begins.

    Example:
        >>> check_shapes(nn.Flatten(), (1, 2, 2), classes=4)
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, *input_size, device=device))
    except Exception as error:  # whatever the model's own code raises
        fact = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"the model cannot take images of {'×'.join(map(str, input_size))}: {fact}; set the size with "
            "--data-image-size (a model from Python may have it in pretrained_cfg = {'input_size': (channels, height, "
            "width)})"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != [1, classes]:
        raise ModelError(f"the model's output for one image is {shape}, not one number for each of {classes} classes")


def _announced(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules that `get_classifier` returns."""
    if not callable(get := getattr(model, "get_classifier", None)):
        return ()
    found = get()
    wanted = {id(each) for each in (found if isinstance(found, (tuple, list)) else [found])}
    return tuple(name for name, module in model.named_modules() if name and id(module) in wanted)


def _last(model: nn.Module) -> tuple[str, ...]:
    """The last linear or convolutional layer, with one output per class if the number of classes is known."""
    classes = getattr(model, "num_classes", None)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS))
        and (not isinstance(classes, int) or len(module.weight) == classes)
    ]
    return tuple(names[-1:])


def _resized(layer: nn.Module, outputs: int) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs, bias=layer.bias is not None)
    if isinstance(layer, _CONVOLUTIONS) and layer.groups == 1:
        kind: Any = type(layer)
        places = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return kind(layer.in_channels, outputs, *places, bias=layer.bias is not None)  # type: ignore[no-any-return]
    raise ModelError(f"a classifier of type {type(layer).__name__} cannot be resized")
