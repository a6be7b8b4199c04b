"""From a reference (timm name, Hub id, folder, file, or the model itself) to a checkpoint, numbers included or not."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.files import hash_file, hash_tensors
from hf_retarget.hub import clean_token, is_cached, named_hash
from hf_retarget.models.build import is_factory, is_timm, near_timm_names
from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.config import CONFIG, Description, describe_architecture, describe_module, read_config
from hf_retarget.models.fit import fit_weights, infer_sizes, strip_prefixes
from hf_retarget.models.hub import (
    fetch_card,
    fetch_model,
    find_bases,
    find_licence,
    peek_model,
    read_card,
    split_revision,
)
from hf_retarget.models.library import LIBRARIES, find_library
from hf_retarget.models.shape import TooLargeError, bounded_build
from hf_retarget.models.weights import (
    SUFFIXES,
    most_common_dtype,
    read_headers,
    read_weights,
    weight_files,
    without_numbers,
)

_SHA256 = 64  # hex digits
_TIMES, _ROOM = 4, 10**8
"""How many times as many numbers as in the file a model may have, and how many in any case: tied weights, new heads."""


class Access(Protocol):
    """How weights get here: whole, or, for somebody who only wants to know, without their numbers."""

    def fetch(
        self, repository: str, revision: str | None, *, config: bool, allow_pickle: bool, token: str | None
    ) -> tuple[Path, str | None]:
        """What is needed of a model on the Hub: the folder it is in, and its commit."""

    def read(self, files: Iterable[Path], *, allow_pickle: bool) -> dict[str, Tensor]:
        """All tensors of some files."""

    def hash(self, files: Iterable[Path]) -> dict[str, str]:
        """From the names of the files to their sha256, if they are whole."""


class Whole:
    """Weights with all their numbers."""

    def fetch(
        self, repository: str, revision: str | None, *, config: bool, allow_pickle: bool, token: str | None
    ) -> tuple[Path, str | None]:
        """Download all files, or find them in the cache."""
        folder, commit = fetch_model(repository, revision, config=config, allow_pickle=allow_pickle, token=token)
        fetch_card(repository, commit, token)  # into the same folder: it may tell the licence
        return folder, commit

    def read(self, files: Iterable[Path], *, allow_pickle: bool) -> dict[str, Tensor]:
        """Read all numbers."""
        return read_weights(files, allow_pickle=allow_pickle)

    def hash(self, files: Iterable[Path]) -> dict[str, str]:
        """Read all bytes; of files in the cache of the Hub, only hashes that were compared with the Hub's count."""
        return {path.name: found for path in files if (found := _hash(path)) is not None}


def _hash(path: Path) -> str | None:
    if not is_cached(path):
        return hash_file(path)
    compared = named_hash(path)  # when it was fetched
    return compared if compared is None or len(compared) == _SHA256 else hash_file(path)


@dataclass(frozen=True)
class _Stored:
    """What was found under a reference, before it is known whether the weights fit the architecture."""

    description: Description
    files: list[Path]
    advice: str
    convert: bool
    """Whether the library may rename and resize the tensors, as it does itself for what it saved or published."""
    revision: str | None = None
    hub_id: str | None = None
    base_models: tuple[str, ...] = ()


def load_checkpoint(
    reference: str | Path | nn.Module,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    access: Access | None = None,
) -> Checkpoint:
    """Load one side of a port, and check that its weights fit its architecture.

    A file needs `arch`, a timm name or `module:factory` (with its constructor arguments in `options`); for a folder
    or a Hub id it overrules config.json. An existing file or folder goes before a name. `access` says how weights get
    here: whole, unless `peek_checkpoint` wants their shapes only.
    """
    if isinstance(reference, nn.Module):
        return _from_module(reference, num_classes)
    access, token = access or Whole(), clean_token(token)
    text = str(reference)
    path = Path(text.removeprefix("local-dir:")).expanduser()
    if path.is_dir():
        stored = _in_folder(path, text, arch, options, allow_pickle)
    elif path.is_file():
        stored = _in_file(path, arch, options)
    elif _looks_like_a_path(text):
        raise ModelError(f"there is no file or folder '{path}'{_near_files(path)}")
    elif "/" in text or text.startswith(("hf-hub:", "hf_hub:")):
        stored = _on_hub(text, arch, options, allow_pickle, token, access)
    else:
        stored = _in_timm(text, allow_pickle, token, access)
    return _assemble(text, stored, num_classes, allow_pickle, access)


def _in_folder(
    folder: Path, where: str, arch: str | None, options: Mapping[str, Any] | None, allow_pickle: bool
) -> _Stored:
    if not any(folder.iterdir()):
        raise ModelError(f"the folder '{where}' is empty; a model is a folder with {CONFIG} and model.safetensors")
    if (folder / CONFIG).is_file():
        raw = read_config(folder / CONFIG)
        description = find_library(raw).describe(raw, folder, where, arch)
        description = replace(description, options={**description.options, **(options or {})})
    elif arch:
        description = _described(arch, options)
    else:
        raise ModelError(f"the folder '{where}' has no {CONFIG}; say which architecture it holds with --arch")
    bases: tuple[str, ...] = ()
    if (card := folder / "README.md").is_file():
        entries = read_card(card)
        description = replace(description, config={**find_licence(entries), **description.config})
        bases = find_bases(entries)
    files = weight_files(folder, where, allow_pickle=allow_pickle)
    advice = f"is '{arch}' the right --arch?" if arch else f"{CONFIG} and the weights do not belong together"
    return _Stored(description, files, advice, convert=arch is None, base_models=bases)


def _in_file(path: Path, arch: str | None, options: Mapping[str, Any] | None) -> _Stored:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"'{path}' is no weight file: its name should end in one of {', '.join(SUFFIXES)}")
    if not arch:
        raise ModelError(f"'{path}' does not say what model it is; name the architecture with --arch (e.g. resnet18)")
    return _Stored(_described(arch, options), [path], f"is '{arch}' the right --arch?", convert=False)


def _on_hub(
    text: str,
    arch: str | None,
    options: Mapping[str, Any] | None,
    allow_pickle: bool,
    token: str | None,
    access: Access,
) -> _Stored:
    repository, revision = split_revision(text)
    folder, commit = access.fetch(repository, revision, config=arch is None, allow_pickle=allow_pickle, token=token)
    return replace(_in_folder(folder, text, arch, options, allow_pickle), revision=commit, hub_id=repository)


def _in_timm(name: str, allow_pickle: bool, token: str | None, access: Access) -> _Stored:
    import timm

    if not is_timm(name):
        raise ModelError(
            f"'{name}' is no file or folder, no Hub id (org/name) and no timm model; {near_timm_names(name)}"
        )
    architecture, _, tag = name.partition(".")
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
    if not tags or (tag and tag not in tags):
        known = f"its tags are {', '.join(difflib.get_close_matches(tag, tags, cutoff=0))}" if tags else "it has none"
        raise ModelError(f"timm has no pretrained weights '{name}'; {known}")
    config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if config is None or not config.hf_hub_id:
        raise ModelError(f"the weights of '{name}' are not on the Hub; download the file, and give it with --arch")
    repository, revision = split_revision(config.hf_hub_id)
    folder, commit = access.fetch(repository, revision, config=False, allow_pickle=allow_pickle, token=token)
    files = weight_files(folder, repository, allow_pickle=allow_pickle)
    description = describe_architecture(name, {}, pretrained=True)
    return _Stored(description, files, "this version of timm cannot read them", True, commit, repository)


def _described(arch: str, options: Mapping[str, Any] | None) -> Description:
    if not is_factory(arch) and not is_timm(arch):
        raise ModelError(f"'{arch}' is neither a timm model nor module:factory; {near_timm_names(arch)}")
    return describe_architecture(arch, options or {}, pretrained=False)


def _assemble(
    reference: str, stored: _Stored, num_classes: int | None, allow_pickle: bool, access: Access
) -> Checkpoint:
    about, library = stored.description, LIBRARIES[stored.description.library]
    if None not in (num_classes, about.num_classes) and num_classes != about.num_classes:
        raise ModelError(f"'{reference}' has {about.num_classes} classes, not {num_classes}; leave out --num-classes")
    raw = access.read(stored.files, allow_pickle=allow_pickle)
    if num_classes is not None:
        about = replace(about, num_classes=num_classes)
    _check_size(reference, about, raw)
    first = library.build(about, empty=True)
    raw = strip_prefixes(raw, first.state_dict())
    about = infer_sizes(raw, about, first)
    model = library.build(about, empty=True)
    try:
        weights = fit_weights(raw, model.state_dict(), reference, stored.advice)
    except ModelError:
        converted = stored.convert and _nearly_all(raw, model) and library.convert(raw, about)
        if not converted:
            raise
        weights = converted
    return Checkpoint(
        reference=reference,
        architecture=about.architecture,
        options=about.options,
        num_classes=about.num_classes or 0,
        labels=about.labels,
        config=about.config or describe_module(model),
        weights=weights,
        dtype=most_common_dtype(raw),
        revision=stored.revision,
        hub_id=stored.hub_id,
        base_models=stored.base_models,
        hashes=access.hash(stored.files),
        library=about.library,
    )


def _nearly_all(stored: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether there are enough numbers to make a model of, if only they are renamed and resized."""
    needed = sum(parameter.numel() for parameter in model.parameters())
    return 2 * sum(tensor.numel() for tensor in stored.values()) >= needed


def _check_size(reference: str, about: Description, stored: Mapping[str, Tensor]) -> None:
    """Refuse a configuration that describes a model far larger than its weights are, before memory is taken for it."""
    if is_factory(about.architecture):
        return  # the user's own code
    most = _ROOM + _TIMES * sum(tensor.numel() for tensor in stored.values())
    try:
        with torch.device("meta"), bounded_build(most):
            LIBRARIES[about.library].build(about)
    except TooLargeError as error:
        raise ModelError(f"'{reference}' does not fit its weights: {error}; is it another architecture?") from error
    except ModelError:
        pass  # some constructors compute with their own weights; what is wrong besides is said later


def _from_module(model: nn.Module, num_classes: int | None) -> Checkpoint:
    state = model.state_dict()
    if absent := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"the {type(model).__name__} given has no weights: '{absent}' is on the meta device")
    about = next(about for each in LIBRARIES.values() if (about := each.describe_model(model)) is not None)
    if num_classes not in (None, about.num_classes):
        raise ModelError(f"the {type(model).__name__} given has {about.num_classes} classes, not {num_classes}")
    weights = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    return Checkpoint(
        reference=type(model).__name__,
        architecture=about.architecture,
        options=about.options,
        num_classes=about.num_classes or 0,
        labels=about.labels,
        config=about.config,
        weights=weights,
        dtype=most_common_dtype(weights),
        hashes={"state_dict": hash_tensors(weights)},
        module=None if LIBRARIES[about.library].tells_all else model,
        library=about.library,
    )


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


@dataclass(frozen=True, eq=False)
class Peeked:
    """One side of a port, as far as headers and configurations tell."""

    checkpoint: Checkpoint
    """Its weights are on the meta device: names, shapes and types."""
    download: int
    """Bytes of weights that would have to be downloaded; 0 if they are on this machine."""


def peek_checkpoint(
    reference: str | Path | nn.Module, *, arch: str | None = None, allow_pickle: bool = False, token: str | None = None
) -> Peeked:
    """Read what a model is from its configuration and the headers of its weights, and check that they fit."""
    with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
        access = _Headers(Path(place))
        found = load_checkpoint(reference, arch=arch, allow_pickle=allow_pickle, token=token, access=access)
    return Peeked(replace(found, weights=without_numbers(found.weights)), sum(access.downloads))


@dataclass(frozen=True)
class _Headers:
    """Weights without their numbers; models on the Hub get a folder each, with a hole where the numbers would be."""

    place: Path
    downloads: list[int] = field(default_factory=list)

    def fetch(
        self, repository: str, revision: str | None, *, config: bool, allow_pickle: bool, token: str | None
    ) -> tuple[Path, str | None]:
        """Configuration and headers."""
        commit, size = peek_model(
            repository, revision, config=config, allow_pickle=allow_pickle, place=self.place, token=token
        )
        self.downloads.append(size)
        return self.place, commit

    def read(self, files: Iterable[Path], *, allow_pickle: bool) -> dict[str, Tensor]:
        """Names, shapes and types; a pickle has no header, and is read as a whole."""
        paths = list(files)
        if all(path.suffix == ".safetensors" for path in paths):
            return read_headers(paths)
        return without_numbers(read_weights(paths, allow_pickle=allow_pickle))

    def hash(self, files: Iterable[Path]) -> dict[str, str]:
        """Nothing is read that could be hashed."""
        return {}
