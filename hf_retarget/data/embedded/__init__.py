"""Datasets that come with the package, so that a demo needs no network; `make.py` made them."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = {"fashion-mnist": Path(__file__).parent / "fashion-mnist"}
"""Name → folder with one parquet file for each split.

Example:
    >>> sorted(path.name for path in EMBEDDED["fashion-mnist"].glob("*.parquet"))
    ['test.parquet', 'train.parquet']
"""
