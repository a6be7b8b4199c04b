"""Bytes of the Hub are those that the Hub names: on download, and from the cache."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path

import huggingface_hub.constants
import pytest
import timm
import torch
from loopback_hub import Fault, Hub
from PIL import Image

import hf_retarget as rt
from hf_retarget.data import Preprocess, load_data
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.recipe.options import DataOptions


@pytest.fixture
def net(connected: Hub, tmp_path: Path) -> Hub:
    """A Hub with one model."""
    model = timm.create_model("test_resnet", num_classes=3)
    folder = save_model(tmp_path / "net", model.state_dict(), load_checkpoint(model))
    connected.repository("org/net", {path.name: path for path in folder.iterdir()})
    return connected


def cached(name: str, repository: str = "models--org--net") -> Path:
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / repository / "snapshots"
    return next(folder.rglob(name))


def damage(path: Path) -> None:
    blob = Path(os.path.realpath(path))
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_byte_that_changed_on_the_way(net: Hub, name):
    route = "download" if name.startswith("model") else "resolve"
    net.inject(Fault(route, "GET", flip=200))
    checkpoint = load_checkpoint("org/net")
    assert torch.equal(checkpoint.weights["fc.bias"], load_checkpoint("org/net").weights["fc.bias"])
    net.faults.clear()
    again = load_checkpoint("org/net")
    assert (again.hashes, again.revision) == (checkpoint.hashes, checkpoint.revision)


def test_a_byte_that_changes_each_time_is_refused_and_not_kept(net: Hub):
    net.inject(Fault("download", "GET", flip=200_000, times=None))
    with pytest.raises(rt.ModelError, match=r"'model\.safetensors' of 'org/net' does not have the hash"):
        load_checkpoint("org/net")
    net.faults.clear()
    assert load_checkpoint("org/net").hashes, "nothing broken stays in the cache"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_byte_that_changed_in_the_cache(net: Hub, name, monkeypatch):
    first = load_checkpoint("org/net")
    whole = {key: tensor.clone() for key, tensor in first.weights.items()}  # the others are those of the file itself
    damage(cached(name))
    again = load_checkpoint("org/net")
    assert again.hashes == first.hashes
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in whole.items())
    damage(cached(name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(rt.ModelError, match=f"copy of '{name}' of 'org/net' was damaged and has been removed"):
        load_checkpoint("org/net")


def test_only_what_was_compared_is_recorded(net: Hub):
    hashes = load_checkpoint("org/net").hashes
    assert list(hashes) == ["model.safetensors"]
    path = cached("model.safetensors")
    blob = Path(os.path.realpath(path))
    path.unlink()
    path.write_bytes(blob.read_bytes())  # as on a file system without links: the cache does not tell the hash
    assert load_checkpoint("org/net").hashes == {}


def test_a_dataset_with_a_changed_byte(hub: Hub, tmp_path):
    import datasets

    pictures = [Image.new("L", (8, 8), shade) for shade in range(60)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": pictures, "label": [number % 2 for number in range(60)]}
    buffer = BytesIO()
    datasets.Dataset.from_dict(rows, features).to_parquet(buffer)
    hub.repository("ada/shades", {"train.parquet": buffer.getvalue()}, kind="dataset")
    code = """
    import datasets
    from hf_retarget.data import Preprocess, load_data
    from hf_retarget.recipe.options import DataOptions
    datasets.disable_progress_bars()
    gray = Preprocess.of({"input_size": (1, 8, 8)})
    def load():
        return load_data("ada/shades", DataOptions(), gray).fingerprint
    try:
        answer(load())
    except Exception as error:
        answer(type(error).__name__ + ": " + str(error))
    """
    whole = hub.client(home=tmp_path / "whole").ask(code)
    place = buffer.getvalue().index(b"IDAT") + 8  # inside a picture: parquet itself does not notice
    hub.inject(Fault("download", "GET", flip=place))
    assert hub.client(home=tmp_path / "once").ask(code) == whole
    hub.inject(Fault("download", "GET", flip=place, times=None))
    refused = hub.client(home=tmp_path / "always").ask(code)
    assert refused.startswith("DataError: ")
    assert "do not have the hashes given by the Hub" in refused


def test_pictures_of_a_python_dataset_may_lie_anywhere(tmp_path):
    import datasets

    for number in range(40):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    rows = {"image": [str(tmp_path / f"{number}.png") for number in range(40)], "label": [n % 2 for n in range(40)]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    found = load_data(table, DataOptions(), Preprocess.of({"input_size": (1, 8, 8)}))
    assert len(next(iter(found.train.batches(4)))[0]) == 4
    assert json.dumps(found.notes).find(str(tmp_path)) == -1
