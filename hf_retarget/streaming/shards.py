"""The weight files of a streamed port, written while their numbers are computed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from hf_retarget.errors import PortError
from hf_retarget.files import atomic_path, write_json
from hf_retarget.models.weights import FLOATS, INDEX
from hf_retarget.names import MODEL_CONFIG
from hf_retarget.streaming.repository import Repository
from hf_retarget.streaming.sums import Sum
from hf_retarget.words import size

LARGEST = 5_000_000_000
"""Maximum bytes of a file, unless a single tensor is larger; less if the shards of the new base are smaller."""


def plan_shards(sums: Iterable[Sum], like: Repository) -> dict[str, list[Sum]]:
    """Divide the tensors into files; timm reads only a single file."""
    known = {each.name: each for each in sums}
    most = LARGEST
    if like.library == "timm":
        most = sum(each.size for each in known.values())
    elif len(like.files) > 1:
        sizes = (sum(each.size for each in like.tensors.values() if each.path == path) for path in like.files)
        most = min(LARGEST, max(sizes))
    empty = {name: torch.empty(each.size, dtype=torch.uint8, device="meta") for name, each in known.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max(1, most))
    return {file: [known[name] for name in names] for file, names in split.filename_to_tensors.items()}


def check_room(folder: Path, needed: int) -> None:
    """Raise PortError if the disk of a new folder has too little space."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise PortError(
            f"the result takes {size(needed)}, but '{place}' has only {size(free)} left; name another folder"
        )


def write_shard(path: Path, sums: Iterable[Sum], alpha: float, update: float) -> str:
    """Write one file atomically, block by block, and return its sha256."""
    ordered = sorted(sums, key=lambda each: (-_width(each), each.name))  # aligned as safetensors does
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": [end, end := end + each.size]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(start := struct.pack("<Q", len(text)) + text)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(start)
        for each in ordered:
            for block in each.compute(alpha, update):
                content = block.view(torch.uint8).numpy().data
                file.write(content)
                digest.update(content)
    return digest.hexdigest()


def _width(one: Sum) -> int:
    return FLOATS[one.kind].itemsize if one.kind in FLOATS else one.size // max(1, one.numbers)


def merge_adapter(side: Repository, base: Repository, folder: Path) -> None:
    """Write an adapter merged into its base, in the dtype of the base."""
    kinds = {name: base.kind if each.kind in FLOATS else each.kind for name, each in side.tensors.items()}
    sums = [Sum(name, kinds[name], each.shape, (None, each, None), 0, "tuned") for name, each in side.tensors.items()]
    shards = plan_shards(sums, base)
    for file, each in shards.items():
        write_shard(folder / file, each, alpha=1.0, update=1.0)
    write_index(folder, shards)
    write_json(folder / MODEL_CONFIG, side.config)


def write_index(folder: Path, shards: dict[str, list[Sum]]) -> None:
    """Write the index of several shards."""
    if len(shards) > 1:
        places = {each.name: file for file, sums in shards.items() for each in sums}
        total = sum(each.size for sums in shards.values() for each in sums)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
