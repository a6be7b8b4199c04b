"""From a reference (timm name, Hub id, folder, file, or the model itself) to a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.build import is_factory, is_timm, near_timm_names, sized_model
from hf_retarget.models.checkpoint import Checkpoint, most_common_dtype
from hf_retarget.models.classifier import classifier_names, count_classes
from hf_retarget.models.config import (
    CONFIG,
    Description,
    describe_architecture,
    describe_config,
    describe_module,
    read_config,
)
from hf_retarget.models.fit import convert_with_timm, fit_weights, strip_prefixes
from hf_retarget.models.hub import fetch_model, split_revision
from hf_retarget.models.read import SUFFIXES, hash_file, hash_tensors, read_weights, weight_files

_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class _Stored:
    """What was found under a reference, before it is known whether the weights fit the architecture."""

    description: Description
    files: list[Path]
    advice: str
    convert: bool
    """Whether timm may rename and resize the tensors, as it does itself for what it saved or published."""
    revision: str | None = None


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
    or a Hub id it overrules config.json. An existing file or folder goes before a name.

    Example:
        >>> load_checkpoint("resnet18.a1_in1k").revision                          # doctest: +SKIP
        '491b427b45c94c7fb0e78b5474cc919aff584bbf'
        >>> load_checkpoint("weights.safetensors", arch="resnet18").num_classes   # doctest: +SKIP
        200
    """
    if isinstance(reference, nn.Module):
        return _from_module(reference, num_classes)
    text = str(reference)
    path = Path(text.removeprefix("local-dir:")).expanduser()
    if path.is_dir():
        stored = _in_folder(path, text, arch, options, allow_pickle)
    elif path.is_file():
        stored = _in_file(path, arch, options)
    elif _looks_like_a_path(text):
        raise ModelError(f"there is no file or folder '{path}'{_near_files(path)}")
    elif "/" in text or text.startswith(("hf-hub:", "hf_hub:")):
        stored = _on_hub(text, arch, options, allow_pickle, token)
    else:
        stored = _in_timm(text, allow_pickle, token)
    return _assemble(text, stored, num_classes, allow_pickle)


def _in_folder(
    folder: Path, where: str, arch: str | None, options: Mapping[str, Any] | None, allow_pickle: bool
) -> _Stored:
    if not any(folder.iterdir()):
        raise ModelError(f"the folder '{where}' is empty; a model is a folder with {CONFIG} and model.safetensors")
    if (folder / CONFIG).is_file():
        description = describe_config(read_config(folder / CONFIG), where, arch)
        description = replace(description, options={**description.options, **(options or {})})
    elif arch:
        description = _described(arch, options)
    else:
        raise ModelError(f"the folder '{where}' has no {CONFIG}; say which architecture it holds with --arch")
    files = weight_files(folder, where, allow_pickle=allow_pickle)
    return _Stored(description, files, f"{CONFIG} and the weights do not belong together", convert=arch is None)


def _in_file(path: Path, arch: str | None, options: Mapping[str, Any] | None) -> _Stored:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"'{path}' is no weight file: its name should end in one of {', '.join(SUFFIXES)}")
    if not arch:
        raise ModelError(f"'{path}' does not say what model it is; name the architecture with --arch (e.g. resnet18)")
    return _Stored(_described(arch, options), [path], f"is '{arch}' the right --arch?", convert=False)


def _on_hub(
    text: str, arch: str | None, options: Mapping[str, Any] | None, allow_pickle: bool, token: str | None
) -> _Stored:
    repository, revision = split_revision(text)
    folder, commit = fetch_model(repository, revision, config=arch is None, allow_pickle=allow_pickle, token=token)
    return replace(_in_folder(folder, text, arch, options, allow_pickle), revision=commit)


def _in_timm(name: str, allow_pickle: bool, token: str | None) -> _Stored:
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
    folder, commit = fetch_model(repository, revision, config=False, allow_pickle=allow_pickle, token=token)
    files = weight_files(folder, repository, allow_pickle=allow_pickle)
    description = describe_architecture(name, {}, pretrained=True)
    return _Stored(description, files, "this version of timm cannot read them", convert=True, revision=commit)


def _described(arch: str, options: Mapping[str, Any] | None) -> Description:
    if not is_factory(arch) and not is_timm(arch):
        raise ModelError(f"'{arch}' is neither a timm model nor module:factory; {near_timm_names(arch)}")
    return describe_architecture(arch, options or {}, pretrained=False)


def _assemble(reference: str, stored: _Stored, num_classes: int | None, allow_pickle: bool) -> Checkpoint:
    about = stored.description
    if None not in (num_classes, about.num_classes) and num_classes != about.num_classes:
        raise ModelError(f"'{reference}' has {about.num_classes} classes, not {num_classes}; leave out --num-classes")
    raw = read_weights(stored.files, allow_pickle=allow_pickle)
    if num_classes is not None:
        about = replace(about, num_classes=num_classes)
    raw, about, classes = _infer_sizes(raw, about)
    model = sized_model(about.architecture, classes, about.options, about.config, empty=True)
    try:
        weights = fit_weights(raw, model.state_dict(), reference, stored.advice)
    except ModelError:
        converted = stored.convert and convert_with_timm(raw, about.architecture, classes, about.options, about.config)
        if not converted:
            raise
        weights = converted
    return Checkpoint(
        reference=reference,
        architecture=about.architecture,
        options=about.options,
        num_classes=classes,
        labels=about.labels,
        config=about.config or describe_module(model),
        weights=weights,
        dtype=most_common_dtype(raw),
        revision=stored.revision,
        hashes={path.name: hash_file(path) for path in stored.files},
    )


def _infer_sizes(raw: dict[str, Tensor], about: Description) -> tuple[dict[str, Tensor], Description, int]:
    """The tensors under the model's names, and what their shapes say about it: channels and classes, unless known."""
    model = sized_model(about.architecture, about.num_classes, about.options, about.config, empty=True)
    raw = strip_prefixes(raw, model.state_dict())
    if "in_chans" not in about.options and (channels := _channels(raw, about)):
        about = replace(about, options={**about.options, "in_chans": channels}, config=_taking(about.config, channels))
    if about.num_classes is not None:
        return raw, about, about.num_classes
    sizes = [len(raw[name]) for name in classifier_names(model) if name in raw and raw[name].dim() > 1]
    return raw, about, sizes[0] if sizes else count_classes(model)


def _channels(weights: Mapping[str, Tensor], about: Description) -> int | None:
    """How many channels the first convolution has, if it is another number than the same model for colours has there.

    To say so is to say `in_chans`, even where timm would find it out: from the size of the images in its configuration.
    """
    first = about.config.get("first_conv")
    names = [first] if isinstance(first, str) else list(first or ())
    stored = {name: weights[name] for each in names if weights.get(name := f"{each}.weight", _NOTHING).dim() == 4}
    if not stored or not is_timm(about.architecture):
        return None
    coloured = _rebuilt(about.architecture, about.num_classes, about.options, _taking(about.config, 3))
    places = coloured.state_dict() if coloured is not None else {}
    for name, tensor in stored.items():
        if name in places:
            ours, theirs = places[name].shape[1], tensor.shape[1]
            return theirs if ours == 3 != theirs else None
    return None


def _taking(config: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """The configuration of a model that takes images of so many channels."""
    return {**config, "input_size": (channels, *config.get("input_size", (3, 224, 224))[1:])}


def _from_module(model: nn.Module, num_classes: int | None) -> Checkpoint:
    classes = count_classes(model)
    if num_classes not in (None, classes):
        raise ModelError(f"the {type(model).__name__} given has {classes} classes, not {num_classes}")
    state = model.state_dict()
    if absent := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"the {type(model).__name__} given has no weights: '{absent}' is on the meta device")
    weights = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    config = describe_module(model)
    name = str(config.get("architecture", ""))
    options = {}
    if channels := _channels(weights, Description(name, {}, classes, None, config)):
        options, config = {"in_chans": channels}, _taking(config, channels)
    again = _rebuilt(name, classes, options, config)
    # Constructor arguments leave traces in the printed form; only a model that prints the same, with
    # tensors of the same shapes, is known to be timm's.
    known = again is not None and str(again) == str(model) and _shapes(again) == _shapes(model)
    return Checkpoint(
        reference=type(model).__name__,
        architecture=name if known else type(model).__name__,
        options=options if known else {},
        num_classes=classes,
        labels=None,
        config=config,
        weights=weights,
        dtype=most_common_dtype(weights),
        hashes={"state_dict": hash_tensors(weights)},
        module=model,
    )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _rebuilt(name: str, classes: int | None, options: Mapping[str, Any], config: Mapping[str, Any]) -> nn.Module | None:
    if not name or not is_timm(name):
        return None
    try:
        return sized_model(name, classes, options, config, empty=True)
    except ModelError:
        return None


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
