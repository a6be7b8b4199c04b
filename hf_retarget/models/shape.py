"""What a config.json may decide: the shape of a model, within bounds, and nothing else.

Constructor arguments of strangers would otherwise reach `timm.create_model`, which also fetches addresses, reads files
and unpickles them. So an argument must be a parameter of the model's class, of a plain type and of a sane size, and
what is built from it may not be larger than any model there is.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_retarget.errors import ModelError

MAX_LAYERS = 1_000
"""Repetitions of anything: depth, layers, blocks, stages, heads."""
MAX_SIZE = 2**20
"""Any other whole number: widths, tokens, pixels, classes. Gemma's vocabulary has 262,144 words."""
MAX_NUMBER = 1e9
"""Any other number."""
MAX_TEXT = 1_000
"""Letters of a text."""
MAX_ITEMS = 1_000
"""Entries of a list or an object, those inside it included."""
MAX_DEPTH = 5
"""Lists and objects inside each other; the stages of EfficientNet take three."""
MAX_MODULES = 50_000
"""Modules of a model; the largest of timm has fewer than 5,000."""
MAX_PARAMETERS = 10**11
"""Numbers in a model; the largest of timm has 7 · 10⁹."""

BUILDER_ARGUMENTS = frozenset({"bn_eps", "bn_momentum", "bn_tf", "img_size"})
"""What timm's builders take besides the parameters of a class."""

_FORBIDDEN = frozenset(
    (
        *("checkpoint_path", "cache_dir", "url", "hub_id", "hf_hub_id", "hf_hub_filename", "file", "source"),
        *("state_dict", "custom_load", "device", "dtype", "model_cfg", "cfg", "feature_cfg", "feature_cls"),
        *("features_only", "out_indices", "kwargs_filter", "scriptable", "exportable", "no_jit", "pruned"),
        *("model_name", "variant", "architecture"),
    )
)
"""What timm's `create_model` and its builders act on."""
_UNSET = (None, False, "")
"""Values of arguments that scripts save although nobody gave them."""
_HARMLESS = frozenset({"pretrained_window_sizes"})
"""Of all names that begin with `pretrained`, the one that is about shapes."""

_TRANSFORMERS_FORBIDDEN = re.compile(
    "_?(attn|experts)_implementation(_internal)?|quantization_config|model_args|use_kernels|kernel_config|"
    "(use_(timm|pretrained)_)?backbone(_config|_kwargs)?|.*(checkpoint_path|cache_dir|state_dict)"
)
"""What transformers would act on: kernels and backbones it downloads, packages it imports."""
_TRANSFORMERS_HARMLESS = (None, False, "eager", "sdpa")

_REPEATED = re.compile(r"(.*_)?(depths?|layers|blocks|stages|repeats?|heads|levels|n_layer|n_head)")
"""Names of what is repeated; of a list, the sum counts."""


class TooLargeError(ModelError):
    """What a configuration describes is larger than any model there is."""


def check_arguments(arguments: Mapping[str, Any], known: frozenset[str], where: str) -> dict[str, Any]:
    """Constructor arguments of a stranger, if each is one of those known, plain and of a sane size.

    Example:
        >>> check_arguments({"img_size": 64}, frozenset({"img_size"}), "tuned/")
        {'img_size': 64}
        >>> check_arguments({"checkpoint_path": "/x"}, frozenset(), "tuned/")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.ModelError: config.json in 'tuned/' has the model argument 'checkpoint_path', ...
    """
    arguments = {name: value for name, value in arguments.items() if name in known or value not in _UNSET}
    for name, value in arguments.items():
        if name in _FORBIDDEN or (name.startswith("pretrained") and name not in _HARMLESS):
            raise ModelError(
                f"config.json in '{where}' has the model argument '{name}', which does not describe a model's shape; "
                "remove it: a configuration may not decide what is loaded, from where, or to where"
            )
        if name not in known and name not in BUILDER_ARGUMENTS:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean '{near[0]}'?" if near else "remove it"
            raise ModelError(
                f"config.json in '{where}' has the model argument '{name}', which this architecture has not; {hint}"
            )
        check_value(name, value, where)
    return dict(arguments)


def check_value(name: str, value: Any, where: str) -> None:
    """Refuse what is not plain or not of a sane size, however deep inside."""
    if (problem := _find_problem(name, value, 0)) or _count(value) > MAX_ITEMS:
        problem = problem or f"has more than {MAX_ITEMS:,} entries"
        raise ModelError(f"config.json in '{where}': '{name}' {problem}; correct it")


def _find_problem(name: str, value: Any, depth: int) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        limit = MAX_LAYERS if _REPEATED.fullmatch(name) else MAX_SIZE
        return f"is {value}, and at most {limit:,} is accepted" if abs(value) > limit else None
    if isinstance(value, float):
        return None if math.isfinite(value) and abs(value) <= MAX_NUMBER else f"is {value}, which is no sane number"
    if isinstance(value, str):
        return f"is a text of {len(value):,} letters" if len(value) > MAX_TEXT else None
    if depth == MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, Mapping):
        if bad := next((key for key in value if not isinstance(key, str)), None):
            return f"has the key {bad!r}, which is no text"
        return next((found for key, each in value.items() if (found := _find_problem(key, each, depth + 1))), None)
    if isinstance(value, (list, tuple)):
        if _REPEATED.fullmatch(name) and sum(each for each in value if type(each) is int) > MAX_LAYERS:
            return f"asks for more than {MAX_LAYERS:,} repetitions"
        return next((found for each in value if (found := _find_problem(name, each, depth + 1))), None)
    return f"is a {type(value).__name__}"


def _count(value: Any) -> int:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return 1 + sum(_count(each) for each in inside)


def parameters_of(build: Callable[..., Any]) -> frozenset[str]:
    """The names of what a class or a function takes; of a class that passes the rest on, those of its parents, too.

    Example:
        >>> sorted(parameters_of(nn.Dropout))
        ['inplace', 'p']
    """
    if not isinstance(build, type):
        return _named(build)[0]
    names: set[str] = set()
    for kind in build.__mro__:
        if own := vars(kind).get("__init__"):
            found, passes_on = _named(own)
            names |= found | _fields_of_cfg(own)
            if not passes_on:
                break
    return frozenset(names - {"self"})


def _fields_of_cfg(function: Callable[..., Any]) -> set[str]:
    """Some classes of timm take a dataclass, and pass on whatever else they are given to it."""
    try:
        hint = get_type_hints(function).get("cfg")
    except (NameError, TypeError):
        return set()
    kinds = [each for each in (hint, *get_args(hint)) if is_dataclass(each)]
    return {each.name for kind in kinds for each in fields(kind)}


def _named(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no signature to be had
        return frozenset(), False
    named = frozenset(each.name for each in given if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return named, any(each.kind is each.VAR_KEYWORD for each in given)


def keep_fields(raw: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """What a configuration class of transformers may be told by a config.json: its own fields, plain and bounded.

    Entries it does not know are left out, as many files have some; those that transformers would act on are refused.
    """
    for name, value in raw.items():
        if _TRANSFORMERS_FORBIDDEN.fullmatch(name) and value not in _TRANSFORMERS_HARMLESS:
            raise ModelError(
                f"config.json in '{where}' has '{name}', which does not describe a model's shape; "
                "remove it: a configuration may not decide what is loaded or run"
            )
    inner = getattr(kind, "sub_configs", {})
    known = {each.name for each in fields(kind)} | {"num_labels"}
    kept = {}
    for name in known.intersection(raw):
        value = raw[name]
        if name in inner and isinstance(value, Mapping):
            value = keep_fields(value, inner[name], where)
        elif name not in ("id2label", "label2id"):  # as many as there are classes
            check_value(name, value, where)
        kept[name] = value
    return {name: kept[name] for name in raw if name in kept}


@contextmanager
def bounded_build(most: int = MAX_PARAMETERS) -> Iterator[None]:
    """Stop the construction of a model that gets too many modules or numbers, before the numbers are drawn."""
    modules = numbers = 0

    def count_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise TooLargeError(f"it would have more than {MAX_MODULES:,} modules")

    def count_numbers(parent: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal numbers
        numbers += 0 if tensor is None else tensor.numel()
        if numbers > most:
            raise TooLargeError(f"it would have more than {most:,} numbers")

    hooks = [
        torch_module.register_module_module_registration_hook(count_module),
        torch_module.register_module_parameter_registration_hook(count_numbers),
        torch_module.register_module_buffer_registration_hook(count_numbers),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
