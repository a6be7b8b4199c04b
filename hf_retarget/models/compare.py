"""Whether three checkpoints belong together: one architecture, the same tensors apart from the classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.classifier import classifier_names, configured_modules, under
from hf_retarget.models.fit import describe_differences
from hf_retarget.models.weights import fits

_NORMALISATION = ("mean", "std")


@dataclass(frozen=True)
class Comparison:
    """What was found when three checkpoints were compared and nothing stands against a port."""

    head: tuple[str, ...]
    """The parameters of the classifier, by the names they have in the tuned model."""
    labels_agree: bool | None
    """Whether all three classifiers are known to have the same labels in the same order; None if not all are known."""
    notes: tuple[str, ...] = ()
    """Differences that do not prevent a port, but that somebody should know of."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all three sides: its shape on each, None where it is absent."""

    name: str
    source: tuple[int, ...] | None
    tuned: tuple[int, ...] | None
    target: tuple[int, ...] | None
    head: bool
    """Whether it belongs to the classifier, which may differ."""


def compare(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> Comparison:
    """Check the three sides of a port against each other; raises ModelError with the first differences."""
    if not tuned.num_classes:
        raise ModelError(f"the tuned model '{tuned.reference}' has no classifier; a port needs one")
    if tuned.labels is not None and len(tuned.labels) != tuned.num_classes:
        raise ModelError(
            f"the tuned model '{tuned.reference}' has {tuned.num_classes} classes but {len(tuned.labels)} label names; "
            "correct label_names in its config.json"
        )
    head = head_names(tuned, source, target)
    for other, side in ((source, "source"), (target, "target")):
        _same_architecture(tuned, other, side, head)
    return Comparison(head, _labels_agree(source, tuned, target), tuple(_notes(source, tuned, target)))


def list_differences(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> tuple[Difference, ...]:
    """Every tensor whose name or shape differs between the three, those of the classifier included."""
    sides = [{name: tuple(each.shape) for name, each in side.weights.items()} for side in (source, tuned, target)]
    head = set(head_names(tuned, source, target))
    names = list(dict.fromkeys(name for side in (sides[1], sides[0], sides[2]) for name in side))
    old, own, new = sides
    found = [Difference(name, old.get(name), own.get(name), new.get(name), name in head) for name in names]
    return tuple(each for each in found if not each.source == each.tuned == each.target)


def check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that weights can be mixed: one architecture, heads of one size and with the same labels."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        pair = f"'{first.reference}' and '{other.reference}'"
        if first.architecture != other.architecture:
            raise ModelError(
                f"{pair} differ: one is '{first.architecture}', the other '{other.architecture}'; "
                "only models of one architecture have weights between them"
            )
        if first.num_classes != other.num_classes:
            raise ModelError(
                f"the heads of {pair} differ in size: {first.num_classes} classes and {other.num_classes}; "
                "give models that were tuned on the same data"
            )
        if first.labels and other.labels and first.labels != other.labels:
            number = next(
                i for i, (ours, theirs) in enumerate(zip(first.labels, other.labels, strict=False)) if ours != theirs
            )
            raise ModelError(
                f"the heads of {pair} differ: class {number} is '{first.labels[number]}' in one and "
                f"'{other.labels[number]}' in the other; give models that were tuned on the same data"
            )
        differing = describe_differences(other.weights, first.weights)
        if differing or _deciding(first.options) != _deciding(other.options):
            raise ModelError(
                f"{pair} differ: {differing or 'their constructor arguments are not the same'}; "
                "only models of one architecture have weights between them"
            )


def head_names(of: Checkpoint | nn.Module, *others: Checkpoint) -> tuple[str, ...]:
    """The parameters of a classifier: as timm's configuration says, as the model says, those whose first size differs
    from that in other checkpoints, or the last layer with as many outputs as there are classes.

    Example:
        >>> head_names(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
        ('1.weight', '1.bias')
    """
    if isinstance(of, nn.Module):
        return classifier_names(of)
    if found := under(configured_modules(of.config), of.weights):
        return found
    model = of.skeleton()
    if not callable(getattr(model, "get_classifier", None)) and (found := _resized(of.weights, others)):
        return found
    return classifier_names(model, of.config)


def _resized(weights: Mapping[str, Tensor], others: tuple[Checkpoint, ...]) -> tuple[str, ...]:
    """The tensors that are the same as in the other checkpoints but for the number of rows."""

    def grew(name: str, there: Tensor | None) -> bool:
        here = weights[name]
        return (
            there is not None
            and here.dim() == there.dim() > 0
            and len(here) != len(there)
            and (here.shape[1:] == there.shape[1:])
        )

    return tuple(name for name in weights if any(grew(name, other.weights.get(name)) for other in others))


def _same_architecture(tuned: Checkpoint, other: Checkpoint, side: str, head: tuple[str, ...]) -> None:
    pair = f"the tuned model '{tuned.reference}' and the {side} '{other.reference}' differ"
    tensors = _tensor_differences(tuned, other, side, head)
    if tuned.architecture != other.architecture:
        detail = f": {tensors}" if tensors else ", although their tensors agree"
        raise ModelError(
            f"{pair}: one is '{tuned.architecture}', the other '{other.architecture}'{detail}. "
            "A port needs one architecture on all three sides"
        )
    ours, theirs = _deciding(tuned.options), _deciding(other.options)
    if ours != theirs:
        name = next(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))
        raise ModelError(
            f"{pair}: '{name}' is {ours.get(name, 'not set')} in one and {theirs.get(name, 'not set')} in the other"
            f"{f' ({tensors})' if tensors else ''}. A port needs the same constructor arguments on all three sides"
        )
    if tensors:
        raise ModelError(f"{pair}: {tensors}. A port needs one architecture on all three sides")
    if tuned.config.get("fixed_input_size") and _image_size(tuned) != _image_size(other):
        raise ModelError(
            f"{pair}: one is made for images of {_image_size(tuned)}, the other of {_image_size(other)}. "
            "A port needs the same image size for this architecture"
        )


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments without dropout and drop-path, which are off while matching."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if not name.endswith(("drop_rate", "drop_path", "drop_path_rate", "dropout", "dropout_prob"))
    }


def _tensor_differences(tuned: Checkpoint, other: Checkpoint, side: str, head: tuple[str, ...]) -> str:
    """What differs apart from the head; BatchNorm statistics count like parameters."""
    ours = {name: tensor for name, tensor in tuned.weights.items() if name not in head}
    theirs = {name: tensor for name, tensor in other.weights.items() if name not in head}
    extra = [f"{name} {list(tensor.shape)}" for name, tensor in theirs.items() if name not in ours]
    absent = [f"{name} {list(tensor.shape)}" for name, tensor in ours.items() if name not in theirs]
    shapes = [
        f"{name} is {list(tensor.shape)} in the tuned model and {list(theirs[name].shape)} in the {side}"
        for name, tensor in ours.items()
        if name in theirs and not fits(tensor, theirs[name])
    ]
    parts = [
        (extra, f"of the {side} have no counterpart in the tuned model"),
        (absent, f"of the tuned model have no counterpart in the {side}"),
        (shapes, "have different shapes"),
    ]
    return ", ".join(f"{len(found)} tensors {what} (first: {found[0]})" for found, what in parts if found)


def _labels_agree(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> bool | None:
    known = {each.labels for each in (source, tuned, target)} - {None}
    if len(known) > 1:
        return False
    return True if None not in (source.labels, tuned.labels, target.labels) else None


def _image_size(checkpoint: Checkpoint) -> str:
    size = checkpoint.config.get("input_size")
    return "×".join(map(str, size[1:])) if size else "unknown size"


def _notes(source: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> list[str]:
    notes = []
    sides = (("source", source), ("tuned model", tuned), ("target", target))
    if len({each.dtype for _, each in sides}) > 1:
        stored = ", ".join(f"{side} {str(each.dtype).removeprefix('torch.')}" for side, each in sides)
        notes.append(f"stored in different precisions ({stored}); computed in float32")
    for side, other in (("source", source), ("target", target)):
        if "input_size" in other.config and _image_size(other) != _image_size(tuned):
            notes.append(f"the {side} is made for images of {_image_size(other)}, the tuned model {_image_size(tuned)}")
        for name in _NORMALISATION:
            ours, theirs = tuned.config.get(name), other.config.get(name)
            if ours is not None and theirs is not None and tuple(ours) != tuple(theirs):
                notes.append(f"images are normalised with {name} {theirs} for the {side}, {ours} for the tuned model")
    return notes
