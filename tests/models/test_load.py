"""References of every kind are resolved to their weights, and bad ones give one clear sentence."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.models import load_checkpoint


class Tiny(nn.Module):
    """A factory without a num_classes argument."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.norm(self.stem(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiny_models", sys.modules[__name__])


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_a_timm_folder_is_loaded(tmp_path, save, name):
    folder = save(tmp_path, name, num_classes=7, labels=list("abcdefg"))
    checkpoint = load_checkpoint(folder)
    assert (checkpoint.architecture, checkpoint.num_classes, checkpoint.labels) == (name, 7, tuple("abcdefg"))
    stored = load_file(folder / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in checkpoint.weights.items()} == {k: t.dtype for k, t in stored.items()}
    assert all(torch.equal(checkpoint.weights[key], tensor) for key, tensor in stored.items())
    expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert checkpoint.hashes == {"model.safetensors": expected}
    model, x = checkpoint.build(), torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        assert torch.equal(model(x), theirs(x))
    assert not model.training


def test_options_come_from_the_configuration(tmp_path, save):
    checkpoint = load_checkpoint(f"local-dir:{save(tmp_path, 'test_vit', in_chans=1, img_size=32, num_classes=3)}")
    assert checkpoint.options == {"in_chans": 1, "img_size": 32}
    assert checkpoint.config["input_size"] == (1, 32, 32)
    assert checkpoint.build()(torch.rand(1, 1, 32, 32)).shape == (1, 3)


def test_half_precision_is_kept_and_computed_in_float32(tmp_path, save):
    checkpoint = load_checkpoint(save(tmp_path, half=True, num_classes=3))
    assert checkpoint.dtype == torch.float16
    assert {tensor.dtype for tensor in checkpoint.weights.values()} == {torch.float16, torch.int64}
    assert {tensor.dtype for tensor in checkpoint.in_float32().values()} == {torch.float32, torch.int64}
    assert next(checkpoint.build().parameters()).dtype == torch.float32


def test_a_new_number_of_classes_gets_a_seeded_head(tmp_path, save):
    checkpoint = load_checkpoint(save(tmp_path, num_classes=3))
    before = torch.get_rng_state()
    one, same, other = (checkpoint.build(5, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert one["fc.weight"].shape[0] == 5
    assert torch.equal(one["fc.weight"], same["fc.weight"])
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    body = [name for name in one if not name.startswith("fc.")]
    assert all(torch.equal(one[name], checkpoint.weights[name]) for name in body)


def test_loading_does_not_change_the_random_state(tmp_path, save):
    save(tmp_path, num_classes=3)
    before = torch.get_rng_state()
    load_checkpoint(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_shards(tmp_path, save):
    weights = load_file(save(tmp_path, num_classes=3) / "model.safetensors")
    names = list(weights)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = load_checkpoint(tmp_path)
    assert set(checkpoint.hashes) == set(parts)
    assert all(torch.equal(checkpoint.weights[name], weights[name]) for name in names)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 'model-2\.safetensors'"):
        load_checkpoint(tmp_path)
    index["weight_map"][names[0]] = "../outside.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a safetensors file beside it"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "model."])
def test_a_file_with_arch_determines_its_classes(tmp_path, save, prefix):
    weights = load_file(save(tmp_path / "saved", num_classes=6, in_chans=1) / "model.safetensors")
    counters = [name for name in weights if name.endswith("num_batches_tracked")]
    path = tmp_path / "weights.safetensors"
    save_file({prefix + name: weights[name] for name in weights if name not in counters}, path)
    checkpoint = load_checkpoint(path, arch="test_resnet")
    assert counters
    assert (checkpoint.num_classes, checkpoint.options) == (6, {"in_chans": 1})
    assert checkpoint.config["input_size"][0] == 1
    assert set(checkpoint.weights) == set(weights)
    assert "license" not in checkpoint.config, "timm's licence is that of other weights"
    assert torch.equal(checkpoint.weights["fc.weight"], weights["fc.weight"])


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_pickles_are_read_only_if_allowed(tmp_path, wrapper):
    state = Tiny().state_dict()
    path = tmp_path / "run.pth"
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, path)
    with pytest.raises(ModelError, match="--allow-pickle"):
        load_checkpoint(path, arch="tiny_models:Tiny")
    assert_same(load_checkpoint(path, arch="tiny_models:Tiny", allow_pickle=True).weights, state)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    path = tmp_path / "run.pth"
    torch.save({"state_dict": Tiny().state_dict(), "net": Tiny()}, path)
    with pytest.raises(ModelError, match="cannot be read as a pickle of tensors"):
        load_checkpoint(path, arch="tiny_models:Tiny", allow_pickle=True)


def test_a_factory_without_num_classes(tmp_path):
    torch.manual_seed(1)
    model = Tiny(width=6)
    model.out = nn.Linear(6, 9)
    path = tmp_path / "tiny.safetensors"
    save_file(model.state_dict(), path)
    checkpoint = load_checkpoint(path, arch="tiny_models:Tiny", options={"width": 6})
    assert checkpoint.num_classes == 9
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(checkpoint.build()(x), model.eval()(x))
    assert checkpoint.build(4)(x).shape == (2, 4)


def test_a_module_is_copied():
    model = Tiny()
    checkpoint = load_checkpoint(model)
    assert (checkpoint.architecture, checkpoint.num_classes) == ("Tiny", 3)
    built = checkpoint.build()
    with torch.no_grad():
        model.out.weight.zero_()
    assert built.out.weight.abs().sum() > 0
    assert checkpoint.weights["out.weight"].abs().sum() > 0
    assert checkpoint.hashes != load_checkpoint(model).hashes
    assert checkpoint.build(8).out.out_features == 8
    assert model.out.out_features == 3


def test_a_timm_module_is_recognised_only_if_timm_builds_the_same():
    gray = load_checkpoint(timm.create_model("test_resnet", in_chans=1, num_classes=4))
    assert (gray.architecture, gray.options) == ("test_resnet", {"in_chans": 1})
    changed = timm.create_model("test_resnet", num_classes=4, act_layer=nn.SiLU)
    assert load_checkpoint(changed).architecture == "ResNet"
    resized = timm.create_model("test_vit", num_classes=4, img_size=32)  # prints as the plain one does
    assert load_checkpoint(resized).architecture == "VisionTransformer"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ("a", "b")),
        ({"1": "b", "0": "a"}, ("a", "b")),
        ({"0": "a", "2": "b"}, None),
        (["LABEL_0", "LABEL_1"], None),
    ],
)
def test_labels_are_read_and_never_invented(tmp_path, save, names, expected):
    save(tmp_path, num_classes=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": names}))
    assert load_checkpoint(tmp_path).labels == expected


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_bad_folders_are_refused(tmp_path, save):
    with pytest.raises(ModelError, match="is empty"):
        load_checkpoint(tmp_path)
    save(tmp_path, num_classes=3)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    rewrite(tmp_path, num_classes=4)
    with pytest.raises(ModelError, match=r"fc\.weight is \[3, \d+\], not \[4, \d+\]"):
        load_checkpoint(tmp_path)
    rewrite(tmp_path, num_classes=3, architecture="test_resnett")
    with pytest.raises(ModelError, match="did you mean 'test_resnet'"):
        load_checkpoint(tmp_path)
    rewrite(tmp_path, architecture="os:system", model_args={"command": "false"})
    with pytest.raises(ModelError, match="if you trust it, pass --arch os:system"):
        load_checkpoint(tmp_path)
    rewrite(tmp_path, architecture=None, model_type="vit", model_args=None)
    with pytest.raises(ModelError, match=r"missing \(first: vit\."):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json; give its architecture"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, arch="test_resnet").num_classes == 3
    (tmp_path / "model.safetensors").rename(tmp_path / "model.txt")
    with pytest.raises(ModelError, match="holds no weights"):
        load_checkpoint(tmp_path, arch="test_resnet")


def test_bad_files_and_names_are_refused(tmp_path, save):
    path = save(tmp_path, num_classes=3) / "model.safetensors"
    with pytest.raises(ModelError, match="is unknown; name it with --arch"):
        load_checkpoint(path)
    with pytest.raises(ModelError, match=r"tensors are missing \(first: .*unexpected \(first: .*right --arch"):
        load_checkpoint(path, arch="test_vit")
    with pytest.raises(ModelError, match="neither a timm model nor module:factory; did you mean 'test_resnet'"):
        load_checkpoint(path, arch="test_resnet1")
    with pytest.raises(ModelError, match=r"did you mean '.*/model\.safetensors'"):
        load_checkpoint(tmp_path / "modell.safetensors")
    with pytest.raises(ModelError, match="or timm model; did you mean 'resnet18'"):
        load_checkpoint("resnet188")
    with pytest.raises(ModelError, match="its tags are a1_in1k"):
        load_checkpoint("resnet18.a1_in1kk")
    with pytest.raises(ModelError, match="cannot be imported"):
        load_checkpoint(path, arch="no_such_module:net")
    with pytest.raises(ModelError, match="has 3 classes, not 5"):
        load_checkpoint(tmp_path, num_classes=5)
    with pytest.raises(ModelError, match="meta device"):
        load_checkpoint(Tiny().to("meta"))
