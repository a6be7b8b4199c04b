"""Models on the Hub: one commit for all files, the cache when offline, and what each refusal means."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from hf_retarget.errors import ModelError
from hf_retarget.models import load_checkpoint
from hf_retarget.models.hub import split_revision


def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("reference", ["org/net", "hf-hub:org/net", "org/net@v1"])
def test_all_files_come_from_one_commit(tmp_path, save, file_hub, reference):
    folder = save(tmp_path / "saved", num_classes=4)
    file_hub.add("org/net", folder)
    checkpoint = load_checkpoint(reference)
    assert checkpoint.reference == reference
    assert checkpoint.revision == file_hub.commit
    assert torch.equal(checkpoint.weights["fc.weight"], load_file(folder / "model.safetensors")["fc.weight"])
    weights = [path for path in file_hub.asked if path.endswith("model.safetensors")]
    assert weights
    assert all(f"/resolve/{file_hub.commit}/" in path for path in weights), "the weights were asked for by branch"


def test_what_was_loaded_once_is_there_when_offline(tmp_path, save, file_hub, monkeypatch):
    file_hub.add("org/net", save(tmp_path / "saved", num_classes=4))
    online = load_checkpoint("org/net")
    offline(monkeypatch)
    again = load_checkpoint("org/net")
    assert (again.revision, again.hashes) == (online.revision, online.hashes)
    with pytest.raises(ModelError, match="hf download org/other"):
        load_checkpoint("org/other")
    with pytest.raises(ModelError, match="not in the cache"):
        load_checkpoint("test_vit.r160_in1k")


def test_a_name_of_timm(tmp_path, save, file_hub):
    file_hub.add("timm/test_resnet.r160_in1k", save(tmp_path / "saved"))
    checkpoint = load_checkpoint("test_resnet.r160_in1k")
    assert (checkpoint.architecture, checkpoint.num_classes) == ("test_resnet", 1000)
    assert checkpoint.config["license"] == timm.get_pretrained_cfg("test_resnet").license
    assert checkpoint.config["tag"] == "r160_in1k"
    assert checkpoint.revision == file_hub.commit
    assert load_checkpoint("test_resnet").hashes == checkpoint.hashes


def test_shards_and_pickles(tmp_path, save, file_hub):
    folder = save(tmp_path / "saved", num_classes=4)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    file_hub.add("org/pickle", folder)
    with pytest.raises(ModelError, match="only as a pickle"):
        load_checkpoint("org/pickle")
    found = load_checkpoint("org/pickle", allow_pickle=True)
    assert torch.equal(found.weights["fc.weight"], weights["fc.weight"])
    save_file(weights, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file_hub.add("org/shards", folder)
    assert set(load_checkpoint("org/shards").hashes) == {"part.safetensors"}
    del file_hub.files["org/shards/config.json"]
    file_hub.commit = "f" * 40
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_checkpoint("org/shards")


def test_an_offline_pickle_is_named_as_such(tmp_path, save, file_hub, monkeypatch):
    folder = save(tmp_path / "saved", num_classes=4)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    file_hub.add("org/pickle", folder)
    load_checkpoint("org/pickle", allow_pickle=True)
    offline(monkeypatch)
    with pytest.raises(ModelError, match="only as a pickle"):
        load_checkpoint("org/pickle")


def test_refusals(tmp_path, save, file_hub):
    file_hub.add("org/net", save(tmp_path / "saved", num_classes=4))
    with pytest.raises(ModelError, match="no model 'org/nett' on the Hub"):
        load_checkpoint("org/nett")
    with pytest.raises(ModelError, match="no revision 'v9'"):
        load_checkpoint("org/net@v9")
    with pytest.raises(ModelError, match="nor a name the Hub could have"):
        load_checkpoint("org/-net-")
    file_hub.refuse = "GatedRepo"
    with pytest.raises(ModelError, match="is gated"):
        load_checkpoint("org/net")


def test_weights_in_an_older_form_are_read_as_timm_reads_them(tmp_path, save):
    """A vision transformer for 64 pixels under a configuration for 32: timm resizes its position table."""
    folder = save(tmp_path, "test_vit", num_classes=3, img_size=64)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = {"img_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(folder)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    assert checkpoint.weights["pos_embed"].shape != load_file(folder / "model.safetensors")["pos_embed"].shape
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in theirs.items())


def test_revisions_are_split_off():
    assert split_revision("hf-hub:org/net@refs/pr/1") == ("org/net", "refs/pr/1")


def test_what_timm_would_fill_with_random_numbers_is_refused(tmp_path, save):
    """timm drops a first convolution of four channels if the model has five, and says so only in its log."""
    folder = save(tmp_path, num_classes=3, in_chans=4)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = {"in_chans": 5}
    (folder / "config.json").write_text(json.dumps(config))
    timm.create_model(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(ModelError, match=r"1 tensor has another shape \(conv1\.0\.weight is \[\d+, 4, 3, 3\], not"):
        load_checkpoint(folder)
