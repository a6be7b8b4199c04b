"""The two questions every graph test asks: which groups are there, does the check pass? A Hub, models and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from hypothesis import settings
from loopback_hub import Hub
from PIL import Image
from torch import nn

import hf_retarget as rt
from hf_retarget.models import load_checkpoint, save_model

# The same examples in every run, however slow the machine.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("steady")

Verify = Callable[..., rt.PermutationGraph]


def shapes_of(graph: rt.PermutationGraph) -> list[tuple[int, ...]]:
    """The shapes of all groups, sorted: (8,) is a plain group, (3, 4) one of size 4 that varies over 3 blocks."""
    return sorted(group.shape for group in graph)


def verify_graph(
    model: nn.Module, example: Any = None, *, unknown: bool = False, **options: Any
) -> rt.PermutationGraph:
    """Trace and check a model; all operators must be known, or, if so said, at least one must not."""
    graph = rt.trace(model, example)
    names = [str(each) for each in graph.unknown_operators]
    assert bool(names) is unknown, names or "expected an unknown operator"
    result = rt.verify(model, graph, example, **({"controls": None} | options))
    assert result.error <= 1e-8, result.verdict
    assert result.passed, result.verdict
    return graph


@pytest.fixture(scope="session")
def shapes() -> Callable[[rt.PermutationGraph], list[tuple[int, ...]]]:
    return shapes_of


@pytest.fixture(scope="session")
def verify() -> Verify:
    return verify_graph


@pytest.fixture(autouse=True, scope="session")
def _own_assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs that tests keep are kept apart."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("assets"))
        patch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", folder)
        patch.setenv("HF_ASSETS_CACHE", folder)  # for the processes that tests start
        yield


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """An empty Hub on loopback with one user; clients are processes of their own: `hub.client(token=…).python(…)`."""
    with Hub(tmp_path / "hub") as hub:
        hub.add_user("ada")
        yield hub


@pytest.fixture
def connected(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The same Hub for the clients in this process, which have read their settings already: ada's, little patience."""
    settings = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in settings.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    environment = {"HF_TOKEN": "hf_ada_write", "HF_RETARGET_HUB_PATIENCE": "4", "NO_PROXY": "127.0.0.1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield hub
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def _same_weights_in_every_run() -> None:
    torch.manual_seed(0)


# ---- models on disk, and pictures that can be learnt in seconds


COLOURS = ("blue", "green", "red")


def make_folder(folder: Path, name: str, labels: tuple[str, ...] | None = None, **options: Any) -> Path:
    torch.manual_seed(1)
    model = timm.create_model(name, **options)
    return save_model(folder, model.state_dict(), load_checkpoint(model), labels=labels)


def picture(number: int, channel: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 90, (12, 12, 3), dtype=np.uint8)
    pixels[..., channel] += 120
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def colours(tmp_path_factory) -> Path:
    """Blue, green and red pictures: training and test folders."""
    folder = tmp_path_factory.mktemp("colours")
    for split, count in (("train", 20), ("test", 8)):
        for channel, name in enumerate(reversed(COLOURS)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                picture(100 * channel + number, channel).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def gray_resnet(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "gray", "test_resnet", num_classes=7, in_chans=1)


@pytest.fixture(scope="session")
def vit(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "vit", "test_vit", num_classes=3)


@pytest.fixture(scope="session")
def labelled() -> Callable[..., Path]:
    return make_folder
