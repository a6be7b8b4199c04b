"""Descriptions of models, and checks of config.json, which may decide the shape of a model, within bounds.

Constructor arguments of a downloaded config.json would otherwise reach `timm.create_model`, which also downloads URLs,
reads files and unpickles them. So an argument must be a parameter of the model's class, of a plain type and a
reasonable size, and the resulting model may not be larger than any existing one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_retarget.errors import ModelError
from hf_retarget.names import MODEL_CONFIG
from hf_retarget.untrusted import read_json
from hf_retarget.words import nearest

MAX_LAYERS = 1_000  # repetitions of anything: depth, layers, blocks, stages, heads
MAX_SIZE = 2**20  # any other whole number: widths, tokens, pixels, classes
MAX_NUMBER = 1e9  # any other number
MAX_TEXT = 1_000  # characters of a string
MAX_ITEMS = 1_000  # entries of a list or object, nested ones included
MAX_DEPTH = 5  # levels of nested lists and objects; the stages of EfficientNet have three
MAX_MODULES = 50_000  # modules of a model; the largest of timm has fewer than 5,000
MAX_SIDE, MIN_CROP = 4096, 0.05  # pixels of an image's side, and the share of it that a crop keeps


@dataclass(frozen=True, eq=False)
class Description:
    """A model without its weights."""

    architecture: str
    """A timm architecture without tag, `module:factory`, a class of transformers, or the class name of a model passed
    from Python."""
    options: Mapping[str, Any]
    """Constructor arguments, without `num_classes`."""
    num_classes: int | None
    labels: tuple[str, ...] | None
    """Label names in the order of the classifier, if known."""
    config: Mapping[str, Any] = field(repr=False)
    """Configuration in timm's terms: input_size, mean, std, interpolation, crop_pct, classifier, license …"""
    library: str = "timm"
    """The library that reads and saves it: a key of `LIBRARIES`."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json as a dictionary."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' cannot be read as JSON: {error}; save the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' holds a {type(config).__name__} instead of an object; save the model again")
    return config


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Read label names, given as a list or by number; None if any is missing, or if they are only placeholders.

    Example:
        >>> read_labels({"id2label": {"1": "dog", "0": "cat"}}), read_labels({"id2label": {"0": "LABEL_0"}})
        (('cat', 'dog'), None)
    """
    names = config.get("label_names") or config.get("labels") or config.get("id2label")
    if isinstance(names, dict):
        try:
            by_number = {int(number): name for number, name in names.items()}
        except (TypeError, ValueError):
            return None
        if set(by_number) != set(range(len(by_number))):
            return None
        names = [by_number[number] for number in range(len(by_number))]
    if not isinstance(names, (list, tuple)) or not names:
        return None
    labels = tuple(str(name) for name in names)
    return None if labels == tuple(f"LABEL_{number}" for number in range(len(labels))) else labels


# ---- constructor arguments

BUILDER_ARGUMENTS = frozenset({"bn_eps", "bn_momentum", "bn_tf", "img_size"})
"""Arguments that timm's builders accept besides the parameters of a class."""

_FORBIDDEN = frozenset(
    (
        *("checkpoint_path", "cache_dir", "url", "hub_id", "hf_hub_id", "hf_hub_filename", "file", "source"),
        *("state_dict", "custom_load", "device", "dtype", "model_cfg", "cfg", "feature_cfg", "feature_cls"),
        *("features_only", "out_indices", "kwargs_filter", "scriptable", "exportable", "no_jit", "pruned"),
        *("model_name", "variant", "architecture"),
    )
)
"""Arguments with side effects in timm's `create_model` and its builders."""
_UNSET = (None, False, "")
"""Values that scripts save for arguments that were not set."""
_HARMLESS = frozenset({"pretrained_window_sizes"})
"""The only argument that begins with `pretrained` and describes a shape."""

_REPEATED = re.compile(r"(.*_)?(depths?|layers|blocks|stages|repeats?|heads|levels|n_layer|n_head)")
"""Names of repetition counts; of a list, the sum counts."""
_FAR = re.compile(r".*(theta|window|max_position_embeddings)")
"""Names of distances in a text, which may be large."""


def check_model_arguments(arguments: Mapping[str, Any], known: frozenset[str], where: str) -> dict[str, Any]:
    """Check that constructor arguments of a config.json are known, plain and of a reasonable size.

    Example:
        >>> check_model_arguments({"checkpoint_path": "/x"}, frozenset(), "tuned/")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.ModelError: config.json in 'tuned/' has the model argument 'checkpoint_path', ...
    """
    arguments = {name: value for name, value in arguments.items() if name in known or value not in _UNSET}
    for name, value in arguments.items():
        argument = f"config.json in '{where}' has the model argument '{name}'"
        if name in _FORBIDDEN or (name.startswith("pretrained") and name not in _HARMLESS):
            raise ModelError(
                f"{argument}, which does not describe a model's shape; "
                "remove it: a configuration may not decide what is loaded, or from where"
            )
        if name not in known and name not in BUILDER_ARGUMENTS:
            hint = nearest(name, sorted(known)) or "; remove it"
            raise ModelError(f"{argument}, which this architecture does not have{hint}")
        check_value(name, value, where)
    return arguments


def check_value(name: str, value: Any, where: str) -> None:
    """Refuse a value that is not plain, or is too large, at any depth."""
    problem = _find_problem(name, value, 0)
    if problem is None and _count(value) > MAX_ITEMS:
        problem = f"has more than {MAX_ITEMS:,} entries"
    if problem:
        raise ModelError(f"config.json in '{where}': '{name}' {problem}; correct it")


def _find_problem(name: str, value: Any, depth: int) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        limit = MAX_LAYERS if _REPEATED.fullmatch(name) else int(MAX_NUMBER) if _FAR.fullmatch(name) else MAX_SIZE
        return f"is {value}, and at most {limit:,} is accepted" if abs(value) > limit else None
    if isinstance(value, float):
        return None if math.isfinite(value) and abs(value) <= MAX_NUMBER else f"is {value}, which is out of range"
    if isinstance(value, str):
        return f"is a string of {len(value):,} characters" if len(value) > MAX_TEXT else None
    if depth == MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, Mapping):
        if bad := next((key for key in value if not isinstance(key, str)), None):
            return f"has the key {bad!r}, which is not a string"
        inside = list(value.items())
    elif isinstance(value, (list, tuple)):
        if _REPEATED.fullmatch(name) and sum(each for each in value if type(each) is int) > MAX_LAYERS:
            return f"asks for more than {MAX_LAYERS:,} repetitions"
        inside = [(name, each) for each in value]
    else:
        return f"is a {type(value).__name__}"
    return next((found for key, each in inside if (found := _find_problem(key, each, depth + 1))), None)


def _count(value: Any) -> int:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return 1 + sum(_count(each) for each in inside)


@contextmanager
def bounded_build(reference: str, most: int) -> Iterator[None]:
    """Stop the construction of a model with too many modules or parameters, before these are initialized."""
    modules = numbers = 0
    problem = ""

    def count(parent: nn.Module, name: str, part: nn.Module | Tensor | None) -> None:
        nonlocal modules, numbers, problem
        if isinstance(part, Tensor):
            numbers += part.numel()
        modules += isinstance(part, nn.Module)
        if modules > MAX_MODULES:
            problem = f"it would have more than {MAX_MODULES:,} modules"
        elif numbers > most:
            problem = f"it would have more than {most:,} parameters"
        if problem:
            raise ModelError(problem)

    hooks = [
        torch_module.register_module_module_registration_hook(count),
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    except ModelError as error:
        if problem:
            raise ModelError(
                f"'{reference}' does not fit its weights: {problem}; is it another architecture?"
            ) from error
        # Some constructors compute with their own weights; other errors are found later.
    finally:
        for hook in hooks:
            hook.remove()


# ---- images


def check_images(entries: Mapping[str, Any], where: str, file: str = MODEL_CONFIG) -> dict[str, Any]:
    """Check the entries of a configuration about images, heads and licences, and leave out all others.

    In particular, nothing about the origin of weights reaches timm.

    Example:
        >>> check_images({"crop_pct": 0.9, "url": "https://…"}, "tuned/")
        {'crop_pct': 0.9}
    """
    for name in ("file", "state_dict"):
        if entries.get(name):
            raise ModelError(f"{file} in '{where}' has '{name}', which would set where weights come from; remove it")
    return {name: check_entry(name, entry, where, file) for name, entry in entries.items() if name in _IMAGES}


def check_entry(name: str, entry: Any, where: str, file: str = MODEL_CONFIG) -> Any:
    """Check the value of a configuration's entry, and return it with lists as tuples."""
    value, (accepts, words) = _freeze(entry), (_IMAGES | _ARGUMENTS)[name]
    if value is not None and not accepts(value):
        raise ModelError(f"{file} in '{where}' has {name} {value!r:.100}; it must be {words}")
    return value


def _freeze(value: Any) -> Any:
    """Turn JSON's lists into tuples, so that configurations can be compared."""
    return tuple(_freeze(each) for each in value) if isinstance(value, list) else value


def _are(values: Any, lengths: tuple[int, ...] | range, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple) and len(values) in lengths and all(map(accepts, values))


def _is_class_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIDE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e6


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


_CHANNELS = range(1, 1025)
_INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming", "random")
_CROPS = ("center", "squash", "border")

_size = (lambda value: _are(value, (3,), _is_side), f"channels, height and width, each up to {MAX_SIDE}")
_pool = (lambda value: _are(value, (1, 2), lambda each: _is_class_count(each) and each > 0), "height and width")
_crop = (lambda value: _is_number(value) and MIN_CROP <= value <= 10, f"a number from {MIN_CROP} to 10")
_text = (_is_text, "a string")
_texts = (lambda value: _is_text(value) or _are(value, range(101), _is_text), "a string, or a list of strings")

_IMAGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), _size),
    **dict.fromkeys(("pool_size", "test_pool_size"), _pool),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), _crop),
    "fixed_input_size": (lambda value: isinstance(value, bool), "true or false"),
    "mean": (lambda value: _are(value, _CHANNELS, _is_number), "a list of numbers"),
    "std": (lambda value: _are(value, _CHANNELS, _is_number) and min(value) > 0, "a list of numbers above 0"),
    "num_classes": (_is_class_count, "a whole number up to 2²⁰"),
    "interpolation": (lambda value: value in _INTERPOLATIONS, f"one of {', '.join(_INTERPOLATIONS)}"),
    "crop_mode": (lambda value: value in _CROPS, f"one of {', '.join(_CROPS)}"),
    **dict.fromkeys(("license", "license_link", "tag", "origin_url", "paper_name", "description"), _text),
    **dict.fromkeys(("first_conv", "classifier", "paper_ids", "notes"), _texts),
}
"""The entries that are read, with a check of their values and its description."""

_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "img_size": (lambda value: _is_side(value) or _are(value, (2,), _is_side), f"one or two numbers up to {MAX_SIDE}"),
}
"""The same for constructor arguments."""
