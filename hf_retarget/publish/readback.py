"""Whether the weights on the Hub are those that are here: by loading them from there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_retarget.files import hash_file, load_tensors
from hf_retarget.hub import ask

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def find_difference(api: HfApi, repository: str, commit: str, files: Mapping[str, Path]) -> str | None:
    """Download files of a commit past the cache, load their tensors, and compare the bytes: the first that differs."""
    for name, path in files.items():
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
            got = Path(ask(lambda: _download(api, repository, name, commit, place)))  # noqa: B023  called at once
            if hash_file(got) != hash_file(path):
                return name
            if got.suffix == ".safetensors" and not _loads(got):
                return name
    return None


def _download(api: HfApi, repository: str, name: str, commit: str, place: str) -> str:
    return str(api.hf_hub_download(repository, name, revision=commit, cache_dir=place))


def _loads(path: Path) -> bool:
    try:
        return bool(load_tensors(path)[0])
    except OSError:
        return False
