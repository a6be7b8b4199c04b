"""Closed-form heads: linear classifiers fitted to a model's features by ridge regression, with forward passes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

import torch
from torch import Tensor, nn

from hf_retarget.data import Split
from hf_retarget.errors import ModelError
from hf_retarget.evaluation.scorer import ROWS, Score, Scorer, score_outputs, sum_by_rows

HEAD_IMAGES = 2_000
"""Maximum number of images to fit a head on: more change only the second decimal, at the price of forward passes."""

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Candidate strengths of the regularisation, relative to the mean eigenvalue of the features' Gram matrix."""

SCALES = tuple(2.0**power for power in range(8))
"""Candidate factors for the outputs: those of a regression, from 0 to 1, are too close for probabilities."""


Linear = nn.Linear | nn.Conv2d


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted head, its score on the images it was chosen by, and its kind of targets."""

    weights: dict[str, Tensor] = field(repr=False)
    """The tensors of the head by name."""
    score: Score
    targets: str


class Ridge:
    """Ridge regression on fixed features, for any targets and strength, from a single decomposition.

    Example:
        >>> features = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> weight, bias = Ridge(features).solve(2 * features.double() + 1, 0.0)
        >>> round(float(weight), 6), round(float(bias), 6)
        (2.0, 1.0)
    """

    def __init__(self, features: Tensor, *, centred: bool = True) -> None:
        exact = features.double()
        self.mean = exact.mean(0) if centred else exact.new_zeros(exact.shape[1])
        self.centred, self.features = centred, exact - self.mean
        # Both Gram matrices have the same eigenvalues, apart from zeros: decompose the smaller one.
        self.wide = len(exact) <= exact.shape[1]
        gram = self.features @ self.features.T if self.wide else self.features.T @ self.features
        values, self.vectors = torch.linalg.eigh(gram)
        self.values = values.clamp(min=0)

    @property
    def unit(self) -> float:
        """The mean eigenvalue, the unit of strengths."""
        return max(float(self.values.mean()), 1e-12)

    def solve(self, targets: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """The weight (outputs × features) and bias with the least squared error, given a penalty on the weight."""
        level = targets.mean(0) if self.centred else targets.new_zeros(targets.shape[1])
        shrunk = self.vectors / (self.values + strength * self.unit + 1e-12)
        rest = targets - level
        if self.wide:
            weight = self.features.T @ (shrunk @ (self.vectors.T @ rest))
        else:
            weight = shrunk @ (self.vectors.T @ (self.features.T @ rest))
        return weight.T, level - weight.T @ self.mean

    def leave_one_out(self, targets: Tensor, strength: float) -> Tensor:
        """The prediction for each row of a regression on all other rows."""
        weight, bias = self.solve(targets, strength)
        predicted = (self.features + self.mean) @ weight.T + bias
        scores = self.vectors * self.values.sqrt() if self.wide else self.features @ self.vectors
        leverage = (scores.square() / (self.values + strength * self.unit + 1e-12)).sum(1)
        leverage = leverage + (1 / len(targets) if self.centred else 0)
        away: Tensor = (targets - predicted) / (1 - leverage).clamp(min=1e-9)[:, None]
        return targets - away


def find_classifier(model: nn.Module, head: Sequence[str]) -> tuple[str, Linear]:
    """The name and module of a model's final linear layer; raise ModelError if there is none."""
    where = {name.rpartition(".")[0] for name in head}
    layer = model.get_submodule(next(iter(where))) if len(where) == 1 else None
    if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)):
        return next(iter(where)), layer
    kind = "several layers" if len(where) > 1 else f"a {type(layer).__name__}" if layer else "no layer at all"
    raise ModelError(f"its head cannot be refitted: the classifier is {kind}, not one linear layer")


def fit_head(
    scorer: Scorer,
    head: Sequence[str],
    images: Sequence[Split],
    targets: Mapping[str, Sequence[Tensor]],
    chosen_by: Split | None = None,
) -> Fitted:
    """Fit a head to the features of the scorer's model, on one of several kinds of targets (rows of probabilities).

    Targets and strength are chosen on the split `chosen_by`, or by leave-one-out on the first of `images`.
    """
    name, layer = find_classifier(scorer.model, head)
    _check_last(scorer, images[0], name, layer)
    features = torch.cat([scorer.answer(each, layer)[1][each.readable] for each in images])
    ridge = Ridge(features, centred=layer.bias is not None)
    judged, other = images[0], None
    if chosen_by is not None:
        judged, other = chosen_by, scorer.answer(chosen_by, layer)[1][chosen_by.readable]
    labels = judged.targets[judged.readable]
    best: Fitted | None = None
    for kind, shares in targets.items():
        wanted = torch.cat([rows[each.readable] for each, rows in zip(images, shares, strict=True)]).double()
        for strength in STRENGTHS:
            weight, bias = ridge.solve(wanted, strength)
            if other is not None:
                found = torch.cat([torch.addmm(bias, rows.double(), weight.T).float() for rows in other.split(ROWS)])
            else:
                found = ridge.leave_one_out(wanted, strength)[: len(labels)].float()
            scale = min(SCALES, key=lambda each: fsum(sum_by_rows(found, labels, each)))
            score = score_outputs(found.mul_(scale), labels)
            if best is None or (score.top1, -score.loss) > (best.score.top1, -best.score.loss):
                tensors = {f"{name}.weight": (scale * weight).float().reshape(layer.weight.shape)}
                if layer.bias is not None:
                    tensors[f"{name}.bias"] = (scale * bias).float()
                best = Fitted(tensors, score, kind)
    if best is None:
        raise ModelError("a head needs targets to be fitted to")
    return best


def _check_last(scorer: Scorer, images: Split, name: str, layer: Linear) -> None:
    """Check that the classifier's result is the model's output, with random weights, as zeros would prove nothing."""
    few, before = images.take(4, 0), scorer.images
    kept = {key: each.clone() for key, each in layer.state_dict().items()}
    weight = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.weight.copy_(weight)
        outputs, features = scorer.answer(replace(few, name=f"{few.name}, a few"), layer)
        layer.load_state_dict(kept)
    scorer.images = before  # the check is not part of the price
    if features.shape[1] == weight.flatten(1).shape[1]:
        bias = layer.bias.detach().cpu().float() if layer.bias is not None else 0.0
        again = features @ weight.flatten(1).T + bias
        if torch.allclose(again, outputs, rtol=1e-2, atol=1e-2 * float(outputs.abs().max()) + 1e-4):
            return
    raise ModelError(f"its head cannot be refitted: '{name}' alone does not determine the model's outputs")
