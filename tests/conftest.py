"""Pico models and the two questions every graph test asks: which groups are there, does the check pass? And a Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hypothesis import settings
from loopback_hub import Hub
from torch import nn

import hf_retarget as rt

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
