"""A task: two bases, the data of the fine-tuning, and the ports to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from quality.images import SHARED, find_images

POINTS = (0, 5, 10, 25, 50, 100, 200, 300)
"""Steps of a fine-tuning at which it is scored."""

TWISTS: dict[str, dict[str, Any]] = {
    "cosine": {"port.schedule": "cosine"},
    "uniform": {"port.schedule": "uniform"},
    "actual": {},  # along the checkpoints of the fine-tuning
    "borrowed": {},  # with the permutation of the same method in another task
    "warm": {"port.start": "warm"},
    "restart": {"port.start": "restart"},
    "normalise": {"port.normalise": True},
    "zero-head": {"port.head": "zero"},
    "shared-head": {"port.head": "shared"},
    "given-head": {"port.head": "given"},
    "augment": {"port.augment": True},
    "one-batch": {"port.grad_batches": 1},
    "five-steps": {"port.steps": 5},
}
"""Variants of methods: `fgmt+cosine` is FGMT with a cosine schedule."""


@dataclass(frozen=True)
class Training:
    """Options of a training; the learning rate is chosen on validation images with the first seed."""

    steps: int
    lrs: tuple[float, ...]
    batch: int = 64
    optimizer: str = "sgd"
    schedule: str = "cosine"
    weight_decay: float = 1e-4

    def overrides(self, lr: float, seed: int) -> dict[str, Any]:
        """The options as fields of a recipe."""
        return {
            "finetune.steps": self.steps,
            "finetune.batch_size": self.batch,
            "finetune.optimizer": self.optimizer,
            "finetune.schedule": self.schedule,
            "finetune.weight_decay": self.weight_decay,
            "finetune.lr": lr,
            "finetune.seed": seed,
        }


@dataclass(frozen=True)
class Pair:
    """An old and a new base, and the seeds of their fine-tunings."""

    old: str
    new: str
    old_seed: int
    new_seed: int


def chain(seed: int) -> Pair:
    """A chain of bases: 0 → 1, 1 → 2, … All but the ends are used twice, and so are their fine-tunings."""
    return Pair(f"seed-{seed}", f"seed-{seed + 1}", seed, seed + 1)


@dataclass(frozen=True)
class Task:
    """One row of the results."""

    name: str
    title: str
    network: Callable[[int], nn.Module] = field(repr=False)
    images: str
    size: int
    tuning: Training
    steps: int
    """T."""
    grad_batches: int
    methods: Mapping[str, int]
    """Method (with variants) → number of seeds."""
    pair: Callable[[int], Pair] = field(default=chain, repr=False)
    classes: tuple[str, ...] = ()
    """Classes of the fine-tuning; all if empty."""
    family: str = ""
    """Tasks of a family share bases and fine-tunings."""
    before: Training | None = None
    """The training of the bases; None if they are random or from files."""
    before_classes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Base → file of weights, relative to the folder of shared weights."""
    file_classes: int = 0
    batch: int = 128
    """Images in a minibatch of the port."""
    bn_batches: int = 5
    head: str = ""
    """The head policy of the port; the default if empty."""
    start_head: str = "zero"
    """The initial head of a fine-tuning, as in `hf-retarget finetune`."""
    after: Mapping[str, int] = field(default_factory=dict)
    """Method → seeds for which the port is fine-tuned further."""
    budgets: tuple[int, ...] = (12, 25, 50, 100)
    """Steps of the shorter fine-tunings of the new base, plain and after a port."""
    rates: tuple[float, ...] = ()
    """Learning rates to try for each of them; those of `tuning` if empty."""
    points: tuple[int, ...] = POINTS
    gap: bool = False
    """Whether accuracies on training images are also kept (the same in a family)."""
    record: bool = False
    """Whether fine-tunings keep their trajectories, for methods with `+actual` (the same in a family)."""
    lender: str = ""
    """The task whose permutations are reused by methods with `+borrowed`."""
    limit: int | None = None
    """Maximum number of images of each split."""
    matching: float = 0.5
    """Measured seconds of matching per step, for estimates."""
    recorded: bool = True
    """Whether each finished run leaves a record in benchmarks/results/quality."""
    stands_for: str = ""
    """The corresponding figures of the paper."""

    @property
    def folder(self) -> str:
        """The folder of the family's bases and fine-tunings."""
        return self.family or self.name

    @property
    def seeds(self) -> int:
        """The total number of seeds."""
        return max(self.methods.values())

    def missing(self) -> str:
        """Why this task cannot run here; empty if it can."""
        if find_images(self.images) is None and self.images != "mnist":
            return f"no images '{self.images}' in ../shared/data"
        lacking = [file for file in self.files.values() if not (SHARED / "weights" / file).exists()]
        return f"no weights '{lacking[0]}' in ../shared/weights" if lacking else ""


def shorten(task: Task) -> Task:
    """The same task with hardly any training and few images, as a smoke test."""
    brief = replace(task.tuning, steps=12, batch=8)
    return replace(
        task,
        tuning=brief,
        before=replace(task.before, steps=6, batch=8) if task.before else None,
        steps=3,
        grad_batches=1,
        batch=16,
        bn_batches=min(1, task.bn_batches),
        points=(0, 4, 12),
        budgets=(4,),
        methods=dict.fromkeys(task.methods, 1),
        after=dict.fromkeys(task.after, 1),
        limit=80,
        recorded=False,
    )
