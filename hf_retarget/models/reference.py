"""Loads checkpoints from references (a timm name, Hub id, folder, file or module), or only peeks at their headers."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from hf_retarget.document import FORMAT
from hf_retarget.errors import AdapterError, ModelError
from hf_retarget.files import hash_file, hash_tensors, make_folder, move_durably
from hf_retarget.hub import clean_token, is_cached, named_hash
from hf_retarget.models.checkpoint import LIBRARIES, Checkpoint, find_library, save_model
from hf_retarget.models.classifier import configured_modules, under
from hf_retarget.models.config import Description, bounded_build, read_config
from hf_retarget.models.hub import (
    HubModel,
    fetch_model,
    find_bases,
    find_licence,
    holds_adapter,
    no_adapter_weights,
    read_card,
)
from hf_retarget.models.relation import sample_weights
from hf_retarget.models.timm_models import (
    describe_architecture,
    describe_module,
    describe_training,
    infer_sizes,
    is_factory,
    is_timm,
    suggest_names,
)
from hf_retarget.models.weights import (
    PICKLES,
    SUFFIXES,
    Stored,
    convert_command,
    find_odd_numbers,
    fit_weights,
    most_common_dtype,
    pickle_only,
    read_weights,
    strip_prefixes,
    weight_files,
    without_numbers,
)
from hf_retarget.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, GRAPH, MODEL_CONFIG, PERMUTATION, PORT, RECIPE
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

Reference = str | Path | nn.Module
"""A timm name, Hub id, folder or file; or the model itself."""

_SHA256 = 64  # hex digits
_TIMES, _ROOM, _MOST = 4, 10**8, 2 * 10**9
"""A model may have at most `_TIMES` as many parameters as its file, plus `_ROOM` (tied weights, new heads), or `_MOST`
if there is no file to compare with."""


@dataclass(frozen=True, eq=False)
class Peeked:
    """One side of a port, as far as it is known from headers and configurations."""

    checkpoint: Checkpoint
    """With weights on the meta device: names, shapes and types."""
    download: int
    """Bytes of weights to download; 0 if they are on this machine."""
    sample: Mapping[str, Tensor] = field(default_factory=dict)
    """The first values of some tensors; empty if they cannot be read without reading the whole file."""


@dataclass(frozen=True)
class _Reading:
    """How references are read."""

    arch: str | None
    options: Mapping[str, Any]
    allow_pickle: bool
    token: str | None
    headers: Path | None = None
    """A temporary folder for the headers of the weights, if only these are read."""
    optional: bool = False
    """Whether a configuration is enough if there are no safetensors."""

    def fetch(self, reference: str, *, config: bool) -> HubModel:
        return fetch_model(
            reference,
            config=config,
            allow_pickle=self.allow_pickle,
            token=self.token,
            headers=self.headers,
            optional=self.optional,
        )


@dataclass(frozen=True)
class _Found:
    """What a reference resolves to, before the weights are fitted to the architecture."""

    description: Description
    files: list[Path]
    advice: str
    convert: bool
    """Whether the library may rename and resize tensors, as it does for its own checkpoints."""
    base_models: tuple[str, ...] = ()
    hub: HubModel | None = None
    stored: Stored | None = None
    """The content of the files, if it was already read for the description."""


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """A PEFT adapter as stored. So far, only the readability of its files has been checked."""

    reference: str
    config: Mapping[str, Any]
    """The content of adapter_config.json."""
    weights: dict[str, Tensor] = field(repr=False)
    """On the meta device if only headers were read."""
    description: Description | None
    """The model that results from applying it, if there is a config.json beside it."""
    hashes: Mapping[str, str]
    hub: HubModel | None


def load_checkpoint(
    reference: Reference,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
) -> Checkpoint:
    """Load one side of a port, and check that its weights fit its architecture.

    A file needs `arch`, a timm name or `module:factory` (with its constructor arguments in `options`), unless it is
    from timm's train.py, which saves the name; for a folder or a Hub id it overrides config.json. An existing file or
    folder takes precedence over a name.
    """
    if isinstance(reference, nn.Module):
        return _from_module(reference, num_classes)
    how = _Reading(arch, options or {}, allow_pickle, clean_token(token))
    return _assemble(str(reference), _find(str(reference), how), how, num_classes)


def peek_checkpoint(
    reference: Reference,
    *,
    arch: str | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    optional: bool = False,
) -> Peeked:
    """Read the configuration of a model and the headers of its weights, and check that they fit.

    With `optional`, the configuration is enough if there are no weights, or only a pickle.
    """
    sample: Mapping[str, Tensor] = {}
    if isinstance(reference, nn.Module):
        found, download = _from_module(reference, None), 0
        sample = {name: tensor for name, tensor in found.weights.items() if tensor.ndim > 1}
    else:
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
            how = _Reading(arch, {}, allow_pickle, clean_token(token), Path(place), optional)
            stored = _find(str(reference), how)
            found, download = _assemble(str(reference), stored, how), stored.hub.remaining if stored.hub else 0
            with suppress(ModelError, OSError, ValueError):  # the relation is measured later, on the whole weights
                sample = strip_prefixes(sample_weights(stored.files, stored.hub), found.weights)
    return Peeked(replace(found, weights=without_numbers(found.weights)), download, sample)


def convert(model: str | Path, out: str | Path, **how: Any) -> Checkpoint:
    """Convert a model to a new folder with model.safetensors and config.json, which appears once it is complete.

    `how` are the options of `load_checkpoint`. With `allow_pickle=True`, the model may be a checkpoint of timm's
    train.py; its averaged weights are used if it has any.
    """
    place = Path(out).expanduser()
    if place.exists() or place.is_symlink():
        raise ModelError(f"'{out}' exists already; choose a new folder")
    found = load_checkpoint(model, **how)
    make_folder(place.parent)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as hidden:
        move_durably(save_model(Path(hidden, "result"), found.weights, found, labels=found.labels), place)
    return found


# ---- resolving references


def _find(text: str, how: _Reading) -> _Found:
    path = Path(text.removeprefix("local-dir:")).expanduser()
    if path.is_dir():
        check_pins(path, text)
        return _in_folder(path, text, how)
    if path.is_file():
        return _in_file(path, how)
    if is_on_hub(text):
        found = how.fetch(text, config=how.arch is None)
        check_pins(found.folder, text, found)
        return _in_folder(found.folder, text, how, found)
    return _in_timm(text, how)


def _in_folder(folder: Path, where: str, how: _Reading, hub: HubModel | None = None) -> _Found:
    present = [path.name for path in folder.iterdir()]
    if not present:
        raise ModelError(f"the folder '{where}' is empty; a model has {MODEL_CONFIG} and model.safetensors in it")
    if holds_adapter(present):
        words = "is an adapter, not a whole model; it can be ported (--src-ft) together with its base"
        raise AdapterError(f"'{where}' {words}", _read_adapter(folder, where, how, hub))
    if (folder / MODEL_CONFIG).is_file():
        raw = read_config(folder / MODEL_CONFIG)
        about = find_library(raw).describe(raw, folder, where, how.arch)
        about = replace(about, options={**about.options, **how.options})
    elif how.arch:
        about = describe_architecture(how.arch, how.options, pretrained=False)
    else:
        pickles = sorted(each for each in present if each.endswith(PICKLES))
        best = next((each for each in ("model_best.pth.tar", "last.pth.tar", *pickles) if each in pickles), None)
        command = f", or convert its {best}: {convert_command(str(folder / best))}" if best and not hub else ""
        raise ModelError(f"the folder '{where}' has no {MODEL_CONFIG}; give its architecture with --arch{command}")
    entries = read_card(folder / CARD) if (folder / CARD).is_file() else {}
    about = replace(about, config={**find_licence(entries), **about.config})
    known = Stored({}) if how.optional and not any(folder.glob("*.safetensors*")) else None
    files = [] if known else weight_files(folder, where, allow_pickle=how.allow_pickle)
    fault = f"is '{how.arch}' the right --arch?" if how.arch else f"{MODEL_CONFIG} and the weights do not match"
    return _Found(about, files, fault, convert=how.arch is None, base_models=find_bases(entries), hub=hub, stored=known)


def _read_adapter(folder: Path, where: str, how: _Reading, hub: HubModel | None) -> StoredAdapter:
    files = [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    if not files[1].is_file():
        raise ModelError(no_adapter_weights(where))
    about = None
    if (folder / MODEL_CONFIG).is_file():
        raw = read_config(folder / MODEL_CONFIG)
        about = find_library(raw).describe(raw, folder, where)
    hashes = {path.name: found for path in files if how.headers is None and (found := hash_weights(path))}
    weights = read_weights(files[1:], numbers=how.headers is None).weights
    return StoredAdapter(where, read_config(files[0]), weights, about, hashes, hub)


def _in_file(path: Path, how: _Reading) -> _Found:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"'{path}' is not a weight file: its name must end in one of {', '.join(SUFFIXES)}")
    if path.suffix in PICKLES and not how.allow_pickle:
        raise ModelError(pickle_only(str(path), path.name, how.arch))
    if how.arch:
        about = describe_architecture(how.arch, how.options, pretrained=False)
        return _Found(about, [path], f"is '{how.arch}' the right --arch?", convert=False)
    stored = read_weights([path], allow_pickle=True) if path.suffix in PICKLES else Stored({})
    about = describe_training(stored.arguments, str(path))
    return _Found(about, [path], "give the right architecture with --arch", convert=False, stored=stored)


def _in_timm(name: str, how: _Reading) -> _Found:
    if not is_timm(name):
        near = _near_files(Path(name)) or suggest_names(name)
        raise ModelError(f"'{name}' is not a file, folder, Hub id (org/name) or timm model{near}")
    architecture, _, tag = name.partition(".")
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
    if not tags or (tag and tag not in tags):
        known = f"its tags are {', '.join(difflib.get_close_matches(tag, tags, cutoff=0))}" if tags else "it has none"
        raise ModelError(f"timm has no pretrained weights '{name}'; {known}")
    config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if config is None or not config.hf_hub_id:
        raise ModelError(f"the weights of '{name}' are not on the Hub; download the file and pass it with --arch")
    found = how.fetch(config.hf_hub_id, config=False)
    return _Found(
        describe_architecture(name, {}, pretrained=True),
        weight_files(found.folder, found.repository, allow_pickle=how.allow_pickle),
        "this version of timm cannot read them",
        convert=True,
        hub=found,
    )


def check_pins(folder: Path, where: str, hub: HubModel | None = None) -> None:
    """Refuse a folder whose files do not have the hashes in its port.json."""
    for name, pinned in read_pins(folder / PORT).items():
        path, found = folder / name, hub.hashes.get(name) if hub else None
        if name in (RECIPE, GRAPH, PERMUTATION):
            continue
        if not path.is_file():
            if path.suffix == ".safetensors" and hub is None:
                raise ModelError(f"'{where}' lacks {name}, which its {PORT} pins; restore it, or remove {PORT}")
            continue
        if found is None and not (hub and hub.is_hollow(path)):
            found = hash_weights(path)
        if found not in (None, pinned):
            raise ModelError(
                f"'{where}' does not match its {PORT}: the sha256 of {name} begins with {str(found)[:12]}, but with "
                f"{pinned[:12]} when it was ported; restore it, or remove {PORT} if it was changed on purpose"
            )


def read_pins(path: Path) -> dict[str, str]:
    """The hashes that a port.json pins for the files beside it; empty if it is absent or not ours."""
    try:
        content = read_json(path, MAX_DOCUMENT_BYTES) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is damaged: {error}; restore it, or remove it") from error
    if not isinstance(content, dict) or not str(content.get("format")).startswith(FORMAT.rpartition("/")[0]):
        return {}
    files = content.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        raise ModelError(f"'{path}' is damaged: 'files' does not map names to hashes; restore it, or remove it")
    return {name: each for name, each in files.items() if Path(name).name == name}


def is_on_hub(text: str) -> bool:
    """Whether a reference, not an existing file or folder, is a Hub id rather than a timm name; refuse paths."""
    path = Path(text.removeprefix("local-dir:")).expanduser()
    if _looks_like_a_path(text):
        raise ModelError(f"there is no file or folder '{path}'{_near_files(path)}")
    return "/" in text or text.startswith(("hf-hub:", "hf_hub:"))


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith(("/", "./", "../", "~", "local-dir:"))
        or text.endswith(("/", *SUFFIXES))
        or (text.count("/") > 1 and not text.startswith(("hf-hub:", "hf_hub:", "hf://")))
    )


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=3)
    return f"; did you mean {' or '.join(repr(str(path.parent / each)) for each in near)}?" if near else ""


# ---- fitting weights to their architecture


def _assemble(reference: str, found: _Found, how: _Reading, num_classes: int | None = None) -> Checkpoint:
    about, library = found.description, LIBRARIES[found.description.library]
    if None not in (num_classes, about.num_classes) and num_classes != about.num_classes:
        raise ModelError(f"'{reference}' has {about.num_classes} classes, not {num_classes}; leave out --num-classes")
    if num_classes is not None:
        about = replace(about, num_classes=num_classes)
    stored = found.stored or read_weights(found.files, allow_pickle=how.allow_pickle, numbers=how.headers is None)
    raw = stored.weights
    _check_size(reference, about, raw)
    first = library.build(about, empty=True)
    raw = strip_prefixes(raw, first.state_dict())
    about = infer_sizes(raw, about, first)
    model = library.build(about, empty=True)
    places = model.state_dict()
    try:
        weights = fit_weights(raw, places, reference, found.advice) if raw else without_numbers(places)
    except ModelError:
        # If there are enough parameters for the model, renaming and resizing them may suffice.
        enough = 2 * _count(raw.values()) >= _count(model.parameters())
        odd = find_odd_numbers(raw, places)
        converted = library.convert(raw, about) if found.convert and enough and not odd else None
        if converted is None:
            raise
        weights = converted
    head = configured_modules(about.config)
    if head and about.num_classes and not under(head, places):
        raise ModelError(f"'{reference}' lacks the classifier '{head[0]}' named in its config.json; correct it")
    return _checkpoint(
        replace(about, config=about.config or describe_module(model)),
        reference=reference,
        weights=weights,
        dtype=most_common_dtype(raw),
        revision=found.hub.commit if found.hub else None,
        hub_id=found.hub.repository if found.hub else None,
        base_models=found.base_models,
        hashes={path.name: value for path in found.files if how.headers is None and (value := hash_weights(path))},
        notes=stored.notes,
    )


def _from_module(model: nn.Module, num_classes: int | None) -> Checkpoint:
    state, name = model.state_dict(), type(model).__name__
    if absent := next((key for key, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"the given {name} has no weights: '{absent}' is on the meta device")
    about = next(about for each in LIBRARIES.values() if (about := each.describe_model(model)) is not None)
    if num_classes not in (None, about.num_classes):
        raise ModelError(f"the given {name} has {about.num_classes} classes, not {num_classes}")
    weights = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    return _checkpoint(
        about,
        reference=name,
        weights=weights,
        dtype=most_common_dtype(weights),
        hashes={"state_dict": hash_tensors(weights)},
        module=None if LIBRARIES[about.library].describes_all else model,
    )


def _checkpoint(about: Description, **facts: Any) -> Checkpoint:
    return Checkpoint(**{**vars(about), "num_classes": about.num_classes or 0}, **facts)


def hash_weights(path: Path) -> str | None:
    """The sha256 of a file; for a file in the Hub cache, only if it was verified."""
    if not is_cached(path):
        return hash_file(path)
    compared = named_hash(path)  # verified when it was fetched
    return compared if compared is None or len(compared) == _SHA256 else hash_file(path)


def _check_size(reference: str, about: Description, stored: Mapping[str, Tensor]) -> None:
    """Refuse a configuration whose model is far larger than its weights, before allocating memory for it."""
    if is_factory(about.architecture):
        return  # the user's own code
    most = _ROOM + _TIMES * _count(stored.values()) if stored else _MOST
    with torch.device("meta"), bounded_build(reference, most):
        LIBRARIES[about.library].build(about)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
