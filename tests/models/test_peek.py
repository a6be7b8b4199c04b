"""A peeked checkpoint has all facts of the checkpoint except the numbers."""

from __future__ import annotations

import json

import pytest
import timm
import torch
import transformers
from loopback_hub import Hub

from hf_retarget.errors import ModelError
from hf_retarget.models import compare_checkpoints, list_differences, load_checkpoint, peek_checkpoint

VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
VIT |= {"image_size": 16, "patch_size": 8, "num_labels": 3}


def assert_alike(peeked, loaded):
    assert all(tensor.is_meta for tensor in peeked.weights.values())
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in peeked.weights.items()]
    assert described == [(name, tensor.shape, tensor.dtype) for name, tensor in loaded.weights.items()]
    for name in ("reference", "architecture", "library", "options", "num_classes", "labels", "config", "dtype"):
        assert getattr(peeked, name) == getattr(loaded, name), name
    assert compare_checkpoints(peeked, peeked, peeked) == compare_checkpoints(loaded, loaded, loaded)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_resnet", {"in_chans": 1}),
        ("test_vit", {"img_size": 32}),
        ("test_efficientnet", {"half": True}),
    ],
)
def test_timm_models(tmp_path, save, name, options):
    save(tmp_path, name, num_classes=3, labels=["a", "b", "c"], **options)
    assert_alike(peek_checkpoint(tmp_path).checkpoint, load_checkpoint(tmp_path))
    assert peek_checkpoint(tmp_path).download == 0


def test_weights_in_an_older_format(tmp_path, save):
    folder = save(tmp_path, "test_vit", num_classes=3, img_size=64)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_args": {"img_size": 32}}))
    assert_alike(peek_checkpoint(folder).checkpoint, load_checkpoint(folder))


def test_files_modules_and_transformers_models(tmp_path, save):
    path = save(tmp_path / "timm", num_classes=3) / "model.safetensors"
    assert_alike(peek_checkpoint(path, arch="test_resnet").checkpoint, load_checkpoint(path, arch="test_resnet"))
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "a.pth")
    given = {"arch": "test_resnet", "allow_pickle": True}
    peeked, loaded = (
        peek_checkpoint(tmp_path / "a.pth", **given).checkpoint,
        load_checkpoint(tmp_path / "a.pth", **given),
    )
    assert_alike(peeked, loaded)
    assert peeked.hashes == {}
    model = timm.create_model("test_resnet", num_classes=3)
    assert peek_checkpoint(model).checkpoint.num_classes == 3
    transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).save_pretrained(tmp_path / "vit")
    assert_alike(peek_checkpoint(tmp_path / "vit").checkpoint, load_checkpoint(tmp_path / "vit"))


def test_differences_are_listed(save, tmp_path):
    base, tuned = (peek_checkpoint(save(tmp_path / str(classes), num_classes=classes)).checkpoint for classes in (5, 3))
    found = {each.name: each for each in list_differences(base, tuned, base)}
    assert set(found) == {"fc.weight", "fc.bias"}
    assert (found["fc.bias"].source, found["fc.bias"].tuned, found["fc.bias"].head) == ((5,), (3,), True)
    assert list_differences(base, base, base) == ()


def test_mismatches_are_named(tmp_path, save):
    folder = save(tmp_path, num_classes=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_classes": 4}))
    with pytest.raises(ModelError, match=r"fc\.weight is \[3, \d+\], not \[4, \d+\]"):
        peek_checkpoint(folder)


def test_transformers_on_the_hub(hub: Hub, tmp_path):
    transformers.logging.set_verbosity_error()
    transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).save_pretrained(tmp_path / "vit")
    processor = {"size": {"height": 16, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    hub.repository("ada/vit", {path.name: path for path in (tmp_path / "vit").iterdir()})
    hub.repository("ada/bare", {name: tmp_path / "vit" / name for name in ("config.json", "model.safetensors")})
    code = """
    import huggingface_hub.constants
    from hf_retarget.models import load_checkpoint, peek_checkpoint
    bare = load_checkpoint("ada/bare").config
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    assert load_checkpoint("ada/bare").config == peek_checkpoint("ada/bare").checkpoint.config == bare
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    peeked = peek_checkpoint("ada/vit")
    loaded = load_checkpoint("ada/vit@main")
    shapes = [{name: list(each.shape) for name, each in side.weights.items()} for side in (peeked.checkpoint, loaded)]
    sides = [[side.library, side.config["mean"], side.revision] for side in (peeked.checkpoint, loaded)]
    answer([sides, shapes[0] == shapes[1], peeked.download, peek_checkpoint("ada/vit").download])
    """
    sides, same, download, again = hub.client().ask(code)
    commit = hub.repository("ada/vit").resolve("main").oid
    assert sides == [["transformers", [0.1, 0.2, 0.3], commit]] * 2
    assert same
    assert download == (tmp_path / "vit" / "model.safetensors").stat().st_size
    assert again == 0, "it is in the cache by now"
