"""BatchNorm: the reset computes the average statistics, touches nothing else, and fails without a trace."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import nn

from hf_retarget.errors import DataError
from hf_retarget.evaluation.batchnorm import reset_batchnorm


def batches(count: int = 3, size: int = 6):
    generator = torch.Generator().manual_seed(0)
    return [(2 + 3 * torch.randn(size, 3, 8, 8, generator=generator), torch.zeros(size)) for _ in range(count)]


def net() -> nn.Module:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)]
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), *head)
    with torch.no_grad():
        for norm in (model[0], model[3]):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(1, 2)
    return model


def test_statistics_are_the_average_over_minibatches():
    model, data = net(), batches()
    result = reset_batchnorm(model, data)
    mean = torch.stack([images.mean((0, 2, 3)) for images, _ in data]).mean(0)
    variance = torch.stack([images.var((0, 2, 3)) for images, _ in data]).mean(0)
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[0].running_var, variance)
    assert (result.layers, result.batches) == (2, 3)
    assert result.after["0"].mean_norm == pytest.approx(float(mean.norm()))
    assert result.after["0"].variance == pytest.approx(float(variance.mean()))
    assert result.before["0"].variance < 2 < 8 < result.after["0"].variance


def test_dropout_is_off_and_the_layers_below_normalise_with_batch_statistics():
    model, data = net(), batches(1)
    reset_batchnorm(model, data)
    normalised = torch.batch_norm(data[0][0], model[0].weight, model[0].bias, None, None, True, 0.1, 1e-5, False)
    torch.testing.assert_close(model[3].running_mean, model[2](normalised).mean((0, 2, 3)))


def test_a_second_reset_forgets_the_first():
    once, twice = net(), net()
    reset_batchnorm(once, batches(2))
    reset_batchnorm(twice, [(images + 5, labels) for images, labels in batches(4)])
    reset_batchnorm(twice, batches(2))
    assert all(torch.equal(value, twice.state_dict()[name]) for name, value in once.state_dict().items())


def test_only_the_statistics_change():
    model = net().train()
    model[1].eval()
    model[3].eval()
    model[3].momentum = 0.25
    before = copy.deepcopy(model.state_dict())
    reset_batchnorm(model, batches())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {
        f"{layer}.{name}" for layer in "03" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert [each.training for each in model] == [True, False, True, False, True, True, True, True]
    assert (model[0].momentum, model[3].momentum) == (0.1, 0.25)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_drawn_for_a_model_without_batchnorm():
    def never():
        raise AssertionError("a minibatch was drawn")
        yield

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4))
    result = reset_batchnorm(model, never())
    assert (result.layers, result.batches) == (0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no minibatches to reset BatchNorm"),
        ([*batches(1), (torch.zeros(1, 3, 8, 8), None)], "minibatch 1 holds 1"),
    ],
)
def test_bad_minibatches_leave_the_old_statistics(data, message):
    model = nn.Sequential(net()[:4], nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(5)).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError, match=message):
        reset_batchnorm(model, data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_timm_layers_that_are_more_than_a_norm():
    model = timm.create_model("test_efficientnet", num_classes=3)  # BatchNormAct2d: norm, dropout and activation in one
    data = [(torch.randn(4, 3, 64, 64), torch.zeros(4))]
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert reset_batchnorm(model, data, accelerator=Accelerator(cpu=True)).layers == norms > 5
    model.eval()
    assert model(data[0][0]).isfinite().all()
