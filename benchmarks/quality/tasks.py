"""The tasks: where two bases come from, what the old one is fine-tuned on, and which ports are tried on that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from quality.images import SHARED, find_images
from quality.networks import MLP, Conv8, ResNet20, mobilenet, small_vit

POINTS = (0, 5, 10, 25, 50, 100, 200, 300)
"""Steps of a fine-tuning at which it is scored."""

TWISTS: dict[str, dict[str, Any]] = {
    "cosine": {"port.schedule": "cosine"},
    "uniform": {"port.schedule": "uniform"},
    "actual": {"port.trajectory": "actual"},
    "warm": {"port.start": "warm"},
    "restart": {"port.start": "restart"},
    "normalise": {"port.normalise": True},
    "zero-head": {"port.head": "zero"},
    "shared-head": {"port.head": "shared"},
    "given-head": {"port.head": "given"},
    "augment": {"port.augment": True},
    "one-batch": {"port.grad_batches": 1},
}
"""What a method may be tried with: `fgmt+cosine` is FGMT with a cosine schedule."""


@dataclass(frozen=True)
class Training:
    """How something is trained; several learning rates are tried on the first seed, and validation chooses."""

    steps: int
    lrs: tuple[float, ...]
    batch: int = 64
    optimizer: str = "sgd"
    schedule: str = "cosine"
    weight_decay: float = 1e-4

    def overrides(self, lr: float, seed: int) -> dict[str, Any]:
        """The same as fields of a recipe."""
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
    """An old and a new base, and the seeds with which each is fine-tuned."""

    old: str
    new: str
    old_seed: int
    new_seed: int


def chain(seed: int) -> Pair:
    """Bases in a row: 0 → 1, 1 → 2, … Every base but the ends serves twice, and so does its fine-tuning."""
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
    """Method (with twists) → how many seeds."""
    pair: Callable[[int], Pair] = field(default=chain, repr=False)
    classes: tuple[str, ...] = ()
    """What is fine-tuned on; all if empty."""
    family: str = ""
    """Tasks of a family share bases and fine-tunings."""
    before: Training | None = None
    """How the bases are trained; None if they are random, or files."""
    before_classes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Base → file of weights, relative to the folder of shared weights."""
    file_classes: int = 0
    batch: int = 128
    """Images in a minibatch of the port."""
    bn_batches: int = 5
    head: str = ""
    """The port's head policy; as the library decides if empty."""
    start_head: str = "zero"
    """What a fine-tuning begins with, as in `hf-retarget finetune`."""
    after: Mapping[str, int] = field(default_factory=dict)
    """Method → seeds for which the port is fine-tuned on."""
    after_lrs: tuple[float, ...] = ()
    """Those of `tuning` if empty."""
    points: tuple[int, ...] = POINTS
    gap: bool = False
    """Whether accuracies on training images are kept, too (alike in a family)."""
    record: bool = False
    """Whether fine-tunings keep their trajectories, for methods with `+actual` (alike in a family)."""
    limit: int | None = None
    """At most so many images of each split."""
    matching: float = 0.5
    """Seconds of matching at each step, as measured by us: for estimates."""
    stands_for: str = ""
    """The paper's figures it corresponds to."""

    @property
    def folder(self) -> str:
        """Where the family's bases and fine-tunings are kept."""
        return self.family or self.name

    @property
    def seeds(self) -> int:
        """How many seeds there are in all."""
        return max(self.methods.values())

    def missing(self) -> str:
        """Why this task cannot run here; empty if it can."""
        if find_images(self.images) is None and self.images != "mnist":
            return f"no images '{self.images}' in ../shared/data"
        lacking = [file for file in self.files.values() if not (SHARED / "weights" / file).exists()]
        return f"no weights '{lacking[0]}' in ../shared/weights" if lacking else ""


MAIN = {"naive": 3, "rebasin": 1, "fgmt": 3, "fgmt-sign": 3, "naive-sign": 3, "oracle": 3, "permuted-source": 1}
FEW = {"naive": 3, "rebasin": 1, "fgmt": 3, "fgmt-sign": 3, "naive-sign": 3, "oracle": 1}
AFTER = {"fgmt": 2, "fgmt-sign": 2, "naive-sign": 1}
DECISIONS = ("cosine", "warm", "normalise", "zero-head", "shared-head", "given-head", "one-batch")

CIFAR_SIX = ("airplane", "automobile", "bird", "frog", "horse", "ship")
CIFAR_FOUR = ("cat", "deer", "dog", "truck")
CLOTHES_SIX = ("Trouser", "Dress", "Sandal", "Sneaker", "Bag", "Ankle boot")
CLOTHES_FOUR = ("T-shirt/top", "Pullover", "Coat", "Shirt")
RESNETS = {name: f"cifar10-resnet20/{name}.safetensors" for name in ("akamaster", "bognev")}
MOBILENETS = {name: f"mobilenetv2_100/{name}.safetensors" for name in ("google", "torchvision")}


def narrow_conv8(classes: int) -> nn.Module:
    """Conv8 at a quarter of its width."""
    return Conv8(0.25, classes)


def _mlp(classes: int) -> nn.Module:
    return MLP(4096, classes)


def _between(old: str, new: str) -> Callable[[int], Pair]:
    return lambda seed: Pair(old, new, seed, seed)


def _tenth(seed: int) -> Pair:
    return Pair(f"tenth-{seed}", f"seed-{seed + 1}", seed, seed + 1)


def _with(*twists: str, seeds: int = 3) -> dict[str, int]:
    return {f"fgmt+{twist}": seeds for twist in twists}


_ACTUAL = {"naive+actual": 1, "fgmt+actual": 1, "oracle+actual": 1}
_CONV8 = {
    "network": narrow_conv8,
    "images": "cifar10",
    "size": 32,
    "grad_batches": 2,
    "bn_batches": 0,
}
_SIX_TO_FOUR: dict[str, Any] = {
    **_CONV8,
    "family": "cifar-6to4",
    "tuning": Training(300, (0.01, 0.03)),
    "before": Training(700, (0.05,), batch=128),
    "before_classes": CIFAR_SIX,
    "classes": CIFAR_FOUR,
    "steps": 15,
    "gap": True,
    "record": True,
}
_RESNET: dict[str, Any] = {
    "family": "resnet20-flowers",
    "network": ResNet20,
    "images": "flowers",
    "size": 32,
    "tuning": Training(300, (0.01, 0.05)),
    "steps": 10,
    "grad_batches": 5,
    "files": RESNETS,
    "file_classes": 10,
    "after": AFTER,
    "record": True,
}
_MOBILENET: dict[str, Any] = {
    "family": "mobilenet-flowers",
    "network": mobilenet,
    "images": "flowers",
    "size": 96,
    "tuning": Training(100, (0.01,), batch=32),
    "points": POINTS[:-2],
    "steps": 6,
    "grad_batches": 3,
    "batch": 64,
    "files": MOBILENETS,
    "file_classes": 1000,
}

_ALL = (
    Task(
        name="mnist-mlp",
        title="2-MLP 784-4096-10, MNIST (18,000 images, 15 epochs), random → random",
        network=_mlp,
        images="mnist",
        size=28,
        tuning=Training(2110, (0.01,), batch=128, schedule="constant", weight_decay=0.0),
        points=(0, 211, 422, 1055, 2110),
        limit=20000,
        steps=5,
        grad_batches=1,
        bn_batches=0,
        head="own",
        start_head="keep",
        record=True,
        # One assignment of 4096 neurons takes half a minute, so seeds are few.
        methods={"naive": 2, "fgmt": 2, "fgmt-sign": 1, "gmt": 1, "oracle": 2, "fgmt+actual": 1},
        matching=20.0,
        stands_for="5a, 9a",
    ),
    Task(
        name="cifar10-conv8",
        title="Conv8 (¼ width), CIFAR-10 (9,000 images, 14 epochs), random → random",
        **{**_CONV8, "stands_for": "4, 5b, 6a, 9b"},
        tuning=Training(980, (0.05,), batch=128),
        points=(0, 35, 70, 140, 280, 560, 980),
        steps=28,
        head="own",
        start_head="keep",
        record=True,
        methods={"naive": 2, "rebasin": 1, "fgmt": 2, "fgmt-sign": 1, "oracle": 2, "fgmt+cosine": 1, **_ACTUAL},
        after=dict.fromkeys(("fgmt", "fgmt-sign"), 1),
        after_lrs=(0.01,),
    ),
    Task(
        name="cifar-6to4",
        title="Conv8 (¼ width), six classes of CIFAR-10 → the other four",
        **{**_SIX_TO_FOUR, "stands_for": "5f, 6b, 7a, 9f, table 3"},
        methods={**MAIN, "gmt": 1, **_with(*DECISIONS, seeds=2), **_ACTUAL},
        after=AFTER,
    ),
    Task(
        name="cifar-6to4-tenth",
        title="the same; old base pre-trained on a tenth of the images",
        **{**_SIX_TO_FOUR, "stands_for": "8"},
        pair=_tenth,
        methods={"naive": 2, "fgmt": 2, "fgmt-sign": 2, "oracle": 2},
        after={"fgmt": 1, "fgmt-sign": 1},
    ),
    Task(
        name="resnet20-flowers",
        title="ResNet-20 (CIFAR-10, akamaster → bognev), flowers at 32 px",
        **_RESNET,
        pair=_between("akamaster", "bognev"),
        methods={**MAIN, "gmt": 1, **_with("cosine", "shared-head", "actual", seeds=2)},
        stands_for="5d, 6c, 7b, 9d, table 3",
    ),
    Task(
        name="resnet20-flowers-back",
        title="ResNet-20 (CIFAR-10, bognev → akamaster), flowers at 32 px",
        **_RESNET,
        pair=_between("bognev", "akamaster"),
        methods=FEW,
        stands_for="5d, 6c",
    ),
    Task(
        name="mobilenet-flowers",
        title="MobileNetV2 (ImageNet, google → torchvision), flowers at 96 px",
        **_MOBILENET,
        pair=_between("google", "torchvision"),
        methods=FEW,
        after={"fgmt": 1, "fgmt-sign": 1, "naive-sign": 1},
        stands_for="5e, 6d",
    ),
    Task(
        name="mobilenet-flowers-back",
        title="MobileNetV2 (ImageNet, torchvision → google), flowers at 96 px",
        **_MOBILENET,
        pair=_between("torchvision", "google"),
        methods=FEW,
        after={"fgmt": 1, "fgmt-sign": 1, "naive-sign": 1},
        stands_for="5e, 6d",
    ),
    Task(
        name="vit-6to4",
        title="a small ViT, six kinds of clothes (Fashion-MNIST) → the other four",
        network=small_vit,
        images="fashion-mnist",
        size=28,
        tuning=Training(300, (3e-4, 1e-3), optimizer="adamw"),
        before=Training(800, (1e-3,), optimizer="adamw"),
        before_classes=CLOTHES_SIX,
        classes=CLOTHES_FOUR,
        steps=10,
        grad_batches=5,
        bn_batches=0,
        methods=MAIN,
        after=AFTER,
    ),
    Task(
        name="tiny",
        title="to see that everything runs: a narrow 2-MLP on a few embedded images",
        network=lambda classes: MLP(32, classes),
        images="fashion-mnist",
        size=28,
        tuning=Training(12, (0.05, 0.1), batch=16),
        before=Training(20, (0.1,), batch=16),
        before_classes=CLOTHES_SIX,
        classes=CLOTHES_FOUR,
        steps=3,
        grad_batches=1,
        batch=32,
        bn_batches=0,
        points=(0, 4, 12),
        methods={"naive": 2, "fgmt": 2, "oracle": 2, "fgmt+actual": 1},
        after={"naive": 2, "fgmt": 2},
        gap=True,
        record=True,
        limit=120,
    ),
)


def shorten(task: Task) -> Task:
    """The same with hardly any training, on few images: to see that it runs, not what it is good for."""
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
        methods=dict.fromkeys(task.methods, 1),
        after=dict.fromkeys(task.after, 1),
        limit=80,
    )


TASKS: dict[str, Task] = {task.name: task for task in _ALL}
FULL = tuple(name for name in TASKS if name != "tiny")
"""What the results are made of."""
