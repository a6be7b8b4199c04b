"""The images, bases and fine-tunings of one task, each made once and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.data import ImageData
from hf_retarget.files import save_tensors
from hf_retarget.models import load_checkpoint
from hf_retarget.porting.finetune import Start, prepare_start
from hf_retarget.recipe import Recipe
from quality.curves import follow, last_validation
from quality.images import SHARED, Splits, load_images
from quality.networks import seeded
from quality.store import Kept, short_hash
from quality.task import Task, Training

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Bench:
    """A task and the folder of its work."""

    task: Task
    out: Path
    say: Callable[[str], None] = print

    @property
    def common(self) -> Path:
        """The folder shared by the tasks of a family."""
        return self.out / self.task.folder

    @cached_property
    def pictures(self) -> Splits:
        """The images."""
        return load_images(self.task.images, self.task.size, self.out / "images")

    @cached_property
    def data(self) -> ImageData:
        """The images of the fine-tuning, divided into splits, with numbered labels."""
        return self.start(self.network(self.classes), "keep").data

    @cached_property
    def classes(self) -> int:
        """The number of classes of the fine-tuning."""
        return len(self.task.classes) or len(self.pictures["train"].classes)

    @property
    def recipe(self) -> Recipe:
        """The task's images and sizes, as a recipe."""
        task = self.task
        values: dict[str, Any] = {
            "data.classes": task.classes,
            "data.limit": task.limit,
            "port.steps": task.steps,
            "port.batch_size": task.batch,
            "port.grad_batches": task.grad_batches,
            "port.bn_batches": task.bn_batches,
            "port.control": "none",
        }
        if task.head:
            values["port.head"] = task.head
        return Recipe(task.name).override(**values)

    def network(self, classes: int, weights: Weights | None = None, seed: int = 0) -> nn.Module:
        """A network of this task, with these weights or random ones."""
        network = seeded(lambda: self.task.network(classes), seed)
        if weights is not None:
            network.load_state_dict(weights)
        return network

    def start(self, model: nn.Module, head: str, seed: int = 0) -> Start:
        """The start of a fine-tuning: the network with a head for these images."""
        recipe = self.recipe.override(**{"finetune.seed": seed})
        return prepare_start(load_checkpoint(model), self.pictures, recipe, head)

    # ---- bases

    def base(self, name: str) -> nn.Module:
        """An old or new base: random, from a file, or trained here once."""
        task, (kind, _, number) = self.task, name.partition("-")
        if name in task.files:
            found = load_file(SHARED / "weights" / task.files[name])
            network = self.network(task.file_classes)
            network.load_state_dict({**network.state_dict(), **found})
            return network
        if task.before is None:
            return self.network(self.classes, seed=1000 + int(number))
        kept, key = Kept(self.common / "bases" / name), self._key(task.before, name)
        if kept.read(key) is None:
            self._train(name, task.before, kept, key, share=0.1 if kind == "tenth" else 1.0, seed=int(number))
        return self.network(len(task.before_classes), load_file(kept.folder / "model.safetensors"))

    def _train(self, name: str, how: Training, kept: Kept, key: dict[str, Any], share: float, seed: int) -> None:
        self.say(f"training the base {name}: {how.steps} steps")
        recipe = self.recipe.override(**{"data.classes": self.task.before_classes, **how.overrides(how.lrs[0], seed)})
        if share < 1:
            of = self.task.before_classes
            names = self.pictures["train"].classes
            there = sum(names[number] in of for number in self.pictures["train"].targets)
            recipe = recipe.override(**{"data.limit": round(share * (self.task.limit or there))})
        folder, began = kept.begin(), time.perf_counter()
        network = self.network(len(self.task.before_classes), seed=1000 + seed)
        result = rt.finetune(network, self.pictures, recipe=recipe, out=folder / "trained", head="keep")
        weights = {name: tensor.detach().clone() for name, tensor in result.model.state_dict().items()}
        save_tensors(folder / "model.safetensors", weights, {})
        kept.finish(key, {"test": result.test.top1, "seconds": round(time.perf_counter() - began, 1)})

    # ---- fine-tunings

    def tune(self, base: str, seed: int, lr: float, how: Training | None = None) -> dict[str, Any]:
        """Fine-tune a base with one learning rate, and score it at several steps."""
        how = how or self.task.tuning
        label = "tuned" if how == self.task.tuning else f"tuned-{how.steps}x{how.batch}"
        network = self.base(base)
        kept = Kept(self.common / label / f"{base}-seed-{seed}-lr-{lr:g}")
        key = {**self._key(how, base), "seed": seed, "lr": lr, "start": short_hash(network.state_dict())}
        if (done := kept.read(key)) is None:
            self.say(f"fine-tuning {base}, seed {seed}, lr {lr:g}: {how.steps} steps of {how.batch}")
            start = self.start(network, self.task.start_head, seed)
            folder = kept.begin()
            save_tensors(folder / "initial_head.safetensors", start.initial_head, {})
            points = self.task.points if how == self.task.tuning else (how.steps,)
            record = how.steps // self.task.steps if how == self.task.tuning and self.task.record else None
            options = self.recipe.override(**how.overrides(lr, seed)).finetune
            facts = follow(start.model, start.data, options, points, folder, record=record, gap=self.task.gap)
            done = kept.finish(key, facts)
        return {**done, "folder": str(kept.folder)}

    def tuned(self, base: str, seed: int) -> dict[str, Any]:
        """The fine-tuning at the learning rate chosen on validation images with the first base or seed."""
        rates = self.task.tuning.lrs
        # Bases trained here use the rate of the first; a base from a file has its own seeds.
        first = base if self.task.files else f"{base.partition('-')[0]}-0"
        tried = {lr: self.tune(first, 0, lr) for lr in rates} if len(rates) > 1 else {}
        best = max(rates, key=lambda lr: last_validation(tried[lr]) if tried else lr)
        return self.tune(base, seed, best)

    def _key(self, how: Training, name: str) -> dict[str, Any]:
        task = self.task
        return {
            "base": name,
            "how": vars(how) | {"lrs": None},
            "points": list(task.points),
            "classes": list(task.classes),
            "before": vars(task.before) if task.before else None,
            "head": task.start_head,
            "limit": task.limit,
        }


def weights_of(done: dict[str, Any]) -> Weights:
    """The weights of a fine-tuning."""
    return load_file(Path(done["folder"]) / "model.safetensors")
