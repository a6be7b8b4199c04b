"""Finished work: a folder for each piece, with a key of its inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_retarget.files import atomic_path, hash_tensors

DONE = "done.json"


@dataclass(frozen=True)
class Kept:
    """A folder for a piece of work; done.json is written last, so unfinished work is never mistaken for finished."""

    folder: Path

    def read(self, key: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The result; None if it is unfinished or was made from other inputs."""
        path = self.folder / DONE
        if not path.exists():
            return None
        done: dict[str, Any] = json.loads(path.read_text("utf-8"))
        same = key is None or done["key"] == json.loads(json.dumps(key))
        return done if same else None

    def begin(self) -> Path:
        """Create an empty folder to work in."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self.folder

    def finish(self, key: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the result."""
        done = {"key": dict(key), **facts}
        with atomic_path(self.folder / DONE) as temporary:
            temporary.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return done


def short_hash(weights: Mapping[str, Tensor]) -> str:
    """A short hash of weights."""
    return hash_tensors(dict(weights))[:16]
