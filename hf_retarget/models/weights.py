"""Weights: finding and reading their files, and fitting them to a model. Pickles only on request."""

from __future__ import annotations

import argparse
import math
import pickle
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_retarget.errors import ModelError
from hf_retarget.files import load_tensors
from hf_retarget.untrusted import MAX_CONFIG_BYTES, parse_json, read_json

SAFE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *PICKLES)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their names in safetensors, without 8-bit floats, which mean nothing without their scales."""
KINDS = {str(dtype).removeprefix("torch."): kind for kind, dtype in FLOATS.items()}
"""Names in safetensors by names in torch."""

_AVERAGED = ("state_dict_ema", "model_ema")
_WRAPPERS = (*_AVERAGED, "state_dict", "model", "model_state_dict")
"""Keys under which training scripts store the weights; averaged weights first, as in timm."""
_PREFIXES = ("module.", "_orig_mod.", "timm_model.", "model.")
"""Prefixes of DistributedDataParallel, torch.compile, transformers and Lightning."""
_COUNTER = "num_batches_tracked"


# ---- tensors


def fits(tensor: Tensor, place: Tensor | None) -> bool:
    """Whether a tensor has the shape of `place`."""
    return place is not None and place.shape == tensor.shape


def most_common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most floating-point values.

    Example:
        >>> most_common_dtype({"w": torch.zeros(9, dtype=torch.float16), "b": torch.zeros(3)})
        torch.float16
    """
    numbers: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] += tensor.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


def find_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or infinite value, or None.

    Example:
        >>> find_not_finite({"w": torch.tensor([1.0]), "b": torch.tensor([float("nan")])})
        'b'
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():  # the shape of an empty tensor may overflow
            wide = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit floats have no `isfinite`
            if not wide.isfinite().all():
                return name
    return None


def without_numbers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the meta device: names, shapes and types only."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's random numbers within the block, and restore their state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed other devices, for good
        yield


# ---- files


@dataclass(frozen=True)
class Stored:
    """The content of weight files."""

    weights: dict[str, Tensor]
    """In their stored dtypes."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the training script and `arch`, if it saved them with the weights."""
    notes: tuple[str, ...] = ()


def weight_files(folder: Path, where: str, *, allow_pickle: bool = False) -> list[Path]:
    """The weight files of a folder: a single one, the shards of an index, or, on request, a pickle."""
    if (folder / SAFE).is_file():
        return [folder / SAFE]
    if (folder / INDEX).is_file():
        return _find_shards(folder / INDEX)
    safe = sorted(folder.glob("*.safetensors"))
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if len(safe) == 1:
        return safe
    if allow_pickle and pickles:
        return [folder / PICKLE] if (folder / PICKLE) in pickles else pickles[:1]
    if len(safe) > 1:
        raise ModelError(
            f"'{where}' holds several weight files ({', '.join(path.name for path in safe[:3])} …) and no {SAFE}; "
            "name one of them, with --arch"
        )
    if pickles:
        raise ModelError(pickle_only(where, pickles[0].name))
    raise ModelError(f"'{where}' holds no weights: there is no {SAFE} in it")


def pickle_only(where: str, name: str, arch: str | None = None) -> str:
    """The message for weights that are refused because unpickling could run code, with the command to convert them."""
    return (
        f"'{where}' has its weights only as a pickle ('{name}'), which can run code when it is loaded; allow it with "
        f"--allow-pickle (only tensors and plain values are read), or convert it once: {convert_command(where, arch)}"
    )


def convert_command(where: str, arch: str | None = None) -> str:
    """The command that converts a pickle."""
    name = Path(where.rpartition(":")[2].partition("@")[0]).name
    name = next((name[: name.index(each)] for each in PICKLES if each in name), name)
    extra = ["--arch", arch] if arch else []
    return shlex.join(["hf-retarget", "convert", where, f"{name}-safetensors", "--allow-pickle", *extra])


def shard_names(index: Path) -> list[str]:
    """The files listed in a model.safetensors.index.json, sorted; only files beside it are accepted."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"'{index}' cannot be read: {type(error).__name__}: {error}") from error
    if not names:
        raise ModelError(f"'{index}' names no files; copy or download it again")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"'{index}' names '{name}', which is not a safetensors file beside it; correct it")
    return names


def _find_shards(index: Path) -> list[Path]:
    """The shards of an index, checked to exist and to hold the tensors it lists."""
    files, placed = [index.parent / name for name in shard_names(index)], read_json(index)["weight_map"]
    for path in files:
        if not path.is_file():
            raise ModelError(
                f"'{index.parent}' lacks '{path.name}', which its {INDEX} lists; copy or download it again"
            )
        named = {name for name, file in placed.items() if file == path.name}
        if differing := sorted(named.symmetric_difference(find_tensors([path]))):
            where = "the index" if differing[0] in named else "the shard"
            raise ModelError(
                f"'{index}' and '{path.name}' disagree: '{differing[0]}' is only in {where}; "
                "copy or download all of them again, from one commit"
            )
    return files


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file."""

    path: Path
    kind: str
    """The type in safetensors' terms: F32, BF16, I64 …"""
    shape: tuple[int, ...]
    begin: int
    """The offset of its first byte in the file."""
    size: int
    """The number of bytes."""

    @property
    def numbers(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Read `count` elements from `start`, in their stored type; bytes if the type is not among `FLOATS`."""
        kind = FLOATS.get(self.kind, torch.uint8)
        count = self.size // kind.itemsize - start if count is None else count
        buffer = bytearray(count * kind.itemsize)
        with self.path.open("rb", buffering=0) as file:  # a mapped file would count towards the process's memory
            file.seek(self.begin + start * kind.itemsize)
            if file.readinto(buffer) != len(buffer):
                raise ModelError(f"'{self.path}' is cut off; copy or download it again")
        return torch.frombuffer(buffer, dtype=kind) if buffer else torch.empty(0, dtype=kind)


def find_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, according to their headers."""
    found = {}
    for path in files:
        try:
            if path.exists() and not path.is_file():  # opening a pipe would block
                raise ValueError("it is not a regular file")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > MAX_CONFIG_BYTES:
                    raise ValueError(
                        f"its header would have {length:,} bytes, and at most {MAX_CONFIG_BYTES:,} are read"
                    )
                with safe_open(str(path), "pt"):  # checks that the file is complete and fits its header
                    pass
                header = parse_json(file.read(length).decode())
        except (OSError, ValueError, SafetensorError) as error:
            raise not_whole(path, error) from error
        header.pop("__metadata__", None)
        for name, each in header.items():
            start, end = each["data_offsets"]
            found[name] = StoredTensor(path, each["dtype"], tuple(each["shape"]), 8 + length + start, end - start)
    return found


def not_whole(path: Path, error: Exception) -> ModelError:
    """The error for a file that safetensors cannot read."""
    return ModelError(f"'{path}' is not a whole safetensors file: {error}; was it cut off? Copy or download it again")


def read_weights(files: Collection[Path], *, allow_pickle: bool = False, numbers: bool = True) -> Stored:
    """Read all tensors of some files in their stored dtypes; without `numbers`, on the meta device."""
    stored, weights = Stored({}), dict[str, Tensor]()
    for path in files:
        if not path.is_file():
            raise ModelError(f"the weights '{path}' are missing")
        safe = path.suffix == ".safetensors"
        try:
            if safe:
                find_tensors([path])  # refuses duplicate names, which safetensors accepts
            stored = Stored(load_tensors(path)[0]) if safe else _read_pickle(path, allow_pickle)
        except OSError as error:
            raise not_whole(path, error) from error
        if (numbers or not safe) and (broken := find_not_finite(stored.weights)):
            raise ModelError(f"'{broken}' in '{path}' holds NaN or infinite values; use another checkpoint")
        weights |= stored.weights if numbers else without_numbers(stored.weights)
    if not weights:
        raise ModelError(f"there are no tensors in {', '.join(path.name for path in files) or 'the weights'}")
    return replace(stored, weights=weights)  # notes and arguments only occur with a single file


def _read_pickle(path: Path, allowed: bool) -> Stored:
    if not allowed:
        raise ModelError(pickle_only(str(path), path.name))
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of timm's train.py
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        fact = str(error).partition("\n")[0].partition(". ")[0]  # torch goes on to advise loading it unsafely
        raise ModelError(
            f"'{path}' cannot be read as a pickle of tensors: {fact}; save only model.state_dict()"
        ) from error
    weights = _unwrap(content)
    if not weights:
        raise ModelError(f"'{path}' holds no state dict; save model.state_dict(), as safetensors if possible")
    arguments = vars(given) if isinstance(given := content.get("args"), argparse.Namespace) else {}
    taken = next((name for name in _AVERAGED if isinstance(content.get(name), Mapping) and content[name]), None)
    notes = [f"'{path.name}' also holds averaged weights, which are used ({taken})"] if taken else []
    return Stored(weights, {**arguments, "arch": content.get("arch")}, tuple(notes))


def _unwrap(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    for wrapper in _WRAPPERS:
        if isinstance(inner := content.get(wrapper), Mapping) and inner:
            return _unwrap(inner)
    return {
        name: value.detach() for name, value in content.items() if isinstance(value, Tensor) and isinstance(name, str)
    }


def write_hollow(path: Path, header: bytes) -> int:
    """Write a sparse file with a header and no values, which takes no space on disk; return its size."""
    entries = parse_json(header[8:].decode())
    ends = [each["data_offsets"][1] for name, each in entries.items() if name != "__metadata__"]
    with path.open("wb") as file:
        file.write(header)
        return file.truncate(len(header) + max(ends, default=0))


# ---- fitting to a model


def strip_prefixes(weights: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """Remove prefixes that all names share, unless the model has them, too.

    Example:
        >>> list(strip_prefixes({"module.fc.bias": torch.zeros(2)}, ["fc.bias"]))
        ['fc.bias']
    """
    stripped = dict(weights)
    while stripped and not any(name in expected for name in stripped):
        prefix = next((each for each in _PREFIXES if all(name.startswith(each) for name in stripped)), None)
        if prefix is None:
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped


def find_odd_numbers(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Describe the first tensor that should be floating-point and is not; None if there is none."""
    for name, place in expected.items():
        if name in weights and place.is_floating_point() and not weights[name].is_floating_point():
            return f"{name} is {weights[name].dtype}, not {place.dtype}".replace("torch.", "")
    return None


def fit_weights(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, advice: str
) -> dict[str, Tensor]:
    """The tensors in the model's order; raise ModelError if names or shapes do not match.

    BatchNorm's counters may be missing: they have no effect, and some formats leave them out.

    Example:
        >>> fit_weights({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "a.pth", "why?")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.ModelError: 'a.pth' does not fit: 1 tensor has another shape (w is [2], not [3]); why?
    """
    counters = {name: torch.zeros_like(place) for name, place in expected.items() if name.endswith(_COUNTER)}
    whole = {**counters, **weights}
    if differing := describe_differences(whole, expected) or find_odd_numbers(whole, expected):
        raise ModelError(f"'{where}' does not fit: {differing}; {advice}")
    return {name: whole[name] for name in expected}


def describe_differences(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Describe how tensors differ from those expected, with the first of each kind; empty if they agree.

    Example:
        >>> describe_differences({"a": torch.zeros(1)}, {"b": torch.zeros(2, 2)})
        '1 tensor is missing (b [2, 2]), 1 tensor is unexpected (a [1])'
    """
    missing = [f"{name} {list(place.shape)}" for name, place in expected.items() if name not in weights]
    unexpected = [f"{name} {list(tensor.shape)}" for name, tensor in weights.items() if name not in expected]
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(place.shape)}"
        for name, place in expected.items()
        if name in weights and not fits(weights[name], place)
    ]
    kinds = [
        (missing, "is missing", "are missing"),
        (unexpected, "is unexpected", "are unexpected"),
        (shapes, "has another shape", "have other shapes"),
    ]
    return ", ".join(
        f"1 tensor {one} ({found[0]})" if len(found) == 1 else f"{len(found)} tensors {many} (first: {found[0]})"
        for found, one, many in kinds
        if found
    )
