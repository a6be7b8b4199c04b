"""`evaluate A B C`: each model by itself, and the mean of their probabilities."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from click.testing import CliRunner
from torch.nn.functional import nll_loss

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.errors import ModelError, NotFiniteError


@pytest.fixture(scope="module")
def items() -> list:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(3, 32, 32, generator=generator), number % 3) for number in range(30)]


def make(name: str = "test_resnet", seed: int = 0, classes: int = 3):
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, **({"img_size": 32} if "vit" in name else {}))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def test_the_ensemble_is_the_mean_of_the_probabilities(items):
    models = [make("test_resnet", 0), make("test_resnet", 1), make("test_vit", 2)]
    data = {"train": items, "test": items}
    found = rt.evaluate(models, data, preprocess="none")
    images, labels = torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])
    with torch.no_grad():
        mean = torch.stack([model(images).softmax(1) for model in models]).mean(0)
    assert found.score.loss == pytest.approx(float(nll_loss(mean.log(), labels)), rel=1e-4)
    assert found.score.predictions == tuple(mean.argmax(1).tolist())
    assert len({each.score.predictions for each in (found, *found.members)}) > 1
    for member, model in zip(found.members, models, strict=True):
        alone = rt.evaluate(model, data, preprocess="none")
        assert member.score.predictions == alone.score.predictions
        assert member.score.loss == pytest.approx(alone.score.loss, rel=1e-4)
    assert (found.model, found.architecture) == ("ensemble of 3", "test_resnet, VisionTransformer")
    shown = repr(found).splitlines()
    assert len(shown) == 4, "a notebook shows a line for the ensemble and for each member"
    assert shown[0].startswith("ensemble of 3 on ")
    assert f"top-1 {found.score.top1:.1%}" in shown[0]
    assert max(map(len, shown)) < 100


def test_what_cannot_be_averaged_is_refused(items):
    data = {"train": items, "test": items}
    with pytest.raises(ModelError, match="there is no model"):
        rt.evaluate([], data)
    broken = make()
    for parameter in broken.parameters():
        parameter.data *= 1e30
    with pytest.raises(NotFiniteError, match="NaN"):
        rt.evaluate([make(), broken], data)


def test_on_the_command_line(tmp_path, colours, labelled):
    one = labelled(tmp_path / "one", "test_resnet", labels=("blue", "green", "red"), num_classes=3)
    other = labelled(tmp_path / "other", "test_resnet", labels=("red", "green", "blue"), num_classes=3)
    result = CliRunner().invoke(main, ["evaluate", str(one), str(one), "--data", str(colours)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["MODEL", "ARCHITECTURE", "TOP-1", "TOP-5", "LOSS"]
    assert lines[3].startswith("ensemble of 2")
    assert lines[1].split()[1:] == lines[2].split()[1:]
    result = CliRunner().invoke(main, ["evaluate", str(one), str(one), "--data", str(colours), "--json"])
    found = json.loads(result.stdout)
    assert [each["top1"] for each in found["members"]] == [found["top1"]] * 2
    result = CliRunner().invoke(main, ["evaluate", str(one), str(other), "--data", str(colours)])
    assert result.exit_code == 1
    assert "cannot be averaged: their classes or the order of these differ" in result.stderr
