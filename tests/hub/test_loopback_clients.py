"""The Hub for tests as timm, datasets and a developer use it."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import loopback_hub
import pytest
from loopback_hub import Client, Hub
from PIL import Image


def test_timm_pushes_a_model_and_loads_it(hub: Hub, ada: Client) -> None:
    code = """
    import timm, torch
    from timm.models import push_to_hf_hub
    torch.manual_seed(0)
    made = timm.create_model("test_vit", num_classes=3)
    config = {"label_names": ["Äpfel", "Birnen", "🍒"]}
    push_to_hf_hub(made, "ada/test_vit", model_config=config, safe_serialization=True)
    sha = api.model_info("ada/test_vit").sha
    same = []
    for name in ("hf-hub:ada/test_vit", f"hf-hub:ada/test_vit@{sha}"):
        loaded = timm.create_model(name, pretrained=True)
        pairs = zip(made.state_dict().items(), loaded.state_dict().items(), strict=True)
        same.append(all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs))
    answer([same, loaded.pretrained_cfg["label_names"], loaded.num_classes])
    """
    assert ada.ask(code) == [[True, True], ["Äpfel", "Birnen", "🍒"], 3]
    assert "pytorch_model.bin" not in hub.repository("ada/test_vit").paths()


def picture(shade: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def test_datasets_loads_folders_of_images_and_parquet(hub: Hub) -> None:
    settings = {"token": "hf_ada_write", "USE_TORCH": "0"}  # which would take seconds to import, and is not needed here
    images = {
        f"{split}/{label}/{n}.png": picture(40 * n + shade)
        for split, count in (("train", 3), ("test", 1))
        for shade, label in enumerate(("cat", "dog"))
        for n in range(count)
    }
    hub.repository("ada/pets", images, kind="dataset", private=True)
    code = """
    import datasets
    datasets.disable_progress_bars()
    pets = datasets.load_dataset("ada/pets")
    pets.push_to_hub("ada/parquet", private=True)
    again = datasets.load_dataset("ada/parquet", split="train")
    streamed = next(iter(datasets.load_dataset("ada/parquet", split="test", streaming=True)))
    def shades(rows):
        return [row["image"].getpixel((0, 0))[0] for row in rows]
    sizes, names = {name: len(split) for name, split in pets.items()}, pets["train"].features["label"].names
    answer([sizes, names, shades(pets["train"]), shades(again), again["label"][:], streamed["label"]])
    """
    found = hub.client(**settings).ask(code)
    assert found[0] == {"train": 6, "test": 2}
    assert found[1] == ["cat", "dog"]
    assert found[2] == found[3] == [0, 40, 80, 1, 41, 81]
    assert found[4:] == [[0, 0, 0, 1, 1, 1], 0]
    offline = hub.client(**settings, HF_HUB_OFFLINE="1")
    assert offline.ask('import datasets; answer(len(datasets.load_dataset("ada/parquet", split="train")))') == 6


@pytest.mark.parametrize("name", [each.name for each in pkgutil.walk_packages(loopback_hub.__path__, "loopback_hub.")])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_it_runs_on_its_own_and_keeps_what_it_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loopback_hub", "--root", str(tmp_path / "own"), "--user", "ada:ada-labs"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}

    def serve(code: str, *options: str) -> Any:
        with subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            try:
                users, export = server.stdout.readline(), server.stdout.readline()
                token = re.findall(r"HF_TOKEN=(\w+) writes", users)[0]
                endpoint = re.findall(r"HF_ENDPOINT=(\S+)", export)[0]
                return Client(endpoint, tmp_path / "home", token).ask(code)
            finally:
                server.terminate()

    made, error = serve('answer([api.create_repo("ada-labs/x"), failure(api.whoami)])', "--fault", "whoami=503")
    assert made.endswith("/ada-labs/x")
    assert "503" in error
    assert serve('answer(api.list_repo_files("ada-labs/x"))') == [".gitattributes"]
