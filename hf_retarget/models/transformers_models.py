"""transformers' models: reads, builds and saves image classifiers, and reads language models.

Names of parameters differ between memory and files, and between versions; transformers itself converts them. Code in
a repository is never run.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.files import move_durably, write_json
from hf_retarget.models.config import (
    Description,
    bounded_build,
    check_images,
    check_value,
    read_config,
    read_labels,
)
from hf_retarget.models.weights import INDEX, SAFE, most_common_dtype, seeded

PREPROCESSOR = "preprocessor_config.json"
_PROCESSOR = "preprocessor"
"""The key under which a description keeps the original preprocessor_config.json."""

_ASIDE = (
    *("architectures", "id2label", "label2id", "num_labels", "model_type", "transformers_version", "dtype"),
    *("torch_dtype", "problem_type", "initializer_range", "finetuning_task", "return_dict", "auto_map"),
)
"""Entries of a configuration that do not affect the function of a model, or are kept elsewhere."""

_FORBIDDEN = re.compile(
    "_?(attn|experts)_implementation(_internal)?|quantization_config|model_args|use_kernels|kernel_config|"
    "(use_(timm|pretrained)_)?backbone(_config|_kwargs)?|.*(checkpoint_path|cache_dir|state_dict)"
)
"""Entries with side effects: kernels and backbones to download, packages to import."""
_HARMLESS = (None, False, "eager", "sdpa")

_INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""timm's names by PIL's numbers."""
_SQUASHED_FROM = 384
"""From this size on, ConvNext's processor resizes without cropping."""


class TransformersLibrary:
    """Reads, builds and saves image classifiers as transformers does; see `TimmLibrary` for the methods."""

    companions: tuple[str, ...] = (PREPROCESSOR,)
    describes_all = True

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """transformers lists `architectures`; timm names one, also where transformers wraps its models."""
        return not isinstance(raw.get("architecture"), str) and ("model_type" in raw or "architectures" in raw)

    def describe(self, raw: Mapping[str, Any], folder: Path, where: str, arch: str | None = None) -> Description:
        """Read config.json and preprocessor_config.json."""
        if arch is not None:
            raise ModelError(f"'{where}' is a transformers model, whose architecture is known; leave out --arch")
        named = raw.get("architectures")
        named = [named] if isinstance(named, str) else named
        kind, name = raw.get("model_type"), named[0] if isinstance(named, list) and named else None
        transformers = _import(where, kind or name)
        names = _classifiers(str(kind))
        if not names:
            own = " with code of its own, which is not run" if "auto_map" in raw else ""
            raise ModelError(
                f"'{where}' is a transformers model of type '{kind}'{own}, not one of transformers' image classifiers; "
                "other models can only be ported with --data none"
            )
        # A base without a classifier, such as ViTModel, is read as a classifier with no classes.
        headed = name in names
        config = _read_configuration(raw, transformers.CONFIG_MAPPING[kind], where, {} if headed else {"num_labels": 0})
        processor = read_config(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None
        images = check_images(_read_images(config, processor), where, PREPROCESSOR)
        images |= {_PROCESSOR: processor} if processor else {}
        return _describe(str(name) if headed else names[0], config, read_labels(raw) if headed else None, images)

    def describe_model(self, model: nn.Module) -> Description | None:
        """Describe a model built by transformers, unless it differs from its configuration."""
        library = sys.modules.get("transformers")  # if it is not imported, there is no such model
        if library is None or not isinstance(model, library.PreTrainedModel):
            return None
        config: Any = model.config
        name = next(each.__name__ for each in type(model).__mro__ if each.__module__.startswith("transformers."))
        if name not in _classifiers(config.model_type):
            return None
        carried = getattr(model, "pretrained_cfg", None)
        about = _describe(name, config, read_labels(config.to_dict()), carried or _read_images(config, None))
        again = self.build(about, empty=True).state_dict()
        same = {key: each.shape for key, each in again.items()} == {k: e.shape for k, e in model.state_dict().items()}
        return about if same else None

    def build(self, about: Description, *, empty: bool = False, seed: int = 0) -> nn.Module:
        """Build transformers' model, made to return a tensor of logits."""
        kind, config = _configure(about)
        memory = init_empty_weights(include_buffers=False) if empty else nullcontext()
        try:
            with _quiet(), seeded(seed), memory:
                model: Any = kind(config)
        except Exception as error:  # whatever the constructor of the model raises
            raise ModelError(f"'{about.architecture}' cannot be built: {type(error).__name__}: {error}") from error
        model.__class__ = _with_logits(kind)
        model.pretrained_cfg = {key: value for key, value in about.config.items() if key != _PROCESSOR}
        return model  # type: ignore[no-any-return]

    def convert(self, weights: Mapping[str, Tensor], about: Description) -> dict[str, Tensor] | None:
        """Rename tensors as `from_pretrained` does; None if some are missing or, for a classifier, left over."""
        kind, config = _configure(about)
        options = {"device_map": "meta"} if any(tensor.is_meta for tensor in weights.values()) else {}
        try:
            with _quiet():
                model, report = kind.from_pretrained(
                    None,
                    config=config,
                    state_dict=dict(weights),
                    output_loading_info=True,
                    dtype=most_common_dtype(weights),
                    **options,
                )
        except Exception:  # transformers may raise anything on unexpected tensors
            return None
        wrong = report["missing_keys"] or report["mismatched_keys"] or report["error_msgs"]
        if wrong or (report["unexpected_keys"] and about.num_classes):
            return None
        return dict(model.state_dict())

    def write(self, folder: Path, weights: dict[str, Tensor], about: Description, model: nn.Module) -> None:
        """Write config.json, preprocessor_config.json and, if there are weights, model.safetensors, each atomically."""
        kind, config = _configure(about)
        if about.labels:
            config.id2label = dict(enumerate(about.labels))
            config.label2id = {label: number for number, label in config.id2label.items()}
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.", ignore_cleanup_errors=True) as hidden, _quiet():
            with init_empty_weights(include_buffers=False):
                plain = kind(config).to(most_common_dtype(weights))  # config.json states the dtype
            plain.config.architectures = [kind.__name__]
            (plain if weights else plain.config).save_pretrained(hidden, **({"state_dict": weights} if weights else {}))
            for path in sorted(Path(hidden).iterdir()):
                move_durably(path, folder / path.name)
        if processor := compose_processor(about.config.get(_PROCESSOR), about.config):
            write_json(folder / PREPROCESSOR, processor)


def load_language_model(
    raw: Mapping[str, Any], files: Iterable[Path], where: str, dtype: torch.dtype, numbers: int
) -> nn.Module:
    """Load a language model in evaluation mode, from its config.json and its safetensors files alone.

    Nothing else in their folder is read: no adapter, no pickle, no code. `numbers` is the number of parameters in the
    files, which bounds that of the configuration.
    """
    config = read_language_config(raw, where)
    from transformers import AutoModelForCausalLM, GenerationConfig

    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.device("meta"), bounded_build(where, 10**8 + 4 * numbers), _quiet():
        AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place, _quiet():
        first, *others = (path.absolute() for path in files)
        for path in (first, *others, first.with_name(INDEX)) if others else (first,):
            (Path(place) / (path.name if others else SAFE)).symlink_to(path)
        try:
            model, report = load(
                place,
                config=config,
                generation_config=GenerationConfig(),  # do not look for one
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers raises
            raise ModelError(
                f"'{where}' cannot be loaded as a language model: {type(error).__name__}: {error}"
            ) from error
    if missing := sorted([*report["missing_keys"], *(each[0] for each in report["mismatched_keys"])]):
        raise ModelError(f"'{where}' lacks '{missing[0]}', a weight of its architecture; config.json does not match")
    return model.eval()  # type: ignore[no-any-return]


def read_language_config(raw: Mapping[str, Any], where: str) -> Any:
    """The configuration of a language model; raise ModelError if transformers has no such language model."""
    kind = raw.get("model_type")
    transformers = _import(where, kind)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if kind not in NAMES:
        raise ModelError(
            f"'{where}' is a model of type '{kind}', which is not one of transformers' language models "
            "(its own code is never run), so it cannot be evaluated on texts; leave out --text"
        )
    return _read_configuration(raw, transformers.CONFIG_MAPPING[kind], where)


def _read_configuration(raw: Mapping[str, Any], kind: Any, where: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A configuration of class `kind`, from the safe entries of a config.json."""
    try:
        with _quiet():
            return kind.from_dict({**_keep_fields(raw, kind, where), **(changes or {})})
    except ModelError:
        raise
    except Exception as error:  # whatever the configuration's own checks raise
        name = raw.get("model_type")
        raise ModelError(f"config.json in '{where}' is not a valid configuration of '{name}': {error}") from error


def _configure(about: Description) -> tuple[Any, Any]:
    """The class of a model, and its configuration for this number of classes."""
    kind = getattr(_import(about.architecture, about.architecture), about.architecture)
    return kind, kind.config_class(**dict(about.options), num_labels=about.num_classes or 0)


def _describe(name: str, config: Any, labels: tuple[str, ...] | None, images: dict[str, Any]) -> Description:
    options = {key: value for key, value in config.to_diff_dict().items() if key not in _ASIDE and key[0] != "_"}
    return Description(name, options, config.num_labels, labels, images, "transformers")


def _import(where: str, kind: object) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"'{where}' is a transformers model ({kind!r}), and transformers is not installed: "
            "pip install 'hf-retarget[transformers]'"
        ) from error
    return transformers


def _classifiers(model_type: str) -> tuple[str, ...]:
    """transformers' image classifiers for a model type, the usual one first."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as NAMES

    # Wrapped timm models are read as timm's; ShieldGemma is a language model.
    found = () if model_type in ("timm_wrapper", "shieldgemma2") else NAMES.get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _keep_fields(raw: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """The entries of a config.json that are fields of a configuration class, checked to be plain and bounded.

    Unknown entries, which are common, are left out; those with side effects are refused.
    """
    for name, value in raw.items():
        if acts(name, value):
            raise ModelError(
                f"config.json in '{where}' has '{name}', which does not describe a model's shape; "
                "remove it: a configuration may not decide what is loaded or run"
            )
    inner = getattr(kind, "sub_configs", {})
    known = {each.name for each in fields(kind)} | {"num_labels"}
    kept = {}
    for name, value in raw.items():
        if name not in known:
            continue
        if name in inner and isinstance(value, Mapping):
            value = _keep_fields(value, inner[name], where)
        elif name not in ("id2label", "label2id"):  # one per class, which may be many
            check_value(name, value, where)
        kept[name] = value
    return kept


def acts(name: str, value: Any) -> bool:
    """Whether transformers loads or runs something because of this entry of a configuration."""
    return _FORBIDDEN.fullmatch(name) is not None and value not in _HARMLESS


@cache
def _with_logits(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward returns the logits, and with `get_classifier` as in timm."""

    def forward(self: Any, pixel_values: Tensor) -> Tensor:
        logits: Tensor = kind.forward(self, pixel_values=pixel_values).logits
        return logits

    def get_classifier(self: Any) -> list[nn.Module]:
        """The layers after the backbone with one output per class."""
        inside = set(getattr(self, self.base_model_prefix, nn.Identity()).modules())
        return [
            module
            for module in self.modules()
            if module not in inside
            and getattr(module, "weight", None) is not None
            and getattr(module, "out_features", getattr(module, "out_channels", None)) == self.num_classes
        ]

    own = {
        "forward": forward,
        "get_classifier": get_classifier,
        "num_classes": property(lambda self: self.config.num_labels),
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), own)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' messages and progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ---- preprocessor_config.json to and from timm's terms


def _read_images(config: Any, processor: dict[str, Any] | None) -> dict[str, Any]:
    try:
        return describe_images(processor, getattr(config, "num_channels", 3), getattr(config, "image_size", None))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{PREPROCESSOR} is malformed: {error!r}; save the image processor again") from error


def describe_images(processor: Mapping[str, Any] | None, channels: int, image_size: Any) -> dict[str, Any]:
    """Translate a preprocessor to timm's `pretrained_cfg`; `image_size` is that of the model's configuration.

    Example:
        >>> describe_images({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, 3, None)
        {'input_size': (3, 224, 224), 'crop_pct': 0.875, 'crop_mode': 'center'}
    """
    if processor is None:
        size = _pair(image_size)
        return {"input_size": (channels, *size)} if size else {}
    found: dict[str, Any] = {}
    if shape := _shape(processor):
        size, share, mode = shape
        found |= {"input_size": (channels, *size), "crop_pct": share, "crop_mode": mode}
    if (number := processor.get("resample")) is not None:  # values unknown to PIL are refused by `check_images`
        found["interpolation"] = _INTERPOLATION.get(number, number) if isinstance(number, int) else str(number)
    if processor.get("do_normalize", True):
        found |= {key: tuple(processor[f"image_{key}"]) for key in ("mean", "std") if f"image_{key}" in processor}
    else:
        found |= {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    return found


def compose_processor(processor: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make a preprocessor_config.json for `config`; the given one is kept if it agrees.

    Example:
        >>> compose_processor(None, {"input_size": (3, 32, 32), "mean": (0.5,) * 3})["size"]
        {'height': 32, 'width': 32}
    """
    if "input_size" not in config:
        return dict(processor) if processor else None
    channels, height, width = config["input_size"]
    if processor:
        own = describe_images(processor, channels, None)
        if all(value == config[name] for name, value in own.items() if name in config):
            return dict(processor)
    numbers = {name: number for number, name in _INTERPOLATION.items()}
    share = config.get("crop_pct") or 1.0
    scaled = {"height": int(height / share), "width": int(width / share)}
    squashed = config.get("crop_mode") == "squash" or share == 1.0
    composed = {
        "image_processor_type": "ViTImageProcessor" if squashed and share == 1.0 else "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": scaled if squashed else {"shortest_edge": min(scaled.values())},
        "resample": numbers.get(config.get("interpolation", "bicubic"), 3),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.get("mean", (0.5,) * channels)),
        "image_std": list(config.get("std", (0.5,) * channels)),
    }
    if share != 1.0:
        composed |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return composed


def _shape(processor: Mapping[str, Any]) -> tuple[tuple[int, int], float, str] | None:
    """Height and width, timm's crop_pct and crop_mode."""
    size = processor.get("size")
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if processor.get("do_center_crop") and (crop := _pair(processor.get("crop_size"))):
        whole = _pair(size) or ((edge, edge) if edge else crop)
        squashed = isinstance(size, Mapping) and "height" in size
        return crop, round(min(crop) / min(whole), 6), "squash" if squashed else "center"
    if "crop_pct" in processor and isinstance(edge, int):  # as in ConvNext
        cropped = edge < _SQUASHED_FROM
        return (edge, edge), (processor["crop_pct"] or 0.875) if cropped else 1.0, "center" if cropped else "squash"
    if (square := _pair(size)) is not None:
        return square, 1.0, "squash"
    return ((edge, edge), 1.0, "center") if isinstance(edge, int) else None


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        if not {"height", "width", "shortest_edge"} & size.keys() or len({"height", "width"} & size.keys()) == 1:
            raise ValueError(f"{dict(size)} is not a size")
        return (size["height"], size["width"]) if "height" in size else None
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    if not isinstance(size, int | None):
        raise ValueError(f"{size!r} is not a size")
    return None if size is None else (size, size)
