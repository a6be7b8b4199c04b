"""Models on the Hub: one commit for all files, the cache when offline, and the meaning of each refusal."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
import timm
import torch
from loopback_hub import Fault
from safetensors.torch import load_file, save_file

from hf_retarget.errors import ModelError
from hf_retarget.models import load_checkpoint
from hf_retarget.models.hub import split_revision


def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("reference", ["org/net", "hf-hub:org/net", "org/net@v1"])
def test_all_files_come_from_one_commit(tmp_path, save, connected, files, reference):
    folder = save(tmp_path / "saved", num_classes=4)
    repository = connected.repository("org/net", files(folder))
    commit = repository.refs["refs/heads/main"]
    repository.update(refs=repository.refs | {"refs/tags/v1": commit})
    checkpoint = load_checkpoint(reference)
    assert checkpoint.reference == reference
    assert (checkpoint.hub_id, checkpoint.revision) == ("org/net", commit)
    assert torch.equal(checkpoint.weights["fc.weight"], load_file(folder / "model.safetensors")["fc.weight"])
    weights = [each.path for each in connected.log.of("resolve") if each.path.endswith("model.safetensors")]
    assert weights
    assert all(f"/resolve/{commit}/" in path for path in weights), "the weights were requested by branch"


def test_downloaded_models_are_available_offline(tmp_path, save, connected, files, monkeypatch):
    connected.repository("org/net", files(save(tmp_path / "saved", num_classes=4)))
    online = load_checkpoint("org/net")
    with connected.down():
        assert load_checkpoint("org/net").revision == online.revision
    offline(monkeypatch)
    again = load_checkpoint("org/net")
    assert (again.revision, again.hashes) == (online.revision, online.hashes)
    with pytest.raises(ModelError, match="hf download org/other"):
        load_checkpoint("org/other")
    with pytest.raises(ModelError, match="not in the cache"):
        load_checkpoint("test_vit.r160_in1k")


def test_a_timm_name_is_resolved(tmp_path, save, connected, files):
    repository = connected.repository("timm/test_resnet.r160_in1k", files(save(tmp_path / "saved")))
    checkpoint = load_checkpoint("test_resnet.r160_in1k")
    assert (checkpoint.architecture, checkpoint.num_classes) == ("test_resnet", 1000)
    assert checkpoint.config["license"] == timm.get_pretrained_cfg("test_resnet").license
    assert checkpoint.config["tag"] == "r160_in1k"
    assert checkpoint.revision == repository.refs["refs/heads/main"]
    again = load_checkpoint("test_resnet")
    assert (again.hashes, again.hub_id) == (checkpoint.hashes, "timm/test_resnet.r160_in1k")


def test_shards_and_pickles(tmp_path, save, connected, files):
    folder = save(tmp_path / "saved", num_classes=4)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    connected.repository("org/pickle", files(folder))
    with pytest.raises(ModelError, match="only as a pickle"):
        load_checkpoint("org/pickle")
    found = load_checkpoint("org/pickle", allow_pickle=True)
    assert torch.equal(found.weights["fc.weight"], weights["fc.weight"])
    save_file(weights, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shards = connected.repository("org/shards", files(folder))
    assert set(load_checkpoint("org/shards").hashes) == {"part.safetensors"}
    shards.write({"config.json": None})
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_checkpoint("org/shards")


def test_an_offline_pickle_is_named(tmp_path, save, connected, files, monkeypatch):
    folder = save(tmp_path / "saved", num_classes=4)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    connected.repository("org/pickle", files(folder))
    load_checkpoint("org/pickle", allow_pickle=True)
    offline(monkeypatch)
    with pytest.raises(ModelError, match="only as a pickle"):
        load_checkpoint("org/pickle")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("license: cc-by-4.0", {"license": "cc-by-4.0"}),
        (
            "license: other\nlicense_name: käfer-1\nlicense_link: LICENSE",
            {"license": "käfer-1", "license_link": "LICENSE"},
        ),
        ("tags: [a]", {}),
        ("license: [", {}),
    ],
)
def test_the_licence_comes_from_the_card(tmp_path, save, connected, files, card, licence):
    folder = save(tmp_path / "saved", num_classes=4)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"].pop("license", None)
    (folder / "config.json").write_text(json.dumps(config))
    connected.repository("org/net", {**files(folder), "README.md": f"---\n{card}\n---\n".encode()})
    found = load_checkpoint("org/net").config
    assert {name: found[name] for name in ("license", "license_link") if name in found} == licence


def test_refusals_are_explained(tmp_path, save, connected, files):
    connected.repository("org/net", files(save(tmp_path / "saved", num_classes=4)))
    with pytest.raises(ModelError, match="no model 'org/nett' on the Hub"):
        load_checkpoint("org/nett")
    with pytest.raises(ModelError, match="no revision 'v9'"):
        load_checkpoint("org/net@v9")
    with pytest.raises(ModelError, match="nor a valid Hub id"):
        load_checkpoint("org/-net-")
    with pytest.raises(ModelError, match="does not accept the token"):
        load_checkpoint("org/net", token="hf_wrong")
    connected.repository("org/net", private=True)
    with pytest.raises(ModelError, match="or it is private; check the name, or log in"):
        load_checkpoint("org/net@main", token=False)
    connected.repository("org/net", private=False, gated=True)
    with pytest.raises(ModelError, match="is gated: accept its terms"):
        load_checkpoint("org/net")
    connected.repository("org/net").grant("ada")
    assert load_checkpoint("org/net").num_classes == 4


# ---- a Hub in trouble


TROUBLE = {
    "busy": [Fault("resolve", "HEAD", status=503), Fault("download", status=500)],
    "limited": [Fault("resolve", "HEAD", status=429, headers={"Retry-After": "1"})],
    "cut": [Fault("download", cut_answer=100_000)],
    "reset": [Fault("download", cut_answer=100_000, reset=True)],
    "reset at once": [Fault("resolve", "HEAD", cut_answer=0, reset=True)],
    "lost": [Fault("resolve", "GET", "config", lose_answer=True)],
}


@pytest.mark.parametrize("faults", TROUBLE.values(), ids=TROUBLE)
def test_temporary_failures_are_retried(tmp_path, save, connected, files, faults):
    folder = save(tmp_path / "saved", num_classes=4)
    connected.repository("org/net", files(folder))
    for fault in faults:
        connected.inject(fault)
    checkpoint = load_checkpoint("org/net")
    assert torch.equal(checkpoint.weights["fc.weight"], load_file(folder / "model.safetensors")["fc.weight"])
    assert any(each.fault for each in connected.log)


FOR_GOOD = {
    "busy": (Fault("*", status=503, times=None), r"busy or has a fault \(503\).*try again later"),
    "limited": (Fault("*", status=429, headers={"Retry-After": "3600"}, times=None), "asks to wait 3600 s; try again"),
    "reset": (Fault("download", cut_answer=100_000, reset=True, times=None), "no connection .*; try again later"),
    "cut": (Fault("download", cut_answer=100_000, times=None), "no connection .*; try again later"),
    "forbidden": (Fault("resolve", "GET", status=403, times=None), "the Hub denies access to 'org/net'"),
    "forbidden to look": (Fault("resolve", "HEAD", status=403, times=None), "the Hub denies access to 'org/net'"),
    "gone when looked at": (Fault("resolve", "HEAD", status=404, times=None), "404|lacks|no longer|removed"),
    "conflict": (Fault("download", status=409, times=None), "answered 409 for 'org/net': .*; try again later"),
    "full": (Fault("download", status=507, times=None), "answered 507 for 'org/net': .*; there is no room left"),
    "odd wait": (Fault("*", status=429, headers={"Retry-After": "²"}, times=None), "too many requests"),
    "login page": (Fault("*", page=True, times=None), "what answers about 'org/net' is not the Hub"),
    "login page for a look": (Fault("resolve", "HEAD", page=True, times=None), "what answers about 'org/net' is not"),
    "login page for a file": (Fault("resolve", "GET", page=True, times=None), "another size than announced"),
    "login page for weights": (Fault("download", "GET", page=True, times=None), "another size than announced"),
}


@pytest.mark.parametrize(("fault", "message"), FOR_GOOD.values(), ids=FOR_GOOD)
def test_permanent_failures_give_one_line_and_an_intact_cache(
    tmp_path, save, connected, files, fault, message, monkeypatch
):
    monkeypatch.setenv("HF_RETARGET_HUB_PATIENCE", "1")
    connected.repository("org/net", files(save(tmp_path / "saved", num_classes=4)))
    connected.inject(fault)
    with pytest.raises(ModelError, match=message) as caught:
        load_checkpoint("org/net")
    assert "\n" not in str(caught.value)
    connected.faults.clear()
    assert load_checkpoint("org/net").num_classes == 4
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_an_unreachable_hub_is_reported(connected, monkeypatch):
    monkeypatch.setenv("HF_RETARGET_HUB_PATIENCE", "1")
    with connected.down(), pytest.raises(ModelError, match=r"no connection .*; try again later"):
        load_checkpoint("org/net")


def test_weights_in_an_older_format_are_read_like_timm_does(tmp_path, save):
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


def test_weights_that_timm_would_replace_by_random_ones_are_refused(tmp_path, save):
    """timm drops a first convolution of four channels if the model has five, and says so only in its log."""
    folder = save(tmp_path, num_classes=3, in_chans=4)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = {"in_chans": 5}
    (folder / "config.json").write_text(json.dumps(config))
    timm.create_model(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(ModelError, match=r"1 tensor has another shape \(conv1\.0\.weight is \[\d+, 4, 3, 3\], not"):
        load_checkpoint(folder)
