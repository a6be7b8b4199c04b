"""Folders of tiny language models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_lm import save_trio


@pytest.fixture
def trio(tmp_path: Path) -> dict[str, Path]:
    """An old base, a tuned model and a new base: Llamas in float32."""
    return save_trio(tmp_path)
