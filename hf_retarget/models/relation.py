"""How two bases are related: of one lineage, drifted apart, or independent. Their weights tell, without gradients."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_retarget.document import RelationFacts
from hf_retarget.errors import ModelError
from hf_retarget.models.hub import HubModel
from hf_retarget.models.weights import FLOATS, read_header

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


@dataclass
class _Sums:
    """Of two bases A and C and a fine-tuning B of A."""

    old: float = 0.0
    new: float = 0.0
    product: float = 0.0
    tuning: float = 0.0
    apart: float = 0.0
    to_new: float = 0.0

    def add(self, old: Tensor, tuned: Tensor, new: Tensor) -> None:
        a, b, c = (each.double().flatten() for each in (old, tuned, new))
        self.old += float(a @ a)
        self.new += float(c @ c)
        self.product += float(a @ c)
        self.tuning += float((b - a).square().sum())
        self.apart += float((c - a).square().sum())
        self.to_new += float((b - c).square().sum())

    @property
    def cosine(self) -> float:
        return self.product / max(math.sqrt(self.old * self.new), 1e-30)

    @property
    def drift(self) -> float | None:
        return math.sqrt(self.apart / self.tuning) if self.tuning else None


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
    whole, tensors = _Sums(), {}
    for name in names:
        one = _Sums()
        one.add(old[name], tuned[name], new[name])
        tensors[name] = (one.cosine, one.drift)
        for field in vars(whole):
            setattr(whole, field, getattr(whole, field) + getattr(one, field))
    lengths = [math.sqrt(each / max(whole.old, 1e-30)) for each in (whole.apart, whole.tuning, whole.to_new)]
    return RelationFacts(whole.cosine, whole.drift, _name(whole.cosine, whole.drift), tensors, *lengths)


def _name(cosine: float, drift: float | None) -> str:
    if cosine < RELATED:
        return INDEPENDENT
    return LINEAGE if drift is None or drift <= NEAR else DRIFTED  # None: only the head was tuned


# ---- a sample of the weights, by ranges of their files


def compare_samples(samples: Sequence[Mapping[str, Tensor]], head: Iterable[str]) -> RelationFacts | None:
    """The relation by samples of the old base, the tuned model and the new base; None if these share nothing."""
    old, tuned, new = samples
    names = [
        name for name in old if name not in set(head) and all(_fits(each.get(name), old[name]) for each in (tuned, new))
    ]
    return measure_relation(old, tuned, new, names) if names else None


def _fits(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape


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
