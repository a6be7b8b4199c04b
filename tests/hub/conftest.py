"""Who asks the Hub, and what they push."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback_hub import Client, Hub


@pytest.fixture
def ada(hub: Hub) -> Client:
    return hub.client(token="hf_ada_write")


@pytest.fixture
def anonymous(hub: Hub, tmp_path: Path) -> Client:
    return hub.client(home=tmp_path / "anonymous")


@pytest.fixture
def bob(hub: Hub, tmp_path: Path) -> Client:
    return hub.client(token=hub.add_user("bob").token, home=tmp_path / "bob")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "sub").mkdir(parents=True)
    (made / "README.md").write_text("---\nlicense: mit\ntags: [Grüße]\n---\n# Äpfel 🍏\n")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 2000)
    (made / "sub" / "notes.txt").write_text("regular")
    (made / "empty.bin").write_bytes(b"")
    return made
