"""A saved model is loaded by timm, has the requested dtype, and is reproducible to the byte."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.models import compare_checkpoints, load_checkpoint, save_model


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("test_resnet", {}, (3, 64, 64)),
        ("test_resnet", {"in_chans": 1}, (1, 64, 64)),
        ("test_resnet", {"in_chans": 5}, (5, 64, 64)),
        ("test_vit", {"img_size": 32, "in_chans": 1}, (1, 32, 32)),
        ("test_efficientnet", {"global_pool": "max"}, (3, 64, 64)),
    ],
)
def test_timm_loads_a_saved_model(tmp_path, save, name, options, shape):
    like = load_checkpoint(save(tmp_path / "base", name, num_classes=5, **options))
    model = like.build(3)
    labels = ("α", "b", "c")
    folder = save_model(tmp_path / "ported", model.state_dict(), like, num_classes=3, labels=labels)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.rand(2, *shape)
    with torch.no_grad():
        assert torch.equal(theirs(x), model(x))
    assert theirs.pretrained_cfg["label_names"] == list(labels)
    again = load_checkpoint(folder)
    assert (again.architecture, dict(again.options), again.num_classes) == (name, dict(like.options), 3)
    assert again.labels == labels
    assert again.config["input_size"] == like.config["input_size"]


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_gray_model_stays_gray_when_saved_repeatedly(tmp_path, save, name):
    """timm reads the single channel from the configuration; our arguments record it as well."""
    first = load_checkpoint(save(tmp_path / "first", name, num_classes=3, in_chans=1))
    built = load_checkpoint(first.build())
    again = load_checkpoint(save_model(tmp_path / "again", built.weights, built))
    assert dict(first.options) == dict(built.options) == dict(again.options) == {"in_chans": 1}
    assert compare_checkpoints(first, again, built).notes == ()


def test_the_configuration_is_what_timm_writes(tmp_path, save):
    folder = save(tmp_path / "theirs", "test_efficientnet", num_classes=3, labels=["a", "b", "c"])
    like = load_checkpoint(folder)
    ours = save_model(tmp_path / "ours", like.weights, like, labels=like.labels)
    theirs = json.loads((folder / "config.json").read_text())
    found = json.loads((ours / "config.json").read_text())
    assert list(found) == list(theirs)
    assert {**found, "pretrained_cfg": 0} == {**theirs, "pretrained_cfg": 0}
    # timm leaves the number of classes of the base in the inner part, which its own reader overrules
    assert found["pretrained_cfg"] == {**theirs["pretrained_cfg"], "num_classes": 3}


def test_saved_bytes_are_reproducible_with_one_entry_of_metadata(tmp_path, save):
    like = load_checkpoint(save(tmp_path / "base", num_classes=3))
    for name in ("one", "two"):
        save_model(tmp_path / name, dict(reversed(like.weights.items())), like)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]


def test_dtypes(tmp_path, save):
    like = load_checkpoint(save(tmp_path / "base", num_classes=3, half=True))
    weights = like.build().state_dict()
    kept = load_file(save_model(tmp_path / "kept", weights, like) / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float16, torch.int64}
    wide = load_file(save_model(tmp_path / "wide", weights, like, dtype=torch.float32) / "model.safetensors")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32, torch.int64}
    weights["fc.weight"][0, 0] = 1e6
    with pytest.raises(ModelError, match=r"'fc\.weight' has values up to 1e\+06, too large for torch\.float16"):
        save_model(tmp_path / "overflow", weights, like)
    assert not (tmp_path / "overflow").exists()


def test_tied_weights_and_models_unknown_to_timm(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

    like = load_checkpoint(Tied())
    folder = save_model(tmp_path, Tied().state_dict(), like)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["one.weight"], stored["two.weight"])
    assert json.loads((folder / "config.json").read_text())["architecture"] == "Tied"


def test_refusals_are_explained(tmp_path, save):
    like = load_checkpoint(save(tmp_path / "base", num_classes=3))
    with pytest.raises(ModelError, match=r"fc\.weight is \[3, \d+\], not \[4, \d+\]"):
        save_model(tmp_path / "out", like.weights, like, num_classes=4)
    with pytest.raises(ModelError, match="2 label names for 3 classes"):
        save_model(tmp_path / "out", like.weights, like, labels=("a", "b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the model"):
        save_model(tmp_path / "file", like.weights, like)
    assert not (tmp_path / "out").exists()
