"""A verified graph is not derived again unless something it depends on has changed."""

from __future__ import annotations

import pytest
import torch

import hf_retarget as rt
from hf_retarget.graph import verify as module
from hf_retarget.graph.verify import keep_graph, recall_graph
from hf_retarget.models import load_checkpoint, random_model, save_model
from hf_retarget.porting import inputs
from hf_retarget.porting.inputs import trace_model

KEY = {"architecture": "test_resnet"}
SIZE = (3, 32, 32)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    return random_model("test_resnet")


@pytest.fixture
def no_trace(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it was traced again")

    return lambda: monkeypatch.setattr(inputs, "trace", refuse)


def test_a_cached_graph_is_not_traced_again(model, no_trace):
    first = trace_model(model, SIZE, key=KEY)
    no_trace()
    again = trace_model(model, SIZE, key=KEY)
    assert again.graph == first.graph
    assert again.graph.fingerprint == first.graph.fingerprint
    assert again.verification == first.verification
    assert again.verification.passed


@pytest.mark.parametrize("change", ["key", "size", "rules", "no check", "no key"])
def test_any_other_key_is_traced(model, no_trace, monkeypatch, change):
    trace_model(model, SIZE, key=KEY)
    no_trace()
    if change == "rules":
        monkeypatch.setattr(module, "_hash_rules", lambda: "others")
    key = {"key": {"architecture": "other"}, "no key": None}.get(change, KEY)
    size = (3, 64, 64) if change == "size" else SIZE
    with pytest.raises(AssertionError, match="traced again"):
        trace_model(model, size, key=key, check=change != "no check")


@pytest.mark.parametrize("name", ["graph.json", "verification.json"])
def test_a_changed_byte_is_detected(model, tmp_path, name):
    graph = trace_model(model, SIZE, key=KEY).graph
    path = next(tmp_path.rglob(name))
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert trace_model(model, SIZE, key=KEY).graph == graph


def test_nothing_is_cached_in_a_read_only_place(model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    traced = trace_model(model, SIZE, key=KEY)
    assert traced.verification.passed
    keep_graph(KEY, traced.graph, traced.verification)
    assert recall_graph(KEY) is None


def test_a_port_with_a_cached_graph_is_identical(tmp_path, monkeypatch, labelled, colours):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    sides = []
    for number, name in enumerate(("old", "tuned", "new")):
        checkpoint = load_checkpoint(labelled(tmp_path / f"first {name}", "test_resnet", num_classes=3))
        torch.manual_seed(number)
        changed = {key: each + 0.1 * torch.rand_like(each) if each.ndim > 1 else each
                   for key, each in checkpoint.weights.items()}  # fmt: skip
        sides.append(save_model(tmp_path / name, changed, checkpoint))
    overrides = {"port.method": "fgmt", "port.steps": 2, "port.grad_batches": 1, "port.batch_size": 8}
    overrides |= {"port.control": "none", "data.image_size": 32}
    files = []
    for name in ("one", "two"):
        rt.port(*sides, colours, overrides=overrides, out=tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert len(list((tmp_path / "assets").rglob("graph.json"))) == 1
