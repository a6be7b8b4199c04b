"""Estimates the time of a task from the number of images and a short measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hf_retarget.contenders import find_contender
from quality.curves import TRAIN_IMAGES
from quality.task import Task, Training

FORWARD = 0.35
"""The cost of a forward pass, relative to a training step."""
OVERHEAD = 5.0
"""Seconds of a port for loading and tracing: the median of our runs."""
SIZES = {
    "mnist": (60000, 10000),
    "fashion-mnist": (12000, 2000),
    "cifar10": (10000, 2000),
    "flowers": (2934, 736),
}
"""Training and test images."""


@dataclass(frozen=True)
class Estimate:
    """Work, as training images and ports."""

    images: float
    ports: int
    matching: float
    """Seconds."""

    def seconds(self, each: float) -> float:
        """Seconds of one core, given the seconds per image."""
        return self.images * each + self.ports * OVERHEAD + self.matching


def count_work(task: Task, family: list[Task]) -> Estimate:
    """The work that a task adds to earlier ones of its family, which share bases and fine-tunings."""
    before = family[: family.index(task)]
    bases = _bases(task) - {base for each in before for base in _bases(each)}
    tunings = _tunings(task) - {tuning for each in before for tuning in _tunings(each)}
    rates = len(task.tuning.lrs)
    first = 1 if not task.files else len({base for base, _ in tunings})
    count = len(tunings) + (rates - 1) * (first if tunings else 0)
    curve = _training(task.tuning) + len(task.points) * FORWARD * _scored(task)
    images = (count + sum(task.after.values())) * curve + _short(task)
    if task.before is not None:
        images += len(bases) * _training(task.before)
    ports, matches = 0, 0
    for method, seeds in task.methods.items():
        ports += seeds
        matches += seeds * _matches(task, method.partition("+")[0])
        images += seeds * _port(task, method.partition("+")[0])
        if method == "fgmt":  # its control, also used for fgmt-sign
            images += seeds * _gradients(task, method) * 2
    return Estimate(images, ports, matches * task.matching)


def time_image(task: Task, batch: int = 32) -> float:
    """Seconds of one core for one image of a training step, the best of a few small minibatches.

    This is processor time, so that other processes on the machine do not count.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = task.network(10).train()
        images = torch.randn(batch, *model.pretrained_cfg["input_size"])
        return min(_step(model, images) for _ in range(5)) / batch
    finally:
        torch.set_num_threads(threads)


def _step(model: nn.Module, images: torch.Tensor) -> float:
    began = time.process_time()
    model.zero_grad()
    cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long)).backward()
    return time.process_time() - began


def _training(how: Training) -> int:
    return how.steps * how.batch


def _short(task: Task) -> float:
    """Shorter fine-tunings of the new base and after each port; the first seed tries all rates."""
    if not task.after:
        return 0.0
    once = sum(task.budgets) * task.tuning.batch + len(task.budgets) * FORWARD * _scored(task)
    extra = len(task.rates or task.tuning.lrs) - 1
    return once * sum(seeds + extra for seeds in (max(task.after.values()), *task.after.values()))


def _share(task: Task) -> float:
    classes = len(task.classes)
    return classes / 10 if classes and task.images != "flowers" else 1.0


def _validation(task: Task) -> float:
    return 0.1 * min(SIZES[task.images][0], task.limit or 10**9) * _share(task)


def _scored(task: Task) -> float:
    test = min(SIZES[task.images][1], task.limit or 10**9) * _share(task)
    return test + _validation(task) + (TRAIN_IMAGES if task.gap else 0)


def _gradients(task: Task, method: str) -> float:
    """Images of one side of a port."""
    steps = task.steps * (task.steps + 1) / 2 if method == "gmt" else task.steps
    return steps * task.grad_batches * task.batch


def _port(task: Task, method: str) -> float:
    looked = task.steps * (task.bn_batches * task.batch + _validation(task)) + SIZES[task.images][1] * _share(task)
    learnt = 1.3 * _gradients(task, method) if find_contender(method).gradients(1) else 0.0
    return FORWARD * looked + learnt


def _matches(task: Task, method: str) -> int:
    """The number of searches for a permutation."""
    return {"naive": 0, "oracle": 1, "rebasin": 1}.get(method, task.steps)


def _bases(task: Task) -> set[str]:
    return {base for seed in range(task.seeds) for base in (task.pair(seed).old, task.pair(seed).new)}


def _tunings(task: Task) -> set[tuple[str, int]]:
    pairs = [task.pair(seed) for seed in range(task.seeds)]
    return {(pair.old, pair.old_seed) for pair in pairs} | {(pair.new, pair.new_seed) for pair in pairs}
