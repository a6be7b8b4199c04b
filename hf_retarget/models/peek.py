"""A checkpoint without its numbers: what a model is, before its weights are downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.header import read_headers
from hf_retarget.models.hub import peek_model
from hf_retarget.models.load import load_checkpoint
from hf_retarget.models.read import read_weights
from hf_retarget.models.tensors import without_numbers


@dataclass(frozen=True, eq=False)
class Peeked:
    """One side of a port, as far as headers and configurations tell."""

    checkpoint: Checkpoint
    """Its weights are on the meta device: names, shapes and types."""
    download: int
    """Bytes of weights that would have to be downloaded; 0 if they are on this machine."""


def peek_checkpoint(
    reference: str | Path | nn.Module, *, arch: str | None = None, allow_pickle: bool = False, token: str | None = None
) -> Peeked:
    """Read what a model is from its configuration and the headers of its weights, and check that they fit."""
    with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
        access = _Headers(Path(place))
        found = load_checkpoint(reference, arch=arch, allow_pickle=allow_pickle, token=token, access=access)
    return Peeked(replace(found, weights=without_numbers(found.weights)), sum(access.downloads))


@dataclass(frozen=True)
class _Headers:
    """Weights without their numbers; models on the Hub get a folder each, with a hole where the numbers would be."""

    place: Path
    downloads: list[int] = field(default_factory=list)

    def fetch(
        self, repository: str, revision: str | None, *, config: bool, allow_pickle: bool, token: str | None
    ) -> tuple[Path, str | None]:
        """Configuration and headers."""
        commit, size = peek_model(
            repository, revision, config=config, allow_pickle=allow_pickle, place=self.place, token=token
        )
        self.downloads.append(size)
        return self.place, commit

    def read(self, files: Iterable[Path], *, allow_pickle: bool) -> dict[str, Tensor]:
        """Names, shapes and types; a pickle has no header, and is read as a whole."""
        paths = list(files)
        if all(path.suffix == ".safetensors" for path in paths):
            return read_headers(paths)
        return without_numbers(read_weights(paths, allow_pickle=allow_pickle))

    def hash(self, files: Iterable[Path]) -> dict[str, str]:
        """Nothing is read that could be hashed."""
        return {}
