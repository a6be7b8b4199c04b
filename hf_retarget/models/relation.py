"""How two bases are related: of one lineage, drifted apart, or independent. Their weights tell, without gradients."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_retarget.document import RelationFacts
from hf_retarget.errors import ModelError
from hf_retarget.models.hub import HubModel
from hf_retarget.models.weights import FLOATS, fits, read_header

LINEAGE, DRIFTED, INDEPENDENT = "same lineage", "drifted", "independent"

RELATED = 0.5
"""Cosine of the bases' weights from which they are of one lineage. In our trials it was 0.97 or more between a base and
what was trained on from it, and below 0.2 (mostly 0.02) between bases that were trained apart."""

NEAR = 0.7
"""Distance of the bases, in lengths of the fine-tuning, up to which a plain addition keeps 97 % of it: on all 10 of our
pairs, with the head refitted. Beyond, the more the bases have drifted apart, the less is kept (docs/method.md)."""

SAMPLE_BYTES = 4 << 20
"""What is read of a model, at most, to tell how it is related to another before anything is downloaded."""
_SAMPLES = 8  # tensors of which a part is read, each with a request of its own


def list_backbone(model: nn.Module, head: Iterable[str]) -> list[str]:
    """The parameters that tell a lineage: no vectors, since all scales of norms begin at 1 and say nothing.

    Example:
        >>> list_backbone(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)), ["2.weight", "2.bias"])
        ['0.weight']
    """
    names = {name: each.ndim for name, each in model.named_parameters() if name not in set(head)}
    return [name for name, axes in names.items() if axes > 1] or list(names)


def measure_relation(
    old: Mapping[str, Tensor], tuned: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Iterable[str]
) -> RelationFacts:
    """The relation of two bases, given the old base, the tuned model, the new base, and the tensors to look at.

    Example:
        >>> import torch
        >>> old, tuned, new = ({"w": torch.tensor([1.0, 0.0, each])} for each in (0.0, 0.5, 0.1))
        >>> measure_relation(old, tuned, new, ["w"]).word
        'same lineage'
    """
    tensors, total = {}, torch.zeros(6, dtype=torch.float64)
    for name in names:
        a, b, c = (each[name].double().flatten() for each in (old, tuned, new))
        squares = [(one - other).square().sum() for one, other in ((b, a), (c, a), (b, c))]
        sums = torch.stack([a @ a, c @ c, a @ c, *squares])
        tensors[name] = _find_cosine_and_drift(sums)
        total += sums
    cosine, drift = _find_cosine_and_drift(total)
    length, _, _, tuning, apart, to_new = total.tolist()
    lengths = [math.sqrt(each / max(length, 1e-30)) for each in (apart, tuning, to_new)]
    word = LINEAGE if drift is None or drift <= NEAR else DRIFTED  # None: only the head was tuned
    return RelationFacts(cosine, drift, word if cosine >= RELATED else INDEPENDENT, tensors, *lengths)


def _find_cosine_and_drift(sums: Tensor) -> tuple[float, float | None]:
    old, new, product, tuning, apart, _ = sums.tolist()
    return product / max(math.sqrt(old * new), 1e-30), math.sqrt(apart / tuning) if tuning else None


# ---- a sample of the weights, by ranges of their files


def compare_samples(samples: Sequence[Mapping[str, Tensor]], head: Iterable[str]) -> RelationFacts | None:
    """The relation by samples of the old base, the tuned model and the new base; None if these share nothing.

    Without one of the tuned model, as for an adapter, only that of the bases is measured.
    """
    old, tuned, new = samples
    others = (tuned or old, new)
    names = [name for name in old if name not in set(head) and all(fits(old[name], each.get(name)) for each in others)]
    if not names:
        return None
    found = measure_relation(old, *others, names)
    return found if tuned else replace(found, drift=None, length=None, to_new=None)


def sample_weights(
    files: Iterable[Path], hub: HubModel | None, among: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The first numbers of some tensors, evenly spaced by name; those of files that are hollow come from the Hub.

    Which tensors are read depends on names and shapes alone, so that models of one architecture have the same; of
    models that differ in some tensors, name those `among` which to choose.
    """
    found: dict[str, tuple[Path, str, int, int]] = {}
    begins: dict[Path, int] = {}
    for path in files:
        for name, entry in read_header(path)[0].items() if path.suffix == ".safetensors" else ():
            if entry["dtype"] in FLOATS and len(entry["shape"]) > 1 and (among is None or name in among):
                found[name] = (path, entry["dtype"], int(entry["data_offsets"][0]), math.prod(entry["shape"]))
    names = sorted(found)
    sample = {}
    for name in names[:: max(1, -(-len(names) // _SAMPLES))]:
        path, kind, offset, count = found[name]
        if path not in begins:
            begins[path] = 8 + int(struct.unpack("<Q", _read_bytes(path, 0, 8, hub))[0])
        length = min(count, SAMPLE_BYTES // 4 // _SAMPLES) * FLOATS[kind].itemsize
        raw = _read_bytes(path, begins[path] + offset, length, hub)
        sample[name] = torch.frombuffer(bytearray(raw), dtype=FLOATS[kind]).float()
    return sample


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in some safetensors files, by their headers."""
    entries = (each for path in files for each in read_header(path)[0].items())
    return {name: tuple(entry["shape"]) for name, entry in entries}


def _read_bytes(path: Path, start: int, length: int, hub: HubModel | None) -> bytes:
    if hub is not None and hub.is_hollow(path):
        raw = hub.read_range(path.name, start, start + length)
    else:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(length)
    if len(raw) < length:
        raise ModelError(f"'{path.name}' is cut off")
    return raw
