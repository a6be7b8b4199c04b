"""Reading adapters: a PEFT adapter is checked and merged into its base, which gives a tuned model.

Adapters are untrusted. Only listed entries of adapter_config.json with values of a known form reach PEFT; anything PEFT
would interpret as a regular expression, import or compile is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_retarget.document import ModelFacts
from hf_retarget.errors import AdapterError, ModelError
from hf_retarget.models import Checkpoint, Peeked, Reference, head_names, load_checkpoint, peek_checkpoint
from hf_retarget.models.classifier import classifier_names
from hf_retarget.models.config import MAX_SIZE, bounded_build
from hf_retarget.models.hub import split_revision
from hf_retarget.models.reference import StoredAdapter
from hf_retarget.models.weights import fit_weights, most_common_dtype, without_numbers
from hf_retarget.names import ADAPTER_CONFIG

KINDS = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "HRA", "VERA")
"""Adapter types that can be merged; not BOFT, for which PEFT starts a compiler."""

PREFIX = "base_model.model."
"""PEFT's prefix of tensor names."""
_WRAPPED = "timm_model."
"""The prefix of tensor names of a timm model in transformers."""

_LONGEST = 10_000  # entries of a list
_ROOM = 4
"""How many numbers an adapter may add to a model, as a multiple of those in its file."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"[\w.-]{1,500}")
_PATTERN = re.compile(r"\^?[\w.\\-]{1,500}\$?")
"""A regular expression without repetitions, which cannot be slow."""


def load_tuned(reference: Reference, base: Checkpoint, *, force_base: bool = False, **loading: Any) -> Checkpoint:
    """Load a tuned model, which may be a PEFT adapter of `base`, or with `force_base` of any other base."""
    try:
        return load_checkpoint(reference, **loading)
    except AdapterError as found:
        return merge_adapter(found.adapter, base, force_base=force_base)


def peek_tuned(reference: Reference, base: Peeked, *, force_base: bool = False, **loading: Any) -> Peeked:
    """Like `load_tuned`, from configurations and headers only; an adapter has no sample of weights."""
    try:
        return peek_checkpoint(reference, **loading)
    except AdapterError as found:
        adapter: StoredAdapter = found.adapter
        check_config(adapter)
        checkpoint = _describe(adapter, base.checkpoint, check_base(adapter, base.checkpoint.facts, force=force_base))
        weights = without_numbers(checkpoint.skeleton().state_dict())
        return Peeked(replace(checkpoint, weights=weights), adapter.hub.remaining if adapter.hub else 0)


def merge_adapter(adapter: StoredAdapter, base: Checkpoint, *, force_base: bool = False) -> Checkpoint:
    """Merge an adapter into its base, in float32."""
    options = check_config(adapter)
    note = check_base(adapter, base.facts, force=force_base)
    peft = import_peft(f"'{adapter.reference}' is an adapter")
    about = _describe(adapter, base, note)
    model, stored = base.build(about.num_classes), _unwrap(adapter.weights)
    most = _ROOM * sum(tensor.numel() for tensor in stored.values()) + sum(each.numel() for each in model.parameters())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if base.library == "transformers":
                stored = _rename(stored, model, options, peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[options["peft_type"]])
            config = peft.PeftConfig.from_peft_type(**options)
            with bounded_build(adapter.reference, most):
                wrapped = peft.PeftModel(model, config)
            expected = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
            advice = f"is '{base.reference}' the base it was trained on?"
            peft.set_peft_model_state_dict(wrapped, fit_weights(stored, expected, adapter.reference, advice))
            merged: nn.Module = wrapped.merge_and_unload(safe_merge=True)
    except ModelError:
        raise
    except Exception as error:  # PEFT may raise anything
        fact = " ".join(str(error).split())[:300]
        raise ModelError(f"PEFT cannot merge '{adapter.reference}' into '{base.reference}': {fact}") from error
    weights = {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}
    return replace(about, weights=weights)


def _rename(stored: dict[str, Tensor], model: Any, options: dict[str, Any], mark: str) -> dict[str, Tensor]:
    """Rename tensors and targets in `options` if an older transformers named the layers.

    transformers does this for full models, and PEFT only in part.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    layers = {name for name, _ in model.named_modules()}
    targets = {key.removeprefix(PREFIX).partition(f".{mark}")[0] for key in stored if f".{mark}" in key}
    if targets <= layers:
        return stored
    rules = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    named = {key: rename_source_key(key.removeprefix(PREFIX), rules, [])[0] for key in stored}
    options["target_modules"] = sorted({new.partition(f".{mark}")[0] for new in named.values() if f".{mark}" in new})
    return {PREFIX + named[key]: tensor for key, tensor in stored.items()}


def import_peft(why: str) -> Any:
    """Import the optional PEFT; ModelError, beginning with `why`, if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ModelError(f"{why}, and PEFT is not installed: pip install 'hf-retarget[peft]'") from error
    return peft


def _describe(adapter: StoredAdapter, base: Checkpoint, note: str) -> Checkpoint:
    """The checkpoint of a merged adapter, without its weights."""
    stored, known = _unwrap(adapter.weights), adapter.description
    names = head_names(base) or classifier_names(base.skeleton(2), base.config)
    own = [stored[PREFIX + name] for name in names if PREFIX + name in stored]
    classes = next((len(tensor) for tensor in own if tensor.ndim > 1), base.num_classes)
    found = replace(
        base,
        reference=adapter.reference,
        num_classes=classes,
        labels=None if own else base.labels,
        weights={},
        dtype=most_common_dtype(stored),
        revision=adapter.hub.commit if adapter.hub else None,
        hub_id=adapter.hub.repository if adapter.hub else None,
        base_models=tuple(each for each in (adapter.config.get("base_model_name_or_path"),) if isinstance(each, str)),
        hashes=adapter.hashes,
        notes=(note,) if note else (),
    )
    if known is None:
        return found
    if (known.architecture, known.num_classes) != (base.architecture, classes):
        theirs = f"'{known.architecture}' with {known.num_classes} classes"
        raise ModelError(
            f"config.json beside the adapter '{adapter.reference}' describes {theirs}, but on '{base.reference}' it "
            f"makes '{base.architecture}' with {classes}; is that the base it was trained on?"
        )
    return replace(found, labels=known.labels, config={**base.config, **known.config})


def _unwrap(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(PREFIX + _WRAPPED, PREFIX, 1): tensor for name, tensor in weights.items()}


# ---- adapter_config.json


def check_config(adapter: StoredAdapter) -> dict[str, Any]:
    """Select the entries of adapter_config.json to pass to PEFT; ModelError names a forbidden one."""
    raw, where = adapter.config, f"{ADAPTER_CONFIG} in '{adapter.reference}'"
    kind = raw.get("peft_type")
    if kind not in KINDS:
        raise ModelError(
            f"{where} has the peft_type {kind!r:.100}, which cannot be merged here (supported: {', '.join(KINDS)}); "
            "merge it yourself with PEFT, and give the merged model"
        )
    options: dict[str, Any] = {"peft_type": kind}
    for name, value in raw.items():
        if name in ("peft_type", *_IGNORED):
            continue
        if name not in _ENTRIES:
            if value not in (None, False, "", [], {}):
                raise ModelError(f"{where} has '{name}', which is not a supported entry; remove it")
        elif value is not None:
            accepts, words = _ENTRIES[name]
            if not accepts(value):
                raise ModelError(f"{where} has {name} {value!r:.100}; it must be {words}")
            if _ENTRIES[name] is _names:
                value = [each.removeprefix(_WRAPPED) for each in value]
            if name not in _CHECKED_ONLY:
                options[name] = value
    return options


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1 <= value <= MAX_SIZE


def _are_ranks(value: Any) -> bool:
    """A number for each name, or for AdaLoRA a list of booleans."""
    return isinstance(value, dict) and all(
        _PATTERN.fullmatch(name) and (_is_number(rank) or _are(rank, lambda each: isinstance(each, bool)))
        for name, rank in value.items()
    )


def _are(values: Any, accepts: Callable[[Any], Any]) -> bool:
    return isinstance(values, list) and len(values) <= _LONGEST and all(map(accepts, values))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value))


def _names_known_code(value: Any) -> bool:
    """PEFT always writes this entry; only `AutoPeftModel`, which is not used here, would import it."""
    library = value.get("parent_library") if isinstance(value, dict) else None
    return isinstance(library, str) and library.partition(".")[0] in ("timm", "transformers", "torch", "torchvision")


_number = (_is_number, f"a number up to {MAX_SIZE:,}")
_switch = (lambda value: isinstance(value, bool), "true or false")
_names = (
    lambda value: _are(value, _is_name),
    "a list of module names (a string would be a regular expression)",
)
_ranks = (_are_ranks, "an object of module names with ranks or alphas, without * + ? { ( [ |")
_layers = (lambda value: _is_number(value) or _are(value, _is_number), "a layer number, or a list of them")
_code = (_names_known_code, "a class of timm, transformers, torch or torchvision; remove it")
_core = (lambda value: value == "megatron.core", "megatron.core; Megatron models are not supported")
_plain_start = (
    lambda value: value in (True, False, "gaussian", "orthogonal", "eva"),
    "true, false, gaussian, orthogonal or eva: others change the base; convert the adapter to plain LoRA with PEFT "
    "(path_initial_model_for_weight_conversion)",
)
_bias = (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only")

_IGNORED = (
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode", "task_type", "runtime_config"),
    *("init_weights", "init_ia3_weights", "qalora_group_size"),
)
"""Entries that do not affect the merged weights. The first two are compared with the base."""

_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules", "feedforward_modules"), _names),
    "layers_pattern": (lambda value: _is_name(value) or _are(value, _is_name), "a name, or a list of names"),
    "layers_to_transform": _layers,
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _ranks),
    "bias": _bias,
    **dict.fromkeys(("r", "lora_alpha", "alpha", "lora_dropout", "rank_dropout", "module_dropout"), _number),
    **dict.fromkeys(("target_r", "init_r", "tinit", "tfinal", "deltaT", "total_step"), _number),
    **dict.fromkeys(("beta1", "beta2", "orth_reg_weight", "decompose_factor", "d_initial", "vera_dropout"), _number),
    **dict.fromkeys(("oft_block_size", "eps", "num_cayley_neumann_terms", "projection_prng_key"), _number),
    **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "decompose_both", "apply_GS"), _switch),
    **dict.fromkeys(("use_effective_conv2d", "rank_dropout_scale", "coft", "block_share"), _switch),
    **dict.fromkeys(("use_cayley_neumann", "save_projection"), _switch),
    "init_lora_weights": _plain_start,
    "megatron_core": _core,
    "auto_mapping": _code,
}
"""Supported entries, each with a check of its values and a description of them."""

_CHECKED_ONLY = ("init_lora_weights", "megatron_core", "auto_mapping")
"""Those of the supported entries that are not passed to PEFT."""


# ---- the base of an adapter


def check_base(adapter: StoredAdapter, base: ModelFacts, *, force: bool = False) -> str:
    """Compare the base named by an adapter with the given one; returns a note, or raises ModelError on a mismatch."""
    named, revision = (adapter.config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not isinstance(named, str) or not named:
        return f"the adapter '{adapter.reference}' does not name its base; '{base.reference}' was assumed"
    if named == base.hub_id:
        asked = split_revision(base.reference)[1]
        if not isinstance(revision, str) or revision in (base.revision, asked, "main" if asked is None else None):
            return ""
        return _mismatch(adapter, f"revision '{revision:.100}' of '{named}'", base, force)
    here = Path(base.reference)
    if base.hub_id is None and (named == here.name or Path(named).absolute() == here.absolute()):
        return ""  # ports name local bases by the last part of their path
    if base.hub_id is None or not _HUB_ID.fullmatch(named):
        return (
            f"the adapter '{adapter.reference}' was trained on '{named:.200}', which cannot be compared with the old "
            f"base '{base.reference}', because one of them is a local path; make sure that they are the same"
        )
    return _mismatch(adapter, f"'{named:.200}'", base, force)


def _mismatch(adapter: StoredAdapter, named: str, base: ModelFacts, force: bool) -> str:
    given = f"'{base.reference}'" + (f" (commit {base.revision})" if base.revision else "")
    words = f"the adapter '{adapter.reference}' was trained on {named}, and the old base is {given}"
    if not force:
        raise ModelError(f"{words}; name that one with --src-base (org/name@revision), or add --force-base")
    return f"{words}; used anyway (--force-base)"
