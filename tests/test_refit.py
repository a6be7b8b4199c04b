"""Closed-form heads: the regression, what is left out, and what is said where there is no head to refit."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.evaluation.refit import Ridge, find_classifier
from hf_retarget.models.classifier import classifier_names


@pytest.fixture(params=[(40, 8), (12, 30)], ids=["tall", "wide"])
def problem(request):
    rows, columns = request.param
    torch.manual_seed(0)
    return torch.randn(rows, columns), torch.randn(rows, 3, dtype=torch.float64)


def solve_directly(features, targets, strength):
    """Ridge regression as the textbook has it: the mean is not penalised."""
    exact, level = features.double() - features.double().mean(0), targets.mean(0)
    gram = exact.T @ exact + strength * torch.eye(exact.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, exact.T @ (targets - level)).T
    return weight, level - weight @ features.double().mean(0)


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_it_is_ridge_regression(problem, strength):
    features, targets = problem
    ridge = Ridge(features)
    found = ridge.solve(targets, strength)
    for one, other in zip(found, solve_directly(features, targets, strength * ridge.unit), strict=True):
        assert torch.allclose(one, other, atol=1e-8)


def test_leaving_one_out_is_fitting_on_all_others(problem):
    features, targets = problem
    ridge = Ridge(features)
    answers = ridge.leave_one_out(targets, 0.5)
    for row in range(len(features)):
        others = torch.arange(len(features)) != row
        weight, bias = solve_directly(features[others], targets[others], 0.5 * ridge.unit)
        # The textbook's mean moves with the row that is left out; the closed form keeps the penalty and moves it, too.
        assert torch.allclose(answers[row], weight @ features[row].double() + bias, atol=1e-6)


def test_without_a_bias_nothing_is_centred():
    features = torch.tensor([[1.0], [2.0]])
    weight, bias = Ridge(features, centred=False).solve(3 * features.double(), 0.0)
    assert (round(float(weight), 6), float(bias)) == (3.0, 0.0)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "mobilenetv3_small_050"])
def test_classifiers_of_timm_are_found(name):
    model = timm.create_model(name, num_classes=4)
    head = classifier_names(model)
    where, layer = find_classifier(model, head)
    assert isinstance(layer, nn.Linear)
    assert layer.out_features == 4
    assert where == head[0].rpartition(".")[0]


@pytest.mark.parametrize(
    ("head", "words"),
    [(["0.weight", "1.weight"], "several layers"), (["2.weight"], "LayerNorm"), ([], "no layer")],
)
def test_what_cannot_be_refitted_says_why(head, words):
    with pytest.raises(ModelError, match=f"cannot be refitted.*{words}"):
        find_classifier(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)), head)
