"""timm's models, and those of a `module:factory` or passed from Python, described in the same terms."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import timm
import torch
from accelerate import init_empty_weights
from timm.models import PretrainedCfg, filter_pretrained_cfg
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.files import write_json, write_tensors
from hf_retarget.models.classifier import classifier_names, count_classes, resize_classifier
from hf_retarget.models.config import Description, check_entry, check_images, check_model_arguments, read_labels
from hf_retarget.models.weights import SAFE, most_common_dtype, seeded, without_numbers
from hf_retarget.names import MODEL_CONFIG
from hf_retarget.words import nearest

_ABOUT_WEIGHTS = ("license", "tag", "origin_url", "paper_name", "paper_ids", "notes", "description")
"""Entries of a configuration that describe timm's own weights, not others of the same architecture."""
_LABELS = ("label_names", "label_descriptions", "label_offset")
_TRAINING_IMAGES = ("input_size", "crop_pct", "interpolation", "mean", "std")
_TRAINING_MODEL = {"global_pool": "gp", "bn_eps": "bn_eps"}
"""Arguments of timm's train.py that describe the model; channels and classes are inferred from the weights."""


# ---- building by name


def empty_model(reference: str, **options: Any) -> nn.Module:
    """Build a model with parameters on the meta device, which is enough to trace it.

    Buffers are real, because their values may decide what can be permuted.

    Example:
        >>> next(empty_model("test_vit").parameters()).is_meta
        True
    """
    try:
        with init_empty_weights(include_buffers=False):
            return random_model(reference, **options)
    except ModelError:
        return random_model(reference, **options)  # some constructors compute with their own weights


def random_model(reference: str, **options: Any) -> nn.Module:
    """Build a model with random weights from a timm name, `hf-hub:…`, `local-dir:…` or `module:factory`.

    Example:
        >>> type(random_model("test_vit", num_classes=10)).__name__
        'VisionTransformer'
        >>> type(random_model("torch.nn:Linear", in_features=2, out_features=3)).__name__
        'Linear'
    """
    if is_factory(reference):
        make = _import_factory(reference)
    else:
        if ":" not in reference and not timm.is_model(reference):
            raise ModelError(f"'{reference}' is not a timm model{suggest_names(reference)}")
        make = partial(timm.create_model, reference, pretrained=False)
    try:
        model = make(**options)
    except Exception as error:  # whatever the constructor of the model raises
        raise ModelError(f"'{reference}' cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{reference}' returned {type(model).__name__}, not a torch.nn.Module")
    return model


def is_factory(reference: str) -> bool:
    """Whether a reference is a `module:factory`.

    Example:
        >>> is_factory("torchvision.models:resnet18"), is_factory("hf-hub:timm/resnet18.a1_in1k")
        (True, False)
    """
    scheme, colon, _ = reference.partition(":")
    return bool(colon) and scheme not in ("hf-hub", "local-dir", "hf_hub", "local_dir")


def is_timm(architecture: str) -> bool:
    """Whether timm has an architecture of this name."""
    return ":" not in architecture and bool(timm.is_model(architecture))


def suggest_names(name: str) -> str:
    """The end of a message about a name unknown to timm.

    Example:
        >>> suggest_names("resnet81")
        "; did you mean 'resnet18' or 'resnet61q' or 'resnet51q'?"
    """
    return nearest(name.partition(".")[0], timm.list_models(), 3) or "; timm.list_models() lists the names"


def _import_factory(reference: str) -> Callable[..., Any]:
    module_name, _, factory_name = reference.partition(":")
    here = str(Path.cwd())
    sys.path.append(here)  # as `python -m` does, but last: no file here shadows an installed package
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"'{reference}' cannot be imported: {error}") from error
    finally:
        if sys.path[-1] == here:
            sys.path.pop()
    if not callable(factory):
        raise ModelError(f"'{reference}' is {type(factory).__name__}, not a callable that builds a model")
    return factory  # type: ignore[no-any-return]


@cache
def constructor_arguments(architecture: str) -> frozenset[str]:
    """The parameters of the class that timm builds for an architecture, or those of a `module:factory`.

    Parameters of base classes are included if a class forwards its keyword arguments.

    Example:
        >>> "img_size" in constructor_arguments("test_vit"), "checkpoint_path" in constructor_arguments("test_vit")
        (True, False)
    """
    build = _import_factory(architecture) if is_factory(architecture) else type(empty_model(architecture))
    if not isinstance(build, type):
        return _parameters(build)[0]
    names: set[str] = set()
    for kind in build.__mro__:
        if own := vars(kind).get("__init__"):
            found, passes_on = _parameters(own)
            names |= found | _fields_of_cfg(own)
            if not passes_on:
                break
    return frozenset(names - {"self"})


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """The names of a function's parameters, and whether it accepts any other keyword."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return frozenset(), False
    named = frozenset(each.name for each in given if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return named, any(each.kind is each.VAR_KEYWORD for each in given)


def _fields_of_cfg(function: Callable[..., Any]) -> set[str]:
    """Fields of the dataclass `cfg` to which some of timm's classes forward keyword arguments."""
    try:
        hint = get_type_hints(function).get("cfg")
    except (NameError, TypeError):
        return set()
    kinds = [each for each in (hint, *get_args(hint)) if is_dataclass(each)]
    return {each.name for kind in kinds for each in fields(kind)}


# ---- describing


def describe_architecture(name: str, options: Mapping[str, Any], *, pretrained: bool) -> Description:
    """Describe an architecture, with or without tag, as timm does; a `module:factory` has an empty configuration.

    With `pretrained`, the weights are timm's own, and its entries about them (classes, licence, tag) are kept.

    Example:
        >>> describe_architecture("resnet18.a1_in1k", {}, pretrained=True).config["license"]
        'apache-2.0'
    """
    if is_factory(name):
        return Description(name, dict(options), None, None, {})
    if not is_timm(name):
        raise ModelError(f"'{name}' is neither a timm model nor module:factory{suggest_names(name)}")
    known = timm.get_pretrained_cfg(name)
    config = known.to_dict() if known else {}
    kept = _known_entries(config, () if pretrained else _ABOUT_WEIGHTS)
    classes, labels = (config.get("num_classes"), read_labels(config)) if pretrained else (None, None)
    return Description(name.partition(".")[0], dict(options), classes, labels, _with_input(kept, options))


def describe_training(arguments: Mapping[str, Any], where: str) -> Description:
    """Describe a model from the arguments of timm's train.py, checked like a config.json.

    Example:
        >>> found = describe_training({"arch": "resnet18", "img_size": 64, "model_kwargs": {}}, "model_best.pth.tar")
        >>> found.architecture, found.config["input_size"]
        ('resnet18', (3, 64, 64))
    """
    name = arguments.get("arch")
    if not isinstance(name, str) or not is_timm(name):
        known = f": it names '{name:.100}', which is not a timm model" if isinstance(name, str) else ""
        raise ModelError(f"the architecture of '{where}' is unknown{known}; name it with --arch (e.g. resnet18)")
    about = describe_architecture(name, {}, pretrained=False)
    given = {key: value for key, value in arguments.items() if value is not None and value != ""}
    extra = given.get("model_kwargs", {})
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise ModelError(f"the training arguments in '{where}' are malformed: model_kwargs must be a dictionary")
    options = {ours: given[theirs] for ours, theirs in _TRAINING_MODEL.items() if theirs in given} | extra
    images = {key: given[key] for key in _TRAINING_IMAGES if key in given}
    if type(size := given.get("img_size")) is int:
        images.setdefault("input_size", (given.get("in_chans", 3), size, size))
    try:
        options = check_model_arguments(options, constructor_arguments(name), where)
        check_entry("img_size", options.get("img_size"), where)
        images = check_images(images, where)
    except ModelError as error:
        raise ModelError(str(error).replace(f"{MODEL_CONFIG} in", "the training arguments in", 1)) from error
    return replace(about, options=options, config=_with_input({**about.config, **images}, options))


def describe_module(model: nn.Module) -> dict[str, Any]:
    """The configuration attached to a model, without the entries about timm's own weights."""
    carried = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return _known_entries(carried, _ABOUT_WEIGHTS) if isinstance(carried, dict) else {}


def infer_sizes(weights: Mapping[str, Tensor], about: Description, model: nn.Module) -> Description:
    """Complete a description by the numbers of channels and classes, inferred from the weights."""
    if "in_chans" not in about.options:
        about = _infer_channels(weights, about)
    if about.num_classes is not None:
        return about
    sizes = [len(weights[name]) for name in classifier_names(model) if name in weights and weights[name].dim() > 1]
    return replace(about, num_classes=sizes[0] if sizes else count_classes(model))


def _infer_channels(weights: Mapping[str, Tensor], about: Description) -> Description:
    """Set the channels to those of the first convolution, if the same model for colour images has three there.

    timm would infer `in_chans` from the image size in its configuration; here it is always explicit.
    """
    first = about.config.get("first_conv")
    names = [f"{name}.weight" for name in ([first] if isinstance(first, str) else first or ())]
    stored = {name: weights[name].shape[1] for name in names if name in weights and weights[name].dim() == 4}
    coloured = _try_build(replace(about, config=_with_channels(about, 3).config)) if stored else None
    places = {} if coloured is None else coloured.state_dict()
    name = next((name for name in stored if name in places), None)
    if name is None or places[name].shape[1] != 3 or stored[name] == 3:
        return about
    return _with_channels(about, stored[name])


def _with_channels(about: Description, channels: int) -> Description:
    size = (channels, *about.config.get("input_size", (3, 224, 224))[1:])
    return replace(about, options={**about.options, "in_chans": channels}, config={**about.config, "input_size": size})


def _with_input(config: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the input size of the constructor arguments, which take precedence."""
    channels, height, width = config.get("input_size") or (3, 224, 224)
    size = options.get("img_size") or (height, width)
    height, width = (size, size) if isinstance(size, int) else size
    wanted = (options.get("in_chans") or channels, height, width)
    return {**config, "input_size": wanted} if "input_size" in config else config


def _known_entries(config: Mapping[str, Any], besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entries that timm accepts (others make it fail), without labels and the origin of weights."""
    known = {field.name for field in fields(PretrainedCfg)} - {"state_dict", *_LABELS, *besides}
    return dict(filter_pretrained_cfg({k: v for k, v in config.items() if k in known}, remove_source=True))


def _try_build(about: Description) -> nn.Module | None:
    """The model that timm builds, without weights; None if it cannot."""
    if not about.architecture or not is_timm(about.architecture):
        return None
    try:
        return TimmLibrary().build(about, empty=True)
    except ModelError:
        return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class TimmLibrary:
    """Reads, builds and saves models as timm does on the Hub. Every model library has these methods."""

    companions: tuple[str, ...] = ()
    """Files that describe a model, besides config.json and the weights."""
    describes_all = False
    """Whether a model passed from Python can be rebuilt from its description: not here, as it may be modified."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json is in the format of this library; timm is the fallback."""
        return True

    def describe(self, raw: Mapping[str, Any], folder: Path, where: str, arch: str | None = None) -> Description:
        """Read a config.json. `arch` overrides its architecture; only `arch` may be a `module:factory`."""
        if arch is None:
            _check_architecture(raw, where)
        nested = raw.get("pretrained_cfg", raw)  # early versions of timm wrote both into one
        options = raw.get("model_args") or {}
        if not isinstance(nested, dict) or not isinstance(options, dict):
            raise ModelError(f"config.json in '{where}' is malformed: pretrained_cfg and model_args must be objects")
        options = dict(options)
        classes = options.pop("num_classes", None)
        classes = raw.get("num_classes", nested.get("num_classes", classes))
        check_entry("num_classes", classes, where)
        architecture = arch or raw["architecture"]
        if options:
            options = check_model_arguments(options, constructor_arguments(architecture), where)
            check_entry("img_size", options.get("img_size"), where)
        labels = read_labels(raw) or read_labels(nested)
        return Description(architecture, options, classes, labels, _with_input(check_images(nested, where), options))

    def describe_model(self, model: nn.Module) -> Description:
        """Describe a model passed from Python: as timm's if timm builds the same one, otherwise by its class only.

        Other libraries return None for models that are not theirs.
        """
        config = describe_module(model)
        about = Description(str(config.get("architecture", "")), {}, count_classes(model), None, config)
        about = _infer_channels(model.state_dict(), about)
        again = _try_build(about)
        # Constructor arguments show in the repr and in the shapes of tensors.
        if again is not None and str(again) == str(model) and _shapes(again) == _shapes(model):
            return about
        return replace(about, architecture=type(model).__name__, options={})

    def build(self, about: Description, *, empty: bool = False, seed: int = 0) -> nn.Module:
        """Build the model with random weights from the seed or, if `empty`, with parameters on the meta device.

        If a factory does not take `num_classes`, its classifier is replaced.
        """
        options, classes = dict(about.options), about.num_classes
        takes_classes = True
        if is_factory(about.architecture):
            named, takes_any = _parameters(_import_factory(about.architecture))
            takes_classes = takes_any or "num_classes" in named
        elif about.config:
            options["pretrained_cfg"] = _known_entries(about.config)
        if classes is not None and takes_classes:
            options["num_classes"] = classes
        with seeded(seed):
            model = (empty_model if empty else random_model)(about.architecture, **options)
            return model if classes is None else resize_classifier(model, classes)

    def convert(self, weights: Mapping[str, Tensor], about: Description) -> dict[str, Tensor] | None:
        """Convert older or foreign checkpoints as timm does, by renaming and resizing; None if it cannot.

        timm fills gaps with random values without a warning, which two seeds reveal.
        """
        if not weights:
            return None  # timm would look for weights elsewhere
        hollow = any(tensor.is_meta for tensor in weights.values())
        if hollow:  # timm computes with them; zeros take no memory until written to
            weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        classes = about.num_classes or 0
        # Built here, so that no file decides where timm looks for weights.
        stored = {
            **{name: about.config[name] for name in ("input_size", "fixed_input_size") if name in about.config},
            "num_classes": classes,
            "first_conv": None,
            "classifier": None,
            "state_dict": dict(weights),
        }
        draws = []
        for seed in (0, 1):
            try:
                with seeded(seed):
                    model = timm.create_model(
                        about.architecture, pretrained=True, pretrained_cfg=stored, num_classes=classes, **about.options
                    )
            except Exception:  # timm's filters may raise anything on unexpected tensors
                return None
            draws.append(model.state_dict())
        if any(not torch.equal(tensor, draws[1][name]) for name, tensor in draws[0].items()):
            return None
        dtype = most_common_dtype(weights)
        found = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in draws[0].items()}
        return without_numbers(found) if hollow else found

    def write(self, folder: Path, weights: dict[str, Tensor], about: Description, model: nn.Module) -> None:
        """Write model.safetensors, if there are weights, and config.json, each atomically.

        timm's `save_for_hf` does not write atomically.
        """
        if weights:
            # A single file, since timm does not read shards; transformers requires the metadata.
            write_tensors(folder / SAFE, weights, {"format": "pt"})
        nested = _known_entries(about.config)
        nested.pop("architecture", None)
        nested.update(num_classes=about.num_classes, custom_load=False)
        if about.options.get("in_chans", 3) not in (1, 3):
            nested["first_conv"] = None  # otherwise timm assumes an RGB model, and initializes the convolution
        config: dict[str, Any] = {"architecture": about.architecture, "num_classes": about.num_classes}
        if isinstance(features := getattr(model, "num_features", None), int):
            config["num_features"] = features
        if isinstance(pool := getattr(model, "global_pool", None), str) and pool:
            config["global_pool"] = pool
        if about.labels:
            config["label_names"] = list(about.labels)
        if about.options:
            config["model_args"] = dict(about.options)
        write_json(folder / MODEL_CONFIG, {**config, "pretrained_cfg": nested})


def _check_architecture(raw: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json that names no architecture, or names code or another model instead."""
    architecture = raw.get("architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"config.json in '{where}' names no architecture; give it with --arch")
    if is_factory(architecture):
        advice = f"names the code '{architecture}'; if you trust it, pass --arch {architecture} yourself"
    elif ":" in architecture:
        advice = f"names another model, '{architecture}', instead of an architecture; load that one, or correct it"
    elif not is_timm(architecture):
        advice = f"names '{architecture}', which is not a timm model{suggest_names(architecture)}"
    else:
        return
    raise ModelError(f"config.json in '{where}' {advice}")
