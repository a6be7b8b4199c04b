"""Files that are either wholly there or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FACTS = "hf-retarget"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it if the block succeeds and removed if it does not.

    Example:
        >>> with atomic_path("report.json") as temporary:      # doctest: +SKIP
        ...     temporary.write_text("{}")
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)  # mkstemp makes private files; the result should look like any other new file
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and some facts about them as safetensors, the same bytes for the same content.

    Example:
        >>> save_tensors("state.safetensors", {"w": tensor}, {"step": 3})      # doctest: +SKIP
    """
    from safetensors.torch import save_file

    # One entry only: safetensors writes several in an order that changes from process to process.
    metadata = {_FACTS: json.dumps(facts, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; a safetensors file of somebody else has no facts. Raises OSError if it cannot."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            facts = json.loads((file.metadata() or {}).get(_FACTS, "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118  not a dict
    except (SafetensorError, ValueError) as error:
        raise OSError(str(error)) from error


def hash_file(path: Path) -> str:
    """The sha256 of a file.

    Example:
        >>> hash_file(Path("tuned/model.safetensors"))      # doctest: +SKIP
        '9f86d0818…'
    """
    with Path(path).open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def hash_tensors(weights: Mapping[str, Tensor]) -> str:
    """The sha256 of names, dtypes, shapes and numbers, for weights that are in no file.

    Example:
        >>> import torch
        >>> hash_tensors({"w": torch.zeros(2)}) == hash_tensors({"w": torch.zeros(3)})
        False
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
