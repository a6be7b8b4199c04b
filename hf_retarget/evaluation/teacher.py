"""The tuned model as a teacher: its predictions complement or replace the labels of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import one_hot

from hf_retarget.data import ImageData, Split
from hf_retarget.evaluation.scorer import Scorer
from hf_retarget.matching.gradients import TEMPERATURE


class Teacher:
    """The tuned model's predictions, computed once per image: augmented views share that of the original."""

    def __init__(self, scorer: Scorer, weights: Mapping[str, Tensor]) -> None:
        self.scorer, self.weights = scorer, weights
        self.images = 0
        """Images it was evaluated on."""
        self._kept: dict[str, Tensor] = {}

    def answer(self, split: Split) -> Tensor:
        """Its outputs for the images of a split."""
        key = f"{split.name}/{id(split.rows)}"  # different images may have the same name
        if key not in self._kept:
            before = self.scorer.weights()
            self.scorer.load(self.weights)
            self._kept[key] = self.scorer.answer(split)[0]
            self.scorer.load(before)
            self.images += len(split)
        return self._kept[key]

    def shares(self, split: Split, targets: str, temperature: float = 1.0) -> Tensor:
        """A probability row per image: the one-hot label, the teacher's probabilities, or the mean of both."""
        if targets == "labels":
            return one_hot(split.targets, self.scorer.classes).double()
        said = (self.answer(split).double() / temperature).softmax(1)
        return said if targets == "teacher" else (said + one_hot(split.targets, self.scorer.classes)) / 2

    def teach(self, split: Split, targets: str) -> Split:
        """The split with targets for the loss: labels, or probabilities at the loss's temperature."""
        if targets == "labels":
            return split
        return replace(split, targets=self.shares(split, targets, TEMPERATURE).float())

    def label(self, split: Split) -> Split:
        """The split with the teacher's predictions as labels: accuracy on it is agreement with the teacher."""
        return replace(split, targets=self.answer(split).argmax(1))


def answer_for_labels(data: ImageData, teacher: Teacher, *, test: bool) -> ImageData:
    """Replace labels by the teacher's predictions, in the test split only if `test`."""
    train, validation = teacher.label(data.train), teacher.label(data.validation)
    return replace(data, train=train, validation=validation, test=teacher.label(data.test) if test else data.test)
