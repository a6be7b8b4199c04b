"""Where a fine-tuning starts: images numbered as the model numbers them, and a model with a head for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.data import DataOptions, ImageData, Preprocess, load_data
from hf_retarget.data.labels import match_labels
from hf_retarget.errors import DataError, ModelError
from hf_retarget.models import Checkpoint, head_names
from hf_retarget.models.build import seeded
from hf_retarget.progress import Progress

HEADS = ("auto", "keep", "fresh", "zero")
"""`keep`: the model's own head. `fresh`: a seeded random one. `zero`: one of zeros. `auto`: its own if the classes
agree, else zeros: what a port takes for the start of the fine-tuning, too."""


@dataclass(frozen=True, eq=False)
class Start:
    """All that a fine-tuning begins with."""

    model: nn.Module = field(repr=False)
    data: ImageData
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    """The names of the classes, as the tuned model will have them."""
    head: str
    """The kind of head it was given, never `auto`."""
    why: str
    initial_head: dict[str, Tensor] = field(repr=False)
    """A copy of the head, which no checkpoint of the tuned model tells."""


def prepare_start(
    checkpoint: Checkpoint,
    data: Any,
    options: DataOptions,
    *,
    head: str = "auto",
    seed: int = 0,
    token: str | None = None,
) -> Start:
    """Bring a checkpoint and images (what `load_data` takes) together; the seed is that of a fresh head."""
    if head not in HEADS:
        near = difflib.get_close_matches(head, HEADS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(HEADS)}"
        raise ModelError(f"unknown head '{head}'; {hint}")
    preprocess = choose_preprocess(checkpoint, options.image_size)
    images = _load(checkpoint, data, options, preprocess, head, token)
    kind, why = choose_head(checkpoint, images, head)
    model = make_model(checkpoint, images.classes, kind, seed)
    check_shapes(model, preprocess, images.classes)
    state = model.state_dict()
    names = head_names(replace(checkpoint, weights=state, num_classes=images.classes))
    labels = checkpoint.labels if kind == "keep" and checkpoint.labels else images.labels
    return Start(
        model=model,
        data=images,
        preprocess=preprocess,
        labels=labels,
        head=kind,
        why=why,
        initial_head={name: state[name].detach().clone() for name in names},
    )


def choose_preprocess(checkpoint: Checkpoint, image_size: int | None = None) -> Preprocess:
    """How a checkpoint wants its images: as its configuration says, or with the channels of its first convolution."""
    own = tuple(checkpoint.config.get("input_size") or ())[1:]
    if image_size and checkpoint.config.get("fixed_input_size") and own != (image_size, image_size):
        # Position tables and windows have the size of the images; such a model is another one for other images.
        size = "×".join(map(str, own))
        raise ModelError(
            f"'{checkpoint.reference}' takes images of {size} only, not of {image_size}×{image_size}; "
            "leave out the image size, or build the model anew for this one (timm's img_size)"
        )
    channels = checkpoint.options.get("in_chans")
    if channels is None and not checkpoint.config.get("input_size"):
        channels = next((weight.shape[1] for weight in checkpoint.weights.values() if weight.dim() == 4), None)
    return Preprocess.of(checkpoint.config, image_size, channels)


def choose_head(checkpoint: Checkpoint, data: ImageData, head: str) -> tuple[str, str]:
    """The kind of head for these data, and why; raises ModelError if the one asked for cannot be."""
    if head in ("fresh", "zero"):
        return head, "asked for"
    if data.classes != checkpoint.num_classes:
        reason = f"the model has {checkpoint.num_classes} classes, the data {data.classes}"
        if head == "keep":
            raise ModelError(f"the head of '{checkpoint.reference}' cannot be kept: {reason}; use 'fresh' or 'zero'")
        return "zero", reason
    if head == "auto" and checkpoint.labels and data.labels and _numbers(data.labels, checkpoint.labels) is None:
        return "zero", "the model and the data have other labels"
    return "keep", "asked for" if head == "keep" else "the classes of model and data agree"


def make_model(checkpoint: Checkpoint, classes: int, head: str, seed: int = 0) -> nn.Module:
    """The model of a checkpoint with so many classes, and with a head of the kind that was chosen."""
    if head == "keep":
        return checkpoint.build()
    old = set(head_names(checkpoint))
    rest = {name: tensor for name, tensor in checkpoint.weights.items() if name not in old}
    model = replace(checkpoint, weights=rest).build(classes, seed=seed)
    names = set(head_names(replace(checkpoint, weights=model.state_dict(), num_classes=classes)))
    if not names:
        raise ModelError(f"'{checkpoint.reference}' has no classifier that could be found; give the model one")
    if checkpoint.module is not None:
        _reset(model, names, seed)  # a copy of a model has its head, if the number of classes is the same
    if head == "zero":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.zero_()
    return model


def check_shapes(model: nn.Module, preprocess: Preprocess, classes: int) -> None:
    """Run the model once, on nothing, so that a wrong image size shows before anything long has begun.

    Example:
        >>> check_shapes(nn.Flatten(), Preprocess(input_size=(1, 2, 2), mean=(0.5,), std=(0.5,)), classes=4)
    """
    size = "×".join(map(str, preprocess.input_size))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, *preprocess.input_size, device=device))
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"the model cannot take images of {size}: {_first_line(error)}; set the size with --data-image-size (a "
            "model from Python may say it in pretrained_cfg = {'input_size': (channels, height, width)})"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != [1, classes]:
        raise ModelError(f"the model answers one image with {shape}, not with one number for each of {classes} classes")


def describe_broken(data: ImageData) -> list[str]:
    """A sentence for each split in which images could not be read."""
    sentences = []
    for split in (data.train, data.validation, data.test):
        if split.broken:
            count = f"{len(split.broken)} image{'s' * (len(split.broken) > 1)}"
            sentences.append(f"{count} of '{split.name}' could not be read: {next(iter(split.broken.values()))}")
    return sentences


@contextmanager
def doing(progress: Progress, what: str) -> Iterator[None]:
    """Show that something is going on, of which nobody knows how long it takes.

    Example:
        >>> from hf_retarget.progress import SILENT
        >>> with doing(SILENT, "loading"):
        ...     pass
    """
    for _ in progress.track(iter((None,)), what):
        yield


def _load(
    checkpoint: Checkpoint, data: Any, options: DataOptions, preprocess: Preprocess, head: str, token: str | None
) -> ImageData:
    """The images, with the labels in the model's order where its head is to go on with them."""
    if head == "keep":
        return load_data(data, options, preprocess, model_labels=checkpoint.labels, token=token)
    found = load_data(data, options, preprocess, token=token)
    if head == "auto" and found.labels and checkpoint.labels:
        numbers = _numbers(found.labels, checkpoint.labels)
        if numbers is not None and numbers != sorted(numbers):
            return load_data(data, options, preprocess, model_labels=checkpoint.labels, token=token)
    return found


def _numbers(labels: tuple[str, ...], model_labels: tuple[str, ...]) -> list[int] | None:
    """The model's number of each label; None if they are not the same labels."""
    try:
        return [int(number) for number in match_labels(labels, model_labels)]
    except DataError:
        return None


def _reset(model: nn.Module, names: set[str], seed: int) -> None:
    for where in sorted({name.rpartition(".")[0] for name in names}):
        layer: Any = model.get_submodule(where)
        if not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(f"the head '{where}' ({type(layer).__name__}) cannot be made anew; keep it, or use 'zero'")
        with seeded(seed):
            layer.reset_parameters()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
