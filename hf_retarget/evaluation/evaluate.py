"""`rt.evaluate` and `hf-retarget evaluate`: scores models on images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_retarget.data import ImageData, Split, check_classes, choose_preprocess, load_data
from hf_retarget.errors import DataError, ModelError, NotFiniteError
from hf_retarget.evaluation.scorer import Score, Scorer, score_outputs
from hf_retarget.models import Reference, load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.names import SPLITS
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments
from hf_retarget.words import number, percent

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/evaluate/1"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The score of a model or an ensemble on a split."""

    score: Score
    model: str
    architecture: str
    data: str
    split: str
    labels: tuple[str, ...] | None
    """The class names, if the model or the data have any."""
    notes: tuple[str, ...]
    members: tuple[Evaluation, ...] = ()
    """The single models of an ensemble."""

    def __repr__(self) -> str:
        """The score in one line, as in a notebook."""
        parts = "".join(f"\n  {each!r}" for each in self.members)
        score = f"top-1 {percent(self.score.top1)}, loss {number(self.score.loss)}"
        return f"{self.model} on {self.data}, {self.split} ({self.score.count:,} images): {score}{parts}"

    def name(self, number: int) -> str:
        """The label of a class, or its number."""
        return self.labels[number] if self.labels else str(number)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        found, sizes = self.score, Counter(self.score.labels)
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
                {"name": self.name(number), "images": sizes[number], "accuracy": accuracy}
                for number, accuracy in enumerate(found.per_class)
            ],
            "confusion": [list(row) for row in found.confusion],
            "notes": list(self.notes),
        } | ({"members": [each.to_json() for each in self.members]} if self.members else {})


def check_split(split: str) -> None:
    """Refuse an unknown split."""
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
    """Score a model on one split of the data; without `data`, on that of the recipe.

    The default split is the test split, or all images if the data has a single split. Several models are scored as an
    ensemble, the mean of their probabilities; its `members` are the single models.
    """
    check_arguments("evaluate", options, RunArguments)
    if split is not None:
        check_split(split)
    score = partial(_score, *finish_recipe(data, recipe), split, num_classes, Run(**options))
    if isinstance(model, (str, Path, nn.Module)):
        return score(model)[0]
    if not model:
        raise ModelError("there is no model to evaluate; give one or several")
    return _average([score(each, answers=True) for each in model])


def _score(
    recipe: Recipe,
    images: Any,
    split: str | None,
    num_classes: int | None,
    run: Run,
    model: Reference,
    *,
    answers: bool = False,
) -> tuple[Evaluation, Tensor, Tensor]:
    """Score a model; also return its outputs (empty unless `answers`) and the labels (-1 for unreadable images)."""
    with run.stage("loading", "loading the model"):
        checkpoint = load_checkpoint(model, num_classes=num_classes, **run.loading)
    with run.stage("loading", "loading the data"):
        preprocess = choose_preprocess(checkpoint, recipe.data.image_size, run.preprocess)
        labels, name = checkpoint.labels, f"'{checkpoint.reference}'"
        found = load_data(images, recipe.data, preprocess, model_labels=labels, model=name, token=run.token)
        check_classes(found.name, found.classes, found.labels, checkpoint.reference, checkpoint.num_classes)
    if split is None:
        found, split = (_join(found), "all") if found.held_out else (found, "test")
    built = checkpoint.build()
    check_shapes(built, found.train.preprocess.input_size, checkpoint.num_classes)
    scored: Split = found.test if split == "all" else getattr(found, split)
    scorer = Scorer(built, found, checkpoint.num_classes, recipe.port, run)
    outputs = scorer.answer(scored)[0] if answers else torch.empty(0)
    if outputs.isnan().any():
        raise NotFiniteError(f"the outputs of '{checkpoint.reference}' are NaN: its weights are broken")
    truth = scored.targets.where(scored.readable, -1)
    score = score_outputs(outputs[truth >= 0], truth[truth >= 0]) if answers else scorer.score(scored)
    notes = (*checkpoint.notes, *found.notes, *found.broken_notes)
    labels = checkpoint.labels or found.labels
    named = Evaluation(score, checkpoint.reference, checkpoint.architecture, found.name, split, labels, notes)
    return named, outputs, truth


def _average(parts: Sequence[tuple[Evaluation, Tensor, Tensor]]) -> Evaluation:
    """The ensemble: the mean of several models' probabilities for the same images."""
    members, answers, labels = zip(*parts, strict=True)
    first: Evaluation = members[0]
    for other, targets in zip(members, labels, strict=True):
        known = None not in (first.labels, other.labels)
        if (known and first.labels != other.labels) or not torch.equal(targets, labels[0]):
            raise ModelError(
                f"'{first.model}' and '{other.model}' cannot be averaged: their classes or the order of these differ"
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
    """The same data with all images in the test split."""
    whole = data.test.join(data.validation, "").join(data.train, f"{data.name}, all")
    notes = [note for note in data.notes if note != data.held_out]
    note = (
        f"the data has a single split: all {len(whole):,} images are scored (--split test scores only what a port "
        "or fine-tuning holds out)"
    )
    return replace(data, test=whole, notes=(*notes, note))
