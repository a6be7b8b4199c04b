"""Gradients for matching: averaged over minibatches and processes, reproducible, without changing the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hf_retarget.errors import DataError, MatchError, NotFiniteError
from hf_retarget.files import load_tensors, lock_entry, save_tensors
from hf_retarget.graph.trace import clear_caches
from hf_retarget.progress import SILENT, Progress
from hf_retarget.run import Run, from_main_process

Batch = tuple[Any, Tensor]
"""Inputs and labels."""

Loss = Callable[[Any, Tensor], Tensor]
"""From the model's output and the labels to a scalar, averaged over the batch."""


TEMPERATURE = 2.0
"""Temperature at which the probabilities of student and teacher are compared (the usual choice, not tuned)."""


def cross_entropy(output: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss for labels or for probabilities; the latter at `TEMPERATURE`, scaled so that gradients do not shrink.

    Example:
        >>> float(cross_entropy(torch.zeros(1, 2), torch.tensor([0]))) < float(
        ...     cross_entropy(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]))
        ... )
        True
    """
    if not targets.is_floating_point():
        return functional.cross_entropy(output, targets, label_smoothing=label_smoothing)
    heat = TEMPERATURE
    return heat**2 * functional.cross_entropy(output / heat, targets, label_smoothing=label_smoothing)


@contextmanager
def matching_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and drop-path, make BatchNorm use the statistics of the batch, and restore everything afterwards.

    Without running statistics, BatchNorm uses those of the batch even in evaluation mode, so they are simply removed.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm.running_mean, norm.running_var) for norm in norms]
    model.eval()
    for norm in norms:
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm, (mean, variance) in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var = mean, variance
        for module, training in modes:
            module.training = training


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards, the mode of every module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.train().eval()  # train() drops values that some models derive from their weights and cache
    try:
        yield
    finally:
        model.train()
        for module, training in modes:
            module.training = training


@contextmanager
def enough_for_batchnorm(images: int, what: str = "a minibatch") -> Iterator[None]:
    """Explain what to do if a minibatch is too small for BatchNorm."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DataError(f"{what} holds {images} image, too few for BatchNorm; use larger minibatches") from error


@dataclass(frozen=True)
class Gradients:
    """Computes averaged gradients of a model at given weights.

    With several processes (an `accelerate.Accelerator` under torchrun) each takes its share of the minibatches. Sums
    are kept in float64, so that the average does not depend on how the minibatches are distributed.
    """

    model: nn.Module
    loss: Loss
    micro_batch: int | None = None
    """Samples per forward pass, to save memory; BatchNorm then sees these smaller batches."""
    accelerator: Accelerator | None = None
    progress: Progress = SILENT

    def __call__(
        self, weights: Mapping[str, Tensor], batches: Iterable[Batch], total: int | None = None
    ) -> dict[str, Tensor]:
        """The gradient at `weights`, averaged over all minibatches; `total` is their number, for the progress bar.

        If `batches` is lazy, only one minibatch is held in memory at a time.
        """
        device, rank, processes = torch.device("cpu"), 0, 1
        if self.accelerator:
            device = self.accelerator.device
            rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        wanted = [name for name, _ in self.model.named_parameters()]
        if absent := [name for name in wanted if name not in weights]:
            raise MatchError(f"the weights lack '{absent[0]}' ({len(absent)} of {len(wanted)} parameters are missing)")
        leaves = {name: weights[name].detach().to(device).requires_grad_() for name in wanted}
        sums = dict[str, Tensor]()
        with matching_mode(self.model):
            seen = 0
            for inputs, labels in self.progress.track(batches, "gradients", total):
                if seen % processes == rank:
                    self._accumulate(leaves, wanted, inputs, labels, sums)
                seen += 1
        clear_caches(self.model)
        if not seen:
            raise MatchError("there are no minibatches to take gradients from; is the loader empty?")
        for name in wanted:
            sums.setdefault(name, torch.zeros(leaves[name].shape, device=device))
        if self.accelerator and processes > 1:
            sums = {name: self.accelerator.reduce(sums.pop(name).double(), "sum") for name in wanted}
        if seen > 1:
            sums = {name: sums.pop(name).double() / seen for name in wanted}
        found = {name: sums.pop(name).float().cpu() for name in wanted}  # one by one, to save memory
        if broken := next((name for name, gradient in found.items() if not gradient.isfinite().all()), None):
            raise NotFiniteError(f"the gradient of '{broken}' is NaN or infinite")
        return found

    def _accumulate(
        self, leaves: dict[str, Tensor], wanted: list[str], inputs: Any, labels: Tensor, sums: dict[str, Tensor]
    ) -> None:
        size = len(labels)
        step = self.micro_batch or size
        device = next(iter(leaves.values())).device
        for start in range(0, size, step):
            part, answers = inputs[start : start + step].to(device), labels[start : start + step].to(device)
            clear_caches(self.model)  # values that some models cache for other weights, with their autograd graph
            autocast = self.accelerator.autocast() if self.accelerator else nullcontext()
            with enough_for_batchnorm(len(part)), autocast:
                loss = self.loss(functional_call(self.model, leaves, (part,)), answers)
            grads = list(torch.autograd.grad(loss, [leaves[name] for name in wanted], allow_unused=True))
            for name in reversed(wanted):
                if (grad := grads.pop()) is not None:  # a single one stays in its own precision, to save memory
                    whole = len(answers) == size  # a copy, as autograd may return views
                    share = grad.clone().contiguous() if whole else grad.double() * (len(answers) / size)
                    sums[name] = sums[name].double() + share if name in sums else share


@dataclass(frozen=True)
class StepGradients:
    """Gradients on the minibatches of a step, which are the same for both bases."""

    model: nn.Module
    batches: Callable[[int], Iterable[Batch]]
    """The minibatches of a step, counted from 1."""
    count: int
    """The number of minibatches per step."""
    micro_batch: int | None
    run: Run

    def __call__(self, weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The gradient of the loss at `weights`."""
        run = self.run
        with run.clock.stage("images"):
            batches = self.batches(step)
        model = self.model.to(run.accelerator.device)
        with run.clock.stage("gradients"):
            compute = Gradients(model, cross_entropy, self.micro_batch, run.accelerator, run.progress)
            return compute(weights, batches, self.count)


@dataclass(frozen=True)
class GradientCache:
    """Source gradients on disk: they do not depend on the new base, so all ports of the same fine-tuning share them.

    `key` must contain everything they depend on, as JSON values: weights, data, seeds, options, versions.

    Example:
        >>> cache = GradientCache("cache", {"source": "a1b2", "tuned": "c3d4", "data": "flowers", "seed": 0})
        >>> cache.path(1).name
        'step-1.safetensors'
    """

    folder: str | Path
    key: Mapping[str, Any]
    progress: Progress = SILENT

    def path(self, step: int) -> Path:
        """The file of one step."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:20]
        return Path(self.folder) / digest / f"step-{step}.safetensors"

    def get(self, step: int, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The gradient of a step: from disk if it is there, otherwise computed and saved.

        Runs share the cache: while one computes a step, the others wait for it. Among the processes of one run, only
        the first reads and writes.
        """
        path, main = self.path(step), PartialState().is_main_process
        waiting = f"waiting for another run that is computing '{path.parent.name}/{path.name}'"
        with lock_entry(path, partial(self.progress.say, waiting)) if main else nullcontext():
            found = self._read(path) if main else None
            if from_main_process(found is not None):
                return load_tensors(path)[0] if found is None else found
            gradient = compute()
            if main:
                save_tensors(path, gradient, {})
            return gradient

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        if not path.exists():
            return None
        try:
            return load_tensors(path)[0]
        except OSError as error:
            self.progress.say(f"the cached gradient '{path}' is damaged ({error}); recomputing it")
            return None
