"""Score a model on images: load, match the labels, evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_retarget.data import ImageData, load_data
from hf_retarget.devices import choose_device
from hf_retarget.errors import DataError
from hf_retarget.evaluate import Score, evaluate
from hf_retarget.models import Checkpoint, load_checkpoint
from hf_retarget.pipeline.start import check_shapes, choose_preprocess, describe_broken, doing
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class Scored:
    """A score, and what was scored on what."""

    score: Score
    model: str
    architecture: str
    data: str
    split: str
    labels: tuple[str, ...] | None
    """The names of the classes, if the model or the data have any."""
    notes: tuple[str, ...]

    def name(self, number: int) -> str:
        """What a class is called: its label, or its number."""
        return self.labels[number] if self.labels else str(number)


def score(
    reference: str | Path | nn.Module,
    data: Any = "",
    *,
    recipe: Recipe,
    split: str = "test",
    arch: str | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    progress: Progress = SILENT,
) -> Scored:
    """Measure how good a model is on one split of the data; without `data`, on those of the recipe."""
    if split not in SPLITS:
        raise DataError(f"there is no split '{split}'; choose one of {', '.join(SPLITS)}")
    accelerator = choose_device(device, precision)
    with doing(progress, "loading the model"):
        checkpoint = load_checkpoint(
            reference, arch=arch, num_classes=num_classes, allow_pickle=allow_pickle, token=token
        )
    with doing(progress, "loading the data"):
        preprocess = choose_preprocess(checkpoint, recipe.data.image_size)
        images = load_data(data, recipe.data, preprocess, model_labels=checkpoint.labels, token=token)
        check_classes(checkpoint, images)
    model = checkpoint.build()
    check_shapes(model, preprocess, checkpoint.num_classes)
    chosen = getattr(images, split)
    size = recipe.port.eval_batch
    measured = evaluate(
        model,
        chosen.batches(size, workers=workers),
        checkpoint.num_classes,
        accelerator=accelerator,
        progress=progress,
        total=-(-len(chosen) // size),
    )
    notes = (*images.notes, *describe_broken(images))
    labels = checkpoint.labels or images.labels
    return Scored(measured, checkpoint.reference, checkpoint.architecture, images.name, split, labels, notes)


def check_classes(checkpoint: Checkpoint, data: ImageData) -> None:
    """Names decide where both sides have them; else the numbers must be the same ones, as far as anybody can tell."""
    few = data.labels is None and data.classes < checkpoint.num_classes  # the last class need not be in every dataset
    if data.classes != checkpoint.num_classes and not few:
        raise DataError(
            f"'{data.name}' has {data.classes} classes, but '{checkpoint.reference}' tells {checkpoint.num_classes} "
            "apart; choose the data it was tuned on, or fine-tune it first (hf-retarget finetune)"
        )
