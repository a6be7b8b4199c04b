"""The tasks of docs/results.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from quality.networks import MLP, Conv8, ResNet20, mobilenet, small_vit
from quality.task import POINTS, Pair, Task, Training

MAIN = {"naive": 3, "rebasin": 1, "fgmt": 3, "fgmt-sign": 3, "naive-sign": 3, "oracle": 3, "permuted-source": 1}
FEW = {"naive": 3, "rebasin": 1, "fgmt": 3, "fgmt-sign": 3, "naive-sign": 1, "oracle": 1}
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


def _conv8(classes: int) -> nn.Module:
    return Conv8(1.0, classes)


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
    "rates": (0.01, 0.03, 0.1),
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
    "rates": (0.02, 0.05, 0.1, 0.2),
    "record": True,
}
_MOBILENET: dict[str, Any] = {
    "family": "mobilenet-flowers",
    "network": mobilenet,
    "images": "flowers",
    "size": 96,
    "tuning": Training(100, (0.003, 0.01), batch=32),
    "points": POINTS[:-2],
    "budgets": (5, 10, 25, 50),
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
        # One assignment of 4096 neurons takes half a minute, hence few seeds.
        methods={"naive": 2, "fgmt": 2, "fgmt-sign": 1, "gmt": 1, "oracle": 2, "fgmt+actual": 1},
        matching=20.0,
        stands_for="5a, 9a",
    ),
    Task(
        name="mnist-mlp-whole",
        title="2-MLP 784-4096-10, MNIST (all 60,000 images, 15 epochs), random → random",
        network=_mlp,
        images="mnist",
        size=28,
        tuning=Training(6328, (0.01,), batch=128, schedule="constant", weight_decay=0.0),
        points=(0, 422, 2110, 6328),
        steps=5,
        grad_batches=1,
        bn_batches=0,
        head="own",
        start_head="keep",
        methods={"naive": 3, "fgmt": 3, "oracle": 3, "gmt": 1},
        matching=5.0,
        stands_for="5a",
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
        methods={"naive": 2, "fgmt": 2, "fgmt-sign": 1, "oracle": 2, "fgmt+cosine": 1, "fgmt+actual": 1},
        after={"fgmt": 1},
        budgets=(70, 140, 280),
        rates=(0.05, 0.1),
    ),
    Task(
        name="cifar10-conv8-whole",
        title="Conv8 (full width), CIFAR-10 (9,000 images, 30 epochs), random → random",
        **{**_CONV8, "network": _conv8, "stands_for": "5b"},
        tuning=Training(2110, (0.05,), batch=128),
        points=(0, 70, 350, 1050, 2110),
        steps=30,
        head="own",
        start_head="keep",
        methods={"naive": 1, "fgmt": 1, "oracle": 1},
        matching=5.0,
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
        methods={
            **MAIN,
            "gmt": 1,
            **_with("cosine", "actual", seeds=2),
            **_with("shared-head", "augment", seeds=1),
            **dict.fromkeys(("fgmt+one-batch", "fgmt-sign+one-batch", "fgmt-sign+five-steps"), 3),
        },
        after=AFTER,
        stands_for="5d, 6c, 7b, 9d, table 3",
    ),
    Task(
        name="resnet20-flowers-back",
        title="ResNet-20 (CIFAR-10, bognev → akamaster), flowers at 32 px",
        **_RESNET,
        pair=_between("bognev", "akamaster"),
        methods=FEW,
        stands_for="5d",
    ),
    Task(
        name="resnet20-clothes",
        title="ResNet-20 (CIFAR-10, akamaster → bognev), Fashion-MNIST at 32 px",
        **{**_RESNET, "family": "", "images": "fashion-mnist", "record": False},
        pair=_between("akamaster", "bognev"),
        methods=dict.fromkeys(("naive", "fgmt", "fgmt+borrowed", "oracle"), 2),
        lender="resnet20-flowers",
    ),
    Task(
        name="resnet20-turned",
        title="ResNet-20 (CIFAR-10, akamaster → bognev), which flower and which way up, at 32 px",
        **{**_RESNET, "family": "", "images": "turned-flowers", "record": False},
        pair=_between("akamaster", "bognev"),
        methods={"fgmt": 1},
    ),
    Task(
        name="mobilenet-flowers",
        title="MobileNetV2 (ImageNet, google → torchvision), flowers at 96 px",
        **_MOBILENET,
        pair=_between("google", "torchvision"),
        methods=FEW,
        after={"fgmt": 1, "fgmt-sign": 1},
        stands_for="5e, 6d",
    ),
    Task(
        name="mobilenet-flowers-back",
        title="MobileNetV2 (ImageNet, torchvision → google), flowers at 96 px",
        **_MOBILENET,
        pair=_between("torchvision", "google"),
        methods=FEW,
        stands_for="5e",
    ),
    Task(
        name="vit-6to4",
        title="a small ViT, six kinds of clothes (Fashion-MNIST) → the other four",
        network=small_vit,
        images="fashion-mnist",
        size=28,
        tuning=Training(300, (3e-4, 1e-3), optimizer="adamw"),
        before=Training(800, (1e-3,), optimizer="adamw"),
        rates=(3e-4, 1e-3, 3e-3),
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
        budgets=(4,),
        methods={"naive": 2, "fgmt": 2, "oracle": 2, "fgmt+actual": 1},
        after={"naive": 2, "fgmt": 2},
        gap=True,
        record=True,
        recorded=False,
        limit=120,
    ),
)


TASKS: dict[str, Task] = {task.name: task for task in _ALL}
WHOLE = ("mnist-mlp-whole", "cifar10-conv8-whole")
"""The paper's networks at full size, which have their own tables."""
FULL = tuple(name for name in TASKS if name not in ("tiny", "resnet20-turned", *WHOLE))
"""The tasks of the other results; the rest are for tests and for `pays.py`."""
