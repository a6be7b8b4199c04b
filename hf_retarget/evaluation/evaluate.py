"""`rt.evaluate` and `hf-retarget evaluate`: how good a model is on images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_retarget.data import ImageData, check_classes, choose_preprocess, load_data
from hf_retarget.errors import DataError
from hf_retarget.evaluation.scorer import Score, Scorer
from hf_retarget.models import load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.names import SPLITS
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/evaluate/1"


@dataclass(frozen=True)
class Evaluation:
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
        """The label of a class, or its number."""
        return self.labels[number] if self.labels else str(number)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = self.score
        return {
            "format": FORMAT,
            "model": self.model,
            "architecture": self.architecture,
            "data": self.data,
            "split": self.split,
            "images": found.count,
            "top1": found.top1,
            "top5": found.top5,
            "loss": found.loss,
            "classes": [
                {"name": self.name(number), "images": sum(row), "accuracy": accuracy}
                for number, (row, accuracy) in enumerate(zip(found.confusion, found.per_class, strict=True))
            ],
            "confusion": [list(row) for row in found.confusion],
            "notes": list(self.notes),
        }


def check_split(split: str) -> None:
    """Refuse the name of a split that there is not."""
    if split not in SPLITS:
        raise DataError(f"there is no split '{split}'; choose one of {', '.join(SPLITS)}")


def evaluate(
    model: str | Path | nn.Module,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    split: str | None = None,
    num_classes: int | None = None,
    **options: Unpack[RunArguments],
) -> Evaluation:
    """Score a model on one split of the data; without `data`, on those of the recipe.

    Without `split`, it is the test split, or all images if the data has a single split.
    """
    check_arguments("evaluate", options, RunArguments)
    if split is not None:
        check_split(split)
    run = Run(**options)
    chosen, images = finish_recipe(data, recipe)
    with run.stage("loading", "loading the model"):
        checkpoint = load_checkpoint(model, num_classes=num_classes, **run.loading)
    with run.stage("loading", "loading the data"):
        preprocess = choose_preprocess(checkpoint, chosen.data.image_size, run.preprocess)
        found = load_data(images, chosen.data, preprocess, model_labels=checkpoint.labels, token=run.token)
        check_classes(found.name, found.classes, found.labels, checkpoint.reference, checkpoint.num_classes)
    if split is None:
        found, split = (_join(found), "all") if found.held_out else (found, "test")
    built = checkpoint.build()
    check_shapes(built, found.train.preprocess.input_size, checkpoint.num_classes)
    scored = found.test if split == "all" else getattr(found, split)
    score = Scorer(built, found, checkpoint.num_classes, chosen.port, run).score(scored)
    notes = (*checkpoint.notes, *found.notes, *found.broken_notes)
    labels = checkpoint.labels or found.labels
    return Evaluation(score, checkpoint.reference, checkpoint.architecture, found.name, split, labels, notes)


def _join(data: ImageData) -> ImageData:
    """The same data with all images to test on."""
    whole = data.test.join(data.validation, "").join(data.train, f"{data.name}, all")
    notes = [note for note in data.notes if note != data.held_out]
    note = (
        f"the data has a single split: all {len(whole):,} images are scored (--split test scores only what a port "
        "or fine-tuning holds out)"
    )
    return replace(data, test=whole, notes=(*notes, note))
