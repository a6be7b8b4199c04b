"""`rt.evaluate` and `hf-retarget evaluate`: how good a model is on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_retarget.data import ImageData, Split, check_classes, choose_preprocess, load_data
from hf_retarget.errors import DataError, ModelError, NotFiniteError
from hf_retarget.evaluation.scorer import Score, Scorer, score_outputs
from hf_retarget.models import load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.names import SPLITS
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/evaluate/1"

Reference = str | Path | nn.Module


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
    members: tuple[Evaluation, ...] = ()
    """Of an ensemble, the models whose probabilities are averaged."""

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
        } | ({"members": [each.to_json() for each in self.members]} if self.members else {})


def check_split(split: str) -> None:
    """Refuse the name of a split that there is not."""
    if split not in SPLITS:
        raise DataError(f"there is no split '{split}'; choose one of {', '.join(SPLITS)}")


def evaluate(
    model: Reference | Sequence[Reference],
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    split: str | None = None,
    num_classes: int | None = None,
    **options: Unpack[RunArguments],
) -> Evaluation:
    """Score a model on one split of the data; without `data`, on those of the recipe.

    Without `split`, it is the test split, or all images if the data has a single split. Several models are scored
    together, as an ensemble: the mean of their probabilities. Its `members` are the models one by one.
    """
    check_arguments("evaluate", options, RunArguments)
    if split is not None:
        check_split(split)
    asked = _Asked(*finish_recipe(data, recipe), split, num_classes, Run(**options))
    if isinstance(model, (str, Path, nn.Module)):
        return asked.score(model)[0]
    if not model:
        raise ModelError("there is no model to evaluate; give one, or several")
    return _average([asked.score(each, answers=True) for each in model])


@dataclass(frozen=True)
class _Asked:
    recipe: Recipe
    images: Any
    split: str | None
    num_classes: int | None
    run: Run

    def score(self, model: Reference, *, answers: bool = False) -> tuple[Evaluation, Tensor, Tensor]:
        """The score of a model, and if wanted its answers to all images; their labels, -1 where one cannot be read."""
        recipe, run, split = self.recipe, self.run, self.split
        with run.stage("loading", "loading the model"):
            checkpoint = load_checkpoint(model, num_classes=self.num_classes, **run.loading)
        with run.stage("loading", "loading the data"):
            preprocess = choose_preprocess(checkpoint, recipe.data.image_size, run.preprocess)
            found = load_data(self.images, recipe.data, preprocess, model_labels=checkpoint.labels, token=run.token)
            check_classes(found.name, found.classes, found.labels, checkpoint.reference, checkpoint.num_classes)
        if split is None:
            found, split = (_join(found), "all") if found.held_out else (found, "test")
        built = checkpoint.build()
        check_shapes(built, found.train.preprocess.input_size, checkpoint.num_classes)
        scored: Split = found.test if split == "all" else getattr(found, split)
        scorer = Scorer(built, found, checkpoint.num_classes, recipe.port, run)
        outputs = scorer.answer(scored)[0] if answers else torch.empty(0)
        if outputs.isnan().any():
            raise NotFiniteError(f"'{checkpoint.reference}' answers images with NaN: its weights are broken")
        truth = scored.targets.where(scored.readable, -1)
        score = score_outputs(outputs[truth >= 0], truth[truth >= 0]) if answers else scorer.score(scored)
        notes = (*checkpoint.notes, *found.notes, *found.broken_notes)
        labels = checkpoint.labels or found.labels
        named = Evaluation(score, checkpoint.reference, checkpoint.architecture, found.name, split, labels, notes)
        return named, outputs, truth


def _average(parts: Sequence[tuple[Evaluation, Tensor, Tensor]]) -> Evaluation:
    """The ensemble: the mean of the probabilities that several models give to the same images."""
    members, answers, labels = zip(*parts, strict=True)
    first: Evaluation = members[0]
    for other, targets in zip(members, labels, strict=True):
        known = None not in (first.labels, other.labels)
        if (known and first.labels != other.labels) or not torch.equal(targets, labels[0]):
            raise ModelError(
                f"'{first.model}' and '{other.model}' cannot be averaged: their classes differ, or have another order"
            )
    kept = labels[0] >= 0
    mean = torch.stack([each.softmax(1) for each in answers]).mean(0)
    score = score_outputs(mean[kept].log(), labels[0][kept])
    notes = tuple(dict.fromkeys(note for each in members for note in each.notes))
    names = ", ".join(dict.fromkeys(each.architecture for each in members))
    return replace(
        first, score=score, model=f"ensemble of {len(members)}", architecture=names, notes=notes, members=members
    )


def _join(data: ImageData) -> ImageData:
    """The same data with all images to test on."""
    whole = data.test.join(data.validation, "").join(data.train, f"{data.name}, all")
    notes = [note for note in data.notes if note != data.held_out]
    note = (
        f"the data has a single split: all {len(whole):,} images are scored (--split test scores only what a port "
        "or fine-tuning holds out)"
    )
    return replace(data, test=whole, notes=(*notes, note))
