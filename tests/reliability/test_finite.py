"""Numbers that are none: refused when read, an error when they arise, never saved, never in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
SHORT = ("--steps", "2", "--batch-size", "8", "--grad-batches", "1", "--bn-batches", "1", "--control", "naive")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def make(folder: Path, seed: int = 0, scale: float = 1.0, name: str = "test_resnet") -> Path:
    torch.manual_seed(seed)
    net = timm.create_model(name, num_classes=10, in_chans=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return save_model(folder, net.state_dict(), load_checkpoint(net))


def break_weights(folder: Path, value: float) -> Path:
    """As somebody else's script might have saved it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["fc.bias"][3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "tuned", "new")):
        make(folder / name, seed)
    make(folder / "huge", 3, scale=1e30)
    return folder


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    for word in words:
        assert word in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_none_are_not_read(tmp_path, models, value):
    broken = break_weights(make(tmp_path / "broken"), value)
    trio = ("--src-base", models / "old", "--src-ft", models / "tuned", "--new-base", broken)
    out = ("--out", tmp_path / "out")
    tune, port = ("finetune", broken, *DATA, "--steps", "1", *out), ("port", *trio, *DATA, *SHORT, *out)
    for command in (("evaluate", broken, *DATA), tune, port):
        refused(run(*command), "'fc.bias' in", "NaN or infinite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_model_from_python_whose_weights_are_none_is_not_saved(tmp_path):
    net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    like = load_checkpoint(net)
    net.fc.bias.data[0] = float("nan")
    with pytest.raises(rt.NotFiniteError, match=r"'fc\.bias' holds NaN or infinite values"):
        save_model(tmp_path / "saved", net.state_dict(), like)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_answers_that_are_none_are_no_accuracy(models):
    # BatchNorm of numbers near 1e38: finite weights, infinite sums.
    for more in ((), ("--json",)):
        refused(run("evaluate", models / "huge", *DATA, *more), "NaN")


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "naive"),
        ("--method", "naive-sign"),
        ("--method", "rebasin"),
        ("--method", "fgmt"),
        ("--method", "naive", "--bn-batches", "0"),
        ("--permutation",),
    ],
    ids=" ".join,
)
def test_no_method_saves_a_model_that_answers_with_nan(models, tmp_path, options):
    if options == ("--permutation",):
        good = ("--src-base", models / "old", "--src-ft", models / "tuned", "--new-base", models / "new")
        found = run("port", *good, *DATA, *SHORT, "--method", "fgmt", "--control", "none", "--out", tmp_path / "found")
        assert found.exit_code == 0, found.output
        options = ("--permutation", tmp_path / "found")
    trio = ("--src-base", models / "old", "--src-ft", models / "tuned", "--new-base", models / "huge")
    refused(run("port", *trio, *DATA, *SHORT, *options, "--out", tmp_path / "out"), "step 1")
    assert not (tmp_path / "out").exists()


def test_a_fine_tuning_that_diverges_says_where_and_saves_nothing(models, tmp_path):
    steps = ("--steps", "40", "--batch-size", "8", "--checkpoint-every", "1", "--lr", "1e30")
    result = run("finetune", models / "old", *DATA, *steps, "--out", tmp_path / "out")
    refused(result, "at step", "lower lr (now 1e+30)")
    assert not (tmp_path / "out").exists()


def test_json_has_no_nan(models, tmp_path):
    trio = ("--src-base", models / "old", "--src-ft", models / "tuned", "--new-base", models / "new")
    # A control that diverges must not spoil the document of the port.
    more = ("--finetune-steps", "3", "--finetune-lr", "1e30", "--control", "full", "--json")
    result = run("port", *trio, *DATA, *SHORT, *more, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for text in (result.stdout, (tmp_path / "out" / "port.json").read_text()):
        json.loads(text, parse_constant=pytest.fail)
