"""From a reference (timm name, Hub id, folder, file, or the model itself) to a checkpoint, with or without numbers."""

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

from hf_retarget.errors import ModelError
from hf_retarget.files import hash_file, hash_tensors
from hf_retarget.hub import clean_token, is_cached, named_hash
from hf_retarget.models.checkpoint import LIBRARIES, Checkpoint, find_library
from hf_retarget.models.config import Description, bounded_build, read_config
from hf_retarget.models.hub import HubModel, fetch_model, find_bases, find_licence, read_card
from hf_retarget.models.relation import sample_weights
from hf_retarget.models.timm_models import (
    describe_architecture,
    describe_module,
    infer_sizes,
    is_factory,
    is_timm,
    suggest_names,
)
from hf_retarget.models.weights import (
    SUFFIXES,
    fit_weights,
    most_common_dtype,
    read_weights,
    strip_prefixes,
    weight_files,
    without_numbers,
)
from hf_retarget.names import CARD, MODEL_CONFIG

_SHA256 = 64  # hex digits
_TIMES, _ROOM = 4, 10**8
"""How many times the numbers of its file a model may have, and how many in any case: tied weights, new heads."""


@dataclass(frozen=True, eq=False)
class Peeked:
    """One side of a port, as far as headers and configurations tell."""

    checkpoint: Checkpoint
    """Its weights are on the meta device: names, shapes and types."""
    download: int
    """Bytes of weights that would have to be downloaded; 0 if they are on this machine."""
    sample: Mapping[str, Tensor] = field(default_factory=dict)
    """The first numbers of some tensors; empty if they could not be read without all others."""


@dataclass(frozen=True)
class _Reading:
    """How references are read."""

    arch: str | None
    options: Mapping[str, Any]
    allow_pickle: bool
    token: str | None
    headers: Path | None = None
    """A temporary folder, if only the headers of the weights are wanted."""

    def fetch(self, reference: str, *, config: bool) -> HubModel:
        return fetch_model(
            reference, config=config, allow_pickle=self.allow_pickle, token=self.token, headers=self.headers
        )


@dataclass(frozen=True)
class _Stored:
    """What was found under a reference, before the weights are fitted to the architecture."""

    description: Description
    files: list[Path]
    advice: str
    convert: bool
    """Whether the library may rename and resize the tensors, as it does for what it saved or published itself."""
    base_models: tuple[str, ...] = ()
    hub: HubModel | None = None


def load_checkpoint(
    reference: str | Path | nn.Module,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
) -> Checkpoint:
    """Load one side of a port, and check that its weights fit its architecture.

    A file needs `arch`, a timm name or `module:factory` (with its constructor arguments in `options`); for a folder
    or a Hub id it overrules config.json. An existing file or folder takes precedence over a name.
    """
    if isinstance(reference, nn.Module):
        return _from_module(reference, num_classes)
    how = _Reading(arch, options or {}, allow_pickle, clean_token(token))
    return _assemble(str(reference), _find(str(reference), how), how, num_classes)


def peek_checkpoint(
    reference: str | Path | nn.Module, *, arch: str | None = None, allow_pickle: bool = False, token: str | None = None
) -> Peeked:
    """Read the configuration of a model and the headers of its weights, and check that they fit."""
    sample: Mapping[str, Tensor] = {}
    if isinstance(reference, nn.Module):
        found, download = _from_module(reference, None), 0
        sample = {name: tensor for name, tensor in found.weights.items() if tensor.ndim > 1}
    else:
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
            how = _Reading(arch, {}, allow_pickle, clean_token(token), Path(place))
            stored = _find(str(reference), how)
            found, download = _assemble(str(reference), stored, how), stored.hub.remaining if stored.hub else 0
            with suppress(ModelError, OSError, ValueError):  # it is measured when the weights are there
                sample = strip_prefixes(sample_weights(stored.files, stored.hub), found.weights)
    return Peeked(replace(found, weights=without_numbers(found.weights)), download, sample)


# ---- what is stored where


def _find(text: str, how: _Reading) -> _Stored:
    path = Path(text.removeprefix("local-dir:")).expanduser()
    if path.is_dir():
        return _in_folder(path, text, how)
    if path.is_file():
        return _in_file(path, how)
    if is_on_hub(text):
        found = how.fetch(text, config=how.arch is None)
        return replace(_in_folder(found.folder, text, how), hub=found)
    return _in_timm(text, how)


def _in_folder(folder: Path, where: str, how: _Reading) -> _Stored:
    if not any(folder.iterdir()):
        raise ModelError(f"the folder '{where}' is empty; a model has {MODEL_CONFIG} and model.safetensors in it")
    if (folder / MODEL_CONFIG).is_file():
        raw = read_config(folder / MODEL_CONFIG)
        about = find_library(raw).describe(raw, folder, where, how.arch)
        about = replace(about, options={**about.options, **how.options})
    elif how.arch:
        about = describe_architecture(how.arch, how.options, pretrained=False)
    else:
        raise ModelError(f"the folder '{where}' has no {MODEL_CONFIG}; say which architecture it holds with --arch")
    entries = read_card(folder / CARD) if (folder / CARD).is_file() else {}
    about = replace(about, config={**find_licence(entries), **about.config})
    files = weight_files(folder, where, allow_pickle=how.allow_pickle)
    fault = f"is '{how.arch}' the right --arch?" if how.arch else f"{MODEL_CONFIG} and the weights do not match"
    return _Stored(about, files, fault, convert=how.arch is None, base_models=find_bases(entries))


def _in_file(path: Path, how: _Reading) -> _Stored:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"'{path}' is no weight file: its name should end in one of {', '.join(SUFFIXES)}")
    if not how.arch:
        raise ModelError(f"the architecture of '{path}' is unknown; name the architecture with --arch (e.g. resnet18)")
    about = describe_architecture(how.arch, how.options, pretrained=False)
    return _Stored(about, [path], f"is '{how.arch}' the right --arch?", convert=False)


def _in_timm(name: str, how: _Reading) -> _Stored:
    if not is_timm(name):
        raise ModelError(f"'{name}' is no file or folder, no Hub id (org/name) and no timm model{suggest_names(name)}")
    architecture, _, tag = name.partition(".")
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
    if not tags or (tag and tag not in tags):
        known = f"its tags are {', '.join(difflib.get_close_matches(tag, tags, cutoff=0))}" if tags else "it has none"
        raise ModelError(f"timm has no pretrained weights '{name}'; {known}")
    config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if config is None or not config.hf_hub_id:
        raise ModelError(f"the weights of '{name}' are not on the Hub; download the file, and give it with --arch")
    found = how.fetch(config.hf_hub_id, config=False)
    return _Stored(
        describe_architecture(name, {}, pretrained=True),
        weight_files(found.folder, found.repository, allow_pickle=how.allow_pickle),
        "this version of timm cannot read them",
        convert=True,
        hub=found,
    )


def is_on_hub(text: str) -> bool:
    """Whether a reference that is no file or folder is a Hub id, and not a name of timm; a path is an error."""
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


# ---- weights in their architecture


def _assemble(reference: str, stored: _Stored, how: _Reading, num_classes: int | None = None) -> Checkpoint:
    about, library = stored.description, LIBRARIES[stored.description.library]
    if None not in (num_classes, about.num_classes) and num_classes != about.num_classes:
        raise ModelError(f"'{reference}' has {about.num_classes} classes, not {num_classes}; leave out --num-classes")
    if num_classes is not None:
        about = replace(about, num_classes=num_classes)
    raw = read_weights(stored.files, allow_pickle=how.allow_pickle, numbers=how.headers is None)
    _check_size(reference, about, raw)
    first = library.build(about, empty=True)
    raw = strip_prefixes(raw, first.state_dict())
    about = infer_sizes(raw, about, first)
    model = library.build(about, empty=True)
    try:
        weights = fit_weights(raw, model.state_dict(), reference, stored.advice)
    except ModelError:
        # If there are enough numbers for the model, renaming and resizing may be all that is needed.
        enough = 2 * _count(raw.values()) >= _count(model.parameters())
        converted = library.convert(raw, about) if stored.convert and enough else None
        if converted is None:
            raise
        weights = converted
    return _checkpoint(
        replace(about, config=about.config or describe_module(model)),
        reference=reference,
        weights=weights,
        dtype=most_common_dtype(raw),
        revision=stored.hub.commit if stored.hub else None,
        hub_id=stored.hub.repository if stored.hub else None,
        base_models=stored.base_models,
        hashes={path.name: found for path in stored.files if how.headers is None and (found := hash_weights(path))},
    )


def _from_module(model: nn.Module, num_classes: int | None) -> Checkpoint:
    state, name = model.state_dict(), type(model).__name__
    if absent := next((key for key, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"the {name} given has no weights: '{absent}' is on the meta device")
    about = next(about for each in LIBRARIES.values() if (about := each.describe_model(model)) is not None)
    if num_classes not in (None, about.num_classes):
        raise ModelError(f"the {name} given has {about.num_classes} classes, not {num_classes}")
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
    """The sha256 of a file; in the cache of the Hub, only hashes that were compared with the Hub's count."""
    if not is_cached(path):
        return hash_file(path)
    compared = named_hash(path)  # when it was fetched
    return compared if compared is None or len(compared) == _SHA256 else hash_file(path)


def _check_size(reference: str, about: Description, stored: Mapping[str, Tensor]) -> None:
    """Refuse a configuration of a model far larger than its weights, before memory is allocated for it."""
    if is_factory(about.architecture):
        return  # the user's own code
    most = _ROOM + _TIMES * _count(stored.values())
    with torch.device("meta"), bounded_build(reference, most):
        LIBRARIES[about.library].build(about)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
