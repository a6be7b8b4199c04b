"""How two bases are related: same lineage, drifted or independent, measured on their weights without gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from hf_retarget.advice import HEAD, PORTED, RETRAIN
from hf_retarget.document import RelationFacts
from hf_retarget.models.hub import HubModel
from hf_retarget.models.weights import FLOATS, find_tensors, fits

LINEAGE, DRIFTED, INDEPENDENT = "same lineage", "drifted", "independent"

RELATED = 0.5
"""Cosine of the bases' weights from which they are of one lineage. In our trials it was at least 0.97 between a base
and its continued training, and below 0.2 (mostly 0.02) between bases trained independently."""

NEAR = 0.7
"""Distance of the bases, relative to the length of the fine-tuning, up to which plain addition keeps 97 % of it: on all
10 of our pairs, with the head refitted. Beyond it, less is kept the further they have drifted (docs/method.md)."""

SAMPLE_BYTES = 4 << 20
"""The most that is read of a model to measure its relation before the download."""
_SAMPLES = 8  # tensors to sample, each in one request


def list_backbone(model: nn.Module, head: Iterable[str]) -> list[str]:
    """The parameters that reveal a lineage: no vectors, since the scales of all norms start at 1.

    Example:
        >>> list_backbone(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)), ["2.weight", "2.bias"])
        ['0.weight']
    """
    names = {name: each.ndim for name, each in model.named_parameters() if name not in set(head)}
    return [name for name, axes in names.items() if axes > 1] or list(names)


def measure_relation(
    old: Mapping[str, Tensor], tuned: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Iterable[str]
) -> RelationFacts:
    """Measure the relation of the bases on the named tensors of the old base, the tuned model and the new base.

    Example:
        >>> import torch
        >>> old, tuned, new = ({"w": torch.tensor([1.0, 0.0, each])} for each in (0.0, 0.5, 0.1))
        >>> measure_relation(old, tuned, new, ["w"]).word
        'same lineage'
    """
    tensors, total, alike = {}, torch.zeros(6, dtype=torch.float64), list[float]()
    for name in names:
        a, b, c = (each[name].double().flatten() for each in (old, tuned, new))
        squares = [(one - other).square().sum() for one, other in ((b, a), (c, a), (b, c))]
        sums = torch.stack([a @ a, c @ c, a @ c, *squares])
        tensors[name] = _find_cosine_and_drift(sums)
        total += sums
        alike.append(float(a @ b / (a.norm() * b.norm()).clamp(min=1e-30)))
    cosine, drift = _find_cosine_and_drift(total)
    length, _, _, tuning, apart, to_new = total.tolist()
    norm = max(length, 1e-30)
    word = LINEAGE if drift is None or drift <= NEAR else DRIFTED  # None: only the head was tuned
    return RelationFacts(
        cosine,
        drift,
        word if cosine >= RELATED else INDEPENDENT,
        tensors,
        apart=math.sqrt(apart / norm),
        length=math.sqrt(tuning / norm),
        to_new=math.sqrt(to_new / norm),
        resemblance=median(alike or [1.0]),
    )


def _find_cosine_and_drift(sums: Tensor) -> tuple[float, float | None]:
    old, new, product, tuning, apart, _ = sums.tolist()
    return product / max(math.sqrt(old * new), 1e-30), math.sqrt(apart / tuning) if tuning else None


def recommend(word: str, *, has_batchnorm: bool) -> str:
    """What probably pays off, without reading images: `port` (without gradients), `fit a head` or `retrain`.

    Networks with BatchNorm lose more of a fine-tuning as their bases drift apart, and relearn it sooner; docs/pays.md
    tells how often this was right.

    Example:
        >>> recommend(DRIFTED, has_batchnorm=False), recommend(DRIFTED, has_batchnorm=True)
        ('port', 'retrain')
    """
    if word != LINEAGE and has_batchnorm:
        return RETRAIN
    return HEAD if word == INDEPENDENT else PORTED


# ---- sampling weights by ranges of their files


def compare_samples(samples: Sequence[Mapping[str, Tensor]], head: Iterable[str]) -> RelationFacts | None:
    """The relation by samples of the old base, the tuned model and the new base; None if they have nothing in common.

    Without a sample of the tuned model, as for an adapter, only the bases are compared.
    """
    old, tuned, new = samples
    others = (tuned or old, new)
    names = [name for name in old if name not in set(head) and all(fits(old[name], each.get(name)) for each in others)]
    if not names:
        return None
    found = measure_relation(old, *others, names)
    return found if tuned else replace(found, drift=None, length=None, to_new=None, resemblance=None)


def sample_weights(
    files: Iterable[Path], hub: HubModel | None, among: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The first values of some tensors, evenly spaced by name; those of hollow files are read from the Hub.

    The choice depends only on names and shapes, so it is the same for all models of one architecture; for models that
    differ in some tensors, restrict it to those in `among`.
    """
    found = find_tensors(path for path in files if path.suffix == ".safetensors")
    matrices = (name for name, each in found.items() if each.kind in FLOATS and len(each.shape) > 1)
    names = sorted(name for name in matrices if among is None or name in among)
    sample = {}
    for name in names[:: max(1, -(-len(names) // _SAMPLES))]:
        each = found[name]
        count = min(each.numbers, SAMPLE_BYTES // 4 // _SAMPLES)
        if hub is not None and hub.is_hollow(each.path):
            end = each.begin + count * FLOATS[each.kind].itemsize
            raw = hub.read_range(each.path.name, each.begin, end)
            sample[name] = torch.frombuffer(bytearray(raw), dtype=FLOATS[each.kind]).float()
        else:
            sample[name] = each.read(0, count).float()
    return sample
