"""Pairs of an old and a new base: the new one continues from the old one, is its sibling, or is independent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_retarget.data import Split, choose_preprocess, load_data
from hf_retarget.files import save_tensors
from hf_retarget.models import load_checkpoint
from hf_retarget.recipe.options import DataOptions, TrainOptions
from hf_retarget.training import train_model
from quality.bench import Bench, weights_of
from quality.images import load_images
from quality.store import Kept
from quality.tasks import TASKS

OUT = Path(__file__).resolve().parents[2] / "runs" / "quality"
NOISE = 0.6  # standard deviation, of normalised pixels
SNAPSHOTS = (25, 100, 300, 1000, 3000)


@dataclass(frozen=True)
class Onward:
    """The further training that turns an old base into a new one."""

    steps: int
    lr: float
    noisy: bool = False
    optimizer: str = "sgd"
    seed: int = 0
    of: int = 0
    """If set, the base is a snapshot after `steps` of a training of this length at a constant rate."""


@dataclass(frozen=True)
class Pair:
    """An old and a new base, with the task that the old one is fine-tuned on."""

    task: str
    old: str
    new: str | Onward
    """The name of a base of the task, or the further training that makes it."""
    sibling: Onward | None = None
    """The further training that made the old base, if it is a sibling of the new one."""


@dataclass(frozen=True)
class Drift:
    """One training, whose snapshots are new bases."""

    task: str
    old: str
    how: Onward
    independent: str
    """The pair at the right end of the axis."""

    def pairs(self, name: str) -> dict[str, Pair]:
        """A pair for each snapshot."""
        steps = [each for each in SNAPSHOTS if each <= self.how.of]
        return {f"{name}-{each}": Pair(self.task, self.old, replace(self.how, steps=each)) for each in steps}


DRIFTS = {
    "drift-resnet20": Drift("resnet20-flowers", "akamaster", Onward(0, 0.02, of=3000), "resnet20"),
    "drift-resnet20-noisy": Drift("resnet20-flowers", "akamaster", Onward(0, 0.02, noisy=True, of=3000), "resnet20"),
    "drift-vit": Drift("vit-6to4", "seed-0", Onward(0, 1e-3, optimizer="adamw", of=1000), "vit"),
    "drift-vit-noisy": Drift("vit-6to4", "seed-0", Onward(0, 1e-3, noisy=True, optimizer="adamw", of=1000), "vit"),
    "drift-mobilenet": Drift("mobilenet-flowers", "torchvision", Onward(0, 3e-4, noisy=True, of=300), "mobilenet-back"),
}
_FIRST, _SECOND = (Onward(200, 3e-4, optimizer="adamw", seed=seed) for seed in (1, 2))
_ROBUST, _CLEAN = Onward(400, 0.05, noisy=True), Onward(150, 0.05)
PAIRS: dict[str, Pair] = {
    "resnet20-near": Pair("resnet20-flowers", "akamaster", Onward(100, 0.01)),
    "resnet20-clean": Pair("resnet20-flowers", "akamaster", _CLEAN),
    "resnet20-robust": Pair("resnet20-flowers", "akamaster", _ROBUST),
    "vit-near": Pair("vit-6to4", "seed-0", Onward(100, 1e-4, optimizer="adamw")),
    "vit-far": Pair("vit-6to4", "seed-0", Onward(300, 3e-4, noisy=True, optimizer="adamw")),
    "vit-siblings": Pair("vit-6to4", "seed-0", _FIRST, _SECOND),
    "vit-siblings-back": Pair("vit-6to4", "seed-0", _SECOND, _FIRST),
    "resnet20-weaker": Pair("resnet20-flowers", "akamaster", "akamaster", _ROBUST),
    "resnet20-siblings": Pair("resnet20-flowers", "akamaster", Onward(100, 0.01, seed=1), Onward(100, 0.01, seed=2)),
    "resnet20-siblings-back": Pair(
        "resnet20-flowers", "akamaster", Onward(100, 0.01, seed=2), Onward(100, 0.01, seed=1)
    ),
    "mobilenet-near": Pair("mobilenet-flowers", "torchvision", Onward(10, 0.0003, noisy=True)),
    "mobilenet-far": Pair("mobilenet-flowers", "torchvision", Onward(40, 0.003, noisy=True)),
    "resnet20": Pair("resnet20-flowers", "akamaster", "bognev"),
    "resnet20-back": Pair("resnet20-flowers-back", "bognev", "akamaster"),
    "turned-near": Pair("resnet20-turned", "akamaster", Onward(100, 0.01)),
    "turned": Pair("resnet20-turned", "akamaster", "bognev"),
    "vit": Pair("vit-6to4", "seed-0", "seed-1"),
    "conv8": Pair("cifar-6to4", "seed-0", "seed-1"),
    "mobilenet": Pair("mobilenet-flowers", "google", "torchvision"),
    "mobilenet-back": Pair("mobilenet-flowers-back", "torchvision", "google"),
    "mnist": Pair("mnist-mlp", "seed-0", "seed-1"),
}
PAIRS |= {key: pair for name, drift in DRIFTS.items() for key, pair in drift.pairs(name).items()}


class Noisy:
    """A split in which noise is added to half of the images."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches that depend only on the seed and their number."""
        first = options.get("skip", 0)
        for number, (inputs, targets) in enumerate(self.split.batches(batch_size, **options), first):
            noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(number))
            noise[::2] = 0
            yield inputs + NOISE * noise, targets


def make_bases(name: str) -> tuple[Bench, nn.Module, nn.Module]:
    """The task's bench, the old and the new base of a pair."""
    pair = PAIRS[name]
    bench = Bench(TASKS[pair.task], OUT)
    old = bench.base(pair.old) if pair.sibling is None else train_on(bench, pair.old, pair.sibling)
    new = bench.base(pair.new) if isinstance(pair.new, str) else train_on(bench, pair.old, pair.new)
    return bench, old, new


def train_on(bench: Bench, base: str, how: Onward) -> nn.Module:
    """A base trained further on its own task: classes of the same images, or its own outputs for MobileNetV2."""
    model = bench.base(base)
    length, key = how.of or how.steps, {**asdict(how), "steps": 0 if how.of else how.steps}
    if not how.of:
        del key["of"]
    label = (base, f"of-{how.of}" if how.of else how.steps, how.lr, how.noisy, how.seed)
    kept = Kept(bench.common / "onward" / "-".join(map(str, label)))
    if kept.read(key) is None:
        images, classes = (bench.pictures, bench.task.before_classes)
        if bench.task.name.startswith("resnet20"):
            images, classes = load_images("cifar10", 32, OUT / "images"), ()
        preprocess = choose_preprocess(load_checkpoint(model), None)
        train = load_data(images, DataOptions(classes=classes), preprocess).train
        if bench.task.name.startswith("mobilenet"):
            train = replace(train, targets=_answer(model, train))
        options = TrainOptions(steps=length, lr=how.lr, optimizer=how.optimizer, seed=how.seed + 77, batch_size=64)
        if how.of:
            options = replace(options, schedule="constant", warmup=0, evaluate_every=SNAPSHOTS[0])
        folder = kept.begin()

        def keep(model: nn.Module, step: int) -> float:
            if step in SNAPSHOTS:
                save_tensors(folder / f"step-{step}.safetensors", _copy(model), {})
            return 0.0

        train_model(model, Noisy(train) if how.noisy else train, options, score=keep if how.of else None)
        save_tensors(folder / "model.safetensors", _copy(model), {})
        kept.finish(key, {})
    file = f"step-{how.steps}.safetensors" if how.of else "model.safetensors"
    model.load_state_dict(load_file(kept.folder / file))
    return model.eval()


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _answer(model: nn.Module, split: Split) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([(model(inputs) / 2).softmax(1) for inputs, _ in split.batches(256)])


def tune(name: str, bench: Bench, old: nn.Module, seed: int, images: str = "") -> nn.Module:
    """The old base fine-tuned at its best rate, on the training images without the validation images.

    With `images` (`with` or `without` the validation images), and for siblings, at one fixed rate.
    """
    pair = PAIRS[name]
    if pair.sibling is None and not images:
        return bench.network(bench.classes, weights_of(bench.tuned(pair.old, seed)))
    label = f"tuned-{images}" if images else "tuned-sibling"
    how, kept = bench.task.tuning, Kept(bench.common / label / f"{name}-{seed}")
    if kept.read({"seed": seed}) is None:
        start = bench.start(old, bench.task.start_head, seed)
        folder = kept.begin()
        options = bench.recipe.override(**how.overrides(max(how.lrs), seed)).finetune
        train = start.data.train
        train_model(start.model, train.join(start.data.validation, "all") if images == "with" else train, options)
        save_tensors(folder / "model.safetensors", _copy(start.model), {})
        kept.finish({"seed": seed}, {})
    return bench.network(bench.classes, load_file(kept.folder / "model.safetensors"))
