"""Re-estimates BatchNorm statistics: those of neither model that a port is made of fit the ported weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_retarget.errors import DataError, NotFiniteError
from hf_retarget.matching.gradients import Batch, enough_for_batchnorm, evaluation_mode
from hf_retarget.progress import SILENT, Progress


@dataclass(frozen=True)
class Statistics:
    """A summary of a layer's running statistics: the norm of the mean, and the average variance."""

    mean_norm: float
    variance: float


@dataclass(frozen=True)
class BatchNormReset:
    """The statistics of each layer before and after a reset, and the number of minibatches used."""

    before: Mapping[str, Statistics]
    after: Mapping[str, Statistics]
    batches: int

    @property
    def layers(self) -> int:
        """The number of layers reset."""
        return len(self.after)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        layers = {
            name: {"before": asdict(self.before[name]), "after": asdict(after)} for name, after in self.after.items()
        }
        return {"layers": self.layers, "batches": self.batches, "statistics": layers}


def reset_batchnorm(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    accelerator: Accelerator | None = None,
    progress: Progress = SILENT,
) -> BatchNormReset:
    """Replace the running statistics of all BatchNorm layers by their averages over minibatches; nothing else changes.

    If there are no such layers, nothing is drawn from `batches`. Every process runs all minibatches (a few are enough),
    so that all agree exactly. On errors, the old statistics are restored.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        >>> reset_batchnorm(model, [(torch.ones(8, 4), torch.zeros(8))]).layers
        1
        >>> reset_batchnorm(nn.Linear(4, 2), []).layers
        0
    """
    norms = {name: each for name, each in model.named_modules() if _keeps_statistics(each)}
    before = {name: _summary(norm) for name, norm in norms.items()}
    if not norms:
        return BatchNormReset(before, before, 0)
    device = accelerator.device if accelerator else torch.device("cpu")
    model.to(device)
    seen = 0
    with torch.no_grad(), _estimating(model, list(norms.values())):
        for inputs, _ in progress.track(batches, "resetting BatchNorm"):
            autocast = accelerator.autocast() if accelerator else nullcontext()
            with enough_for_batchnorm(len(inputs), f"minibatch {seen}"), autocast:
                model(inputs.to(device))
            seen += 1
        if not seen:
            raise DataError("there are no minibatches to reset BatchNorm with; give at least one")
        if broken := next((name for name, norm in norms.items() if not _is_finite(norm)), None):
            raise NotFiniteError(f"the statistics of BatchNorm '{broken}' became infinite: its inputs are too large")
    return BatchNormReset(before, {name: _summary(norm) for name, norm in norms.items()}, seen)


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm statistics to reset."""
    return any(_keeps_statistics(each) for each in model.modules())


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def _is_finite(norm: nn.Module) -> bool:
    return all(bool(norm.get_buffer(name).isfinite().all()) for name in ("running_mean", "running_var"))


def _summary(norm: nn.Module) -> Statistics:
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    return Statistics(float(mean.double().norm()), float(variance.double().mean()))


@contextmanager
def _estimating(model: nn.Module, norms: list[nn.Module]) -> Iterator[None]:
    """Start cumulative averages, with everything but BatchNorm in evaluation mode; restore all modes afterwards."""
    momenta = [norm.momentum for norm in norms]
    kept = [{name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]
    try:
        with evaluation_mode(model):
            for norm in norms:
                norm.reset_running_stats()  # type: ignore[operator]  # the method of _BatchNorm
                norm.momentum = None  # type: ignore[assignment]  # torch's notation for a cumulative average
                norm.training = True  # not train(): timm's BatchNorm layers may contain dropout
            yield
    except BaseException:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                norm.get_buffer(name).copy_(buffer)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
