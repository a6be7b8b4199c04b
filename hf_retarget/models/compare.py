"""Comparing checkpoints: those of a port need one architecture, with equal tensors apart from the classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.classifier import classifier_names, configured_modules, under
from hf_retarget.models.weights import describe_differences
from hf_retarget.names import SIDES


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the three checkpoints of a port."""

    head: tuple[str, ...]
    """The parameters of the classifier, by their names in the tuned model."""
    labels_agree: bool | None
    """Whether all three classifiers have the same labels in the same order; None if unknown."""
    notes: tuple[str, ...] = ()
    """Differences that do not prevent a port, but are worth knowing."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between the three models: its shape in each, None where it is absent."""

    name: str
    source: tuple[int, ...] | None
    tuned: tuple[int, ...] | None
    target: tuple[int, ...] | None
    head: bool
    """Whether it belongs to the classifier, which may differ."""


def compare_checkpoints(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> Comparison:
    """Compare the three models of a port; raise ModelError with the first differences."""
    if not tuned.num_classes:
        raise ModelError(f"the tuned model '{tuned.reference}' has no classifier; a port needs one")
    if tuned.labels is not None and len(tuned.labels) != tuned.num_classes:
        raise ModelError(
            f"the tuned model '{tuned.reference}' has {tuned.num_classes} classes but {len(tuned.labels)} label names; "
            "correct label_names in its config.json"
        )
    head = head_names(tuned, source, target)
    if not head:
        raise ModelError("no head was found in the tuned model; a port needs a classifier")
    for other, side in ((source, SIDES["source"]), (target, SIDES["target"])):
        differing = _find_difference(tuned, other, f"in the {side}, ", head)
        if not differing and tuned.config.get("fixed_input_size") and _image_size(tuned) != _image_size(other):
            differing = f"one is made for images of {_image_size(tuned)}, the other of {_image_size(other)}"
        if differing:
            raise ModelError(
                f"the tuned model '{tuned.reference}' and the {side} '{other.reference}' differ: {differing}. "
                "A port needs one architecture on all three sides, with the same constructor arguments and image size"
            )
    labels = {each.labels for each in (source, tuned, target)}
    agree = False if len(labels - {None}) > 1 else None if None in labels else True
    return Comparison(head, agree, tuple(_list_notes(source, tuned, target)))


def list_differences(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> tuple[Difference, ...]:
    """All tensors whose name or shape differs between the three, including those of the classifier."""
    old, own, new = ({key: tuple(each.shape) for key, each in s.weights.items()} for s in (source, tuned, target))
    head = set(head_names(tuned, source, target))
    names = {**own, **old, **new}
    found = [Difference(name, old.get(name), own.get(name), new.get(name), name in head) for name in names]
    return tuple(each for each in found if not each.source == each.tuned == each.target)


def check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that weights can be mixed: one architecture, and heads of equal size and labels."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        pair = f"'{first.reference}' and '{other.reference}'"
        same_data = "give models that were tuned on the same data"
        if first.num_classes != other.num_classes and first.architecture == other.architecture:
            sizes = f"{first.num_classes} classes and {other.num_classes}"
            raise ModelError(f"the heads of {pair} differ in size: {sizes}; {same_data}")
        if differing := _find_difference(first, other):
            raise ModelError(f"{pair} differ: {differing}; only models of one architecture have weights between them")
        for number, (ours, theirs) in enumerate(zip(first.labels or (), other.labels or (), strict=False)):
            if ours != theirs:
                labels = f"class {number} is '{ours}' in one and '{theirs}' in the other"
                raise ModelError(f"the heads of {pair} differ: {labels}; {same_data}")


def head_names(of: Checkpoint | nn.Module, *others: Checkpoint) -> tuple[str, ...]:
    """The parameters of a classifier: according to timm's configuration or the model, those resized between
    checkpoints, or those of the last layer with one output per class.

    Example:
        >>> head_names(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
        ('1.weight', '1.bias')
    """
    if isinstance(of, nn.Module):
        return classifier_names(of)
    if found := under(configured_modules(of.config), of.weights):
        return found
    model = of.skeleton()
    if not callable(getattr(model, "get_classifier", None)):
        resized = [
            name
            for name, tensor in of.weights.items()
            if any(_is_resized(tensor, other.weights.get(name)) for other in others)
        ]
        if resized:
            return tuple(resized)
    return classifier_names(model, of.config)


def _is_resized(here: Tensor, there: Tensor | None) -> bool:
    """Whether two tensors differ only in the number of rows."""
    if there is None or not here.dim() == there.dim() > 0:
        return False
    return len(here) != len(there) and here.shape[1:] == there.shape[1:]


def _find_difference(one: Checkpoint, other: Checkpoint, where: str = "", head: tuple[str, ...] = ()) -> str:
    """Describe how two models differ, apart from the tensors of the head; empty if they agree."""
    # BatchNorm statistics count like parameters.
    ours, theirs = ({n: t for n, t in each.weights.items() if n not in head} for each in (one, other))
    tensors = describe_differences(theirs, ours)
    tensors = tensors and where + tensors
    if one.architecture != other.architecture:
        detail = f": {tensors}" if tensors else ", although their tensors agree"
        return f"one is '{one.architecture}', the other '{other.architecture}'{detail}"
    first, second = _deciding(one.options), _deciding(other.options)
    if name := next((n for n in sorted({*first, *second}) if first.get(n) != second.get(n)), None):
        values = f"{first.get(name, 'not set')} in one and {second.get(name, 'not set')} in the other"
        return f"'{name}' is {values}" + (f" ({tensors})" if tensors else "")
    return tensors


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments without dropout and drop-path, which are disabled while matching."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if not name.endswith(("drop_rate", "drop_path", "drop_path_rate", "dropout", "dropout_prob"))
    }


def _image_size(checkpoint: Checkpoint) -> str:
    size = checkpoint.config.get("input_size")
    return "×".join(map(str, size[1:])) if size else "unknown size"


def _list_notes(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> list[str]:
    sides = {SIDES["source"]: source, SIDES["tuned"]: tuned, SIDES["target"]: target}
    notes = [f"{side}: {note}" for side, each in sides.items() for note in each.notes]
    if len({each.dtype for each in sides.values()}) > 1:
        stored = ", ".join(f"{side} {str(each.dtype).removeprefix('torch.')}" for side, each in sides.items())
        notes.append(f"stored in different precisions ({stored}); computed in float32")
    for side, other in sides.items():
        if "input_size" in other.config and _image_size(other) != _image_size(tuned):
            notes.append(f"the {side} is made for images of {_image_size(other)}, the tuned model {_image_size(tuned)}")
        for name in ("mean", "std"):
            ours, theirs = tuned.config.get(name), other.config.get(name)
            if ours is not None and theirs is not None and tuple(ours) != tuple(theirs):
                notes.append(f"images are normalised with {name} {theirs} for the {side}, {ours} for the tuned model")
    return notes
