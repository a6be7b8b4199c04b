"""Evaluation: every figure against its definition, the model untouched, and processes without influence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from faults.limits import limited
from torch import nn
from torch.nn.functional import cross_entropy

from hf_retarget.data import Preprocess, load_data
from hf_retarget.errors import DataError, ModelError
from hf_retarget.evaluation.scorer import Scorer, score_model, score_outputs
from hf_retarget.recipe.options import DataOptions, PortOptions
from hf_retarget.run import Run


def batches(sizes=(5, 5, 3), classes: int = 7, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for size in sizes
    ]


def test_figures_are_what_they_say():
    torch.manual_seed(1)
    model, data = nn.Linear(4, 7), batches((40, 40, 13))
    score = score_model(model, data, 7)
    images, labels = (torch.cat(part) for part in zip(*data, strict=True))
    output = model(images).detach()
    best = output.argsort(1, descending=True)
    assert score.count == 93
    assert score.loss == pytest.approx(float(cross_entropy(output, labels)), rel=1e-5)  # over images, not over batches
    assert score.top1 == float((best[:, 0] == labels).double().mean())
    assert score.top5 == float((best[:, :5] == labels[:, None]).any(1).double().mean())
    assert score.predictions == tuple(best[:, 0].tolist())
    for label in range(7):
        assert score.per_class[label] == float((best[labels == label, 0] == label).double().mean())
        for other in range(7):
            assert score.confusion[label][other] == int(((labels == label) & (best[:, 0] == other)).sum())


def test_few_classes_have_no_top5_and_absent_ones_no_accuracy():
    score = score_model(nn.Identity(), [(torch.eye(5)[:3], torch.tensor([0, 2, 2]))], 5)
    assert score.top5 is None
    assert score.per_class == (1.0, None, 1 / 2, None, None)


def test_many_classes_have_no_table_of_confusions():
    """It would have 60,000² entries."""
    outputs, labels = torch.zeros(8, 60_000), torch.arange(8) * 7000
    outputs[torch.arange(8), labels] = 1.0
    with limited(memory=1 << 30):
        score = score_outputs(outputs, labels)
    assert (score.top1, score.confusion, len(score.per_class)) == (1.0, (), 60_000)


def test_outputs_of_many_images_are_scored_as_those_of_few():
    (outputs, labels), *_ = batches((3000,), 7)
    outputs = outputs @ torch.randn(4, 7)
    score = score_outputs(outputs, labels)
    whole = score_model(nn.Identity(), [(outputs, labels)], 7)
    assert (score.top1, score.top5, score.confusion) == (whole.top1, whole.top5, whole.confusion)
    assert score.loss == pytest.approx(whole.loss, rel=1e-6)


def test_equal_scores_predict_the_first_class():
    score = score_model(nn.Identity(), [(torch.zeros(40, 40), torch.arange(40))], 40)
    assert (score.top1, score.top5) == (1 / 40, 5 / 40)
    assert set(score.predictions) == {0}


def test_the_model_keeps_its_modes_and_dropout_is_off():
    model = nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.9), nn.BatchNorm1d(7)).train()
    model[0].eval()
    scores = [score_model(model, batches(), 7) for _ in range(2)]
    assert scores[0] == scores[1]
    assert [module.training for module in model] == [False, True, True]
    assert model[2].num_batches_tracked == 0


class Remembers(nn.Linear):
    """Keeps a product of its weights in evaluation mode, until it is trained: so do LeViT and others."""

    kept = None

    def train(self, mode: bool = True):
        self.kept = None if mode else self.kept
        return super().train(mode)

    def forward(self, inputs):
        if self.kept is None or self.training:
            self.kept = self.weight.t()
        return inputs @ self.kept


def test_new_weights_are_seen_by_models_that_remember_old_ones():
    model = Remembers(4, 7).eval()
    images, labels = batches()[0]
    model(images)
    model.weight = nn.Parameter(-model.weight.detach())
    expected = float(cross_entropy(images @ model.weight.detach().t(), labels))
    assert score_model(model, [(images, labels)], 7).loss == pytest.approx(expected)
    assert model.kept is None
    assert not model.training


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_out_of_range_are_refused(label):
    data = [*batches(), (torch.zeros(1, 4), torch.tensor([label]))]
    with pytest.raises(DataError, match=rf"label {label} in batch 3 is not one of the model's 7 classes \(0 to 6\)"):
        score_model(nn.Linear(4, 7), data, 7)


def test_other_bad_input_is_refused():
    with pytest.raises(ModelError, match=r"output has shape \[5, 9\], but there are 7 classes"):
        score_model(nn.Linear(4, 9), batches(), 7)
    with pytest.raises(DataError, match="no images to evaluate on"):
        score_model(nn.Linear(4, 7), [], 7)


TWO_PROCESSES = """
import copy, dataclasses, json, sys, torch
from hf_retarget.run import choose_device
from torch import nn
from hf_retarget.evaluation.batchnorm import reset_batchnorm
from hf_retarget.evaluation.scorer import score_model

torch.manual_seed(0)
accelerator = choose_device("cpu")
assert accelerator.num_processes == 2
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
data = [(torch.randn(size, 6), torch.randint(0, 8, (size,))) for size in (9, 9, 9, 9, 4)]
results = []
for shared in (accelerator, None):
    twin, ran = copy.deepcopy(model), []
    reset = reset_batchnorm(twin, data[:2], accelerator=shared)
    twin.register_forward_hook(lambda *_: ran.append(1))
    score = score_model(twin, data, 8, accelerator=shared)
    results.append([len(ran), dataclasses.asdict(reset), dataclasses.asdict(score)])
with open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w") as file:
    json.dump(results, file)
"""


def test_two_processes_share_the_work_and_get_the_score_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    (ran_first, *shared_first), (ran_alone, *alone) = first
    (ran_second, *shared_second), _ = second
    assert (ran_first, ran_second, ran_alone) == (3, 2, 5)
    assert shared_first == shared_second == alone


class Flat(nn.Module):
    """Views its activations as rows, or reshapes them, which works for any layout."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.conv, self.head, self.views = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 5), views

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.conv(images)
        self.last = inner.is_contiguous(memory_format=torch.channels_last)
        return self.head(inner.view(len(images), -1) if self.views else inner.flatten(1))


@pytest.mark.parametrize("views", [False, True])
def test_channels_are_last_where_the_model_allows_it(views: bool):
    torch.manual_seed(0)
    model = Flat(views)
    preprocess = Preprocess((3, 8, 8), (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, "center")
    images = [(torch.rand(3, 8, 8), number % 5) for number in range(20)]
    data = load_data({"train": images, "test": images}, DataOptions(), preprocess)
    plain = score_model(model, data.test.batches(64), 5)
    scorer = Scorer(model, data, 5, PortOptions(), Run())
    score = scorer.score(data.test)
    assert model.last is not views
    assert score.predictions == plain.predictions
    assert score.loss == pytest.approx(plain.loss, rel=1e-5)
    outputs, features = scorer.answer(data.test, model.head)
    assert torch.equal(outputs.argmax(1), torch.tensor(score.predictions))
    assert features.shape == (20, 512)
    assert all(each.is_contiguous() for each in scorer.weights().values())
