"""Fine-tune a model: load, give it a head, train, score, save."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from hf_retarget.data import Split
from hf_retarget.devices import choose_device, in_main_process
from hf_retarget.errors import PortError, RecipeError
from hf_retarget.evaluate import Score, evaluate
from hf_retarget.files import copy_folder, save_tensors, write_json, write_text
from hf_retarget.models import Checkpoint, load_checkpoint, save_model
from hf_retarget.pipeline.card import card_of_tuning, publish_recipe
from hf_retarget.pipeline.start import Start, describe_broken, doing, prepare_start
from hf_retarget.pipeline.versions import describe_environment, list_versions
from hf_retarget.pipeline.workplace import ENVIRONMENT, Workplace
from hf_retarget.progress import SILENT, Progress
from hf_retarget.publish.paths import shorten_all
from hf_retarget.recipe import Recipe
from hf_retarget.training.loop import History, finetune
from hf_retarget.training.options import TrainOptions
from hf_retarget.training.recorder import TrajectoryRecorder

FORMAT = "hf-retarget/finetune/1"
INITIAL_HEAD = "initial_head.safetensors"
"""The head that the fine-tuning began with: what the port's head policy `given` wants."""

_TRAJECTORY = "trajectory"
_CHECKPOINTS = 10  # of a run, if its options do not say how often


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A fine-tuned model, where it was saved, and how it came about."""

    model: nn.Module = field(repr=False)
    folder: Path
    history: History = field(repr=False)
    validation: float | None
    """The top-1 accuracy on validation after the last step; None without validation images."""
    test: Score = field(repr=False)
    head: str
    """How the head began: `keep`, `fresh` or `zero`."""
    document: dict[str, Any] = field(repr=False)
    """What finetune.json says."""


def train(
    reference: str | Path | nn.Module,
    data: Any = "",
    *,
    recipe: Recipe,
    out: str | Path,
    arch: str | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    head: str = "auto",
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    record: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    lock: bool = True,
    command: str = "",
    progress: Progress = SILENT,
) -> TrainResult:
    """Fine-tune a model on the training images, and save it to the folder `out`; without `data`, those of the recipe.

    `record` keeps the weights of every so many steps in OUT/trajectory. A run that was killed goes on with `resume`,
    to the same weights; until the end, `out` is not there.
    """
    if not (recipe.finetune.steps or recipe.finetune.epochs):
        raise RecipeError(f"recipe '{recipe.name}' does not say how long to fine-tune; give --steps or --epochs")
    if isinstance(data, (str, Path)) and str(data):
        recipe = recipe.override(**{"data.reference": str(data)})
    place = Workplace.at(out)
    accelerator = choose_device(device, precision)
    with place.held(resume=resume, overwrite=overwrite, lock=lock):
        with doing(progress, "loading the model"):
            checkpoint = load_checkpoint(
                reference, arch=arch, num_classes=num_classes, allow_pickle=allow_pickle, token=token
            )
        with doing(progress, "loading the data"):
            start = prepare_start(checkpoint, data, recipe.data, head=head, seed=recipe.finetune.seed, token=token)
        run = _Run(recipe, checkpoint, start, place, accelerator, workers, progress, {"record": record}, command)
        run.introduce(resume, overwrite)
        result = run.measure(run.train(record))
        run.save(result)
        return result


@dataclass(frozen=True)
class _Run:
    recipe: Recipe
    checkpoint: Checkpoint
    start: Start
    place: Workplace
    accelerator: Accelerator
    workers: int
    progress: Progress
    more: dict[str, Any]
    """Other options that decide about the result."""
    command: str = ""

    def introduce(self, resume: bool, overwrite: bool) -> None:
        """Say what will be done, and make a place for it."""
        start = self.start
        for note in (*start.data.notes, f"head: {start.head} ({start.why})"):
            self.progress.say(note)

        def begin() -> None:
            self.place.open(self.key, resume=resume, overwrite=overwrite, say=self.progress.say)
            self._save_model(start.model)  # what cannot be saved should fail before the training, not after it

        in_main_process(begin)

    def train(self, record: int | None) -> History:
        data, options = self.start.data, self._options()
        recorder = TrajectoryRecorder(self._trajectory, record) if record is not None else None

        def score(model: nn.Module, step: int) -> float:
            return self._score(model, data.validation).top1

        return finetune(
            self.start.model,
            data.train,
            options,
            accelerator=self.accelerator,
            progress=self.progress,
            checkpoint=self.place.state,
            recorder=recorder,
            score=score if len(data.validation) else None,
            workers=self.workers,
        )

    def measure(self, history: History) -> TrainResult:
        model = self.start.model.eval()
        test = self._score(model, self.start.data.test)
        validation = history.scores[-1][1] if history.scores else None
        for note in describe_broken(self.start.data):
            self.progress.say(note)
        document = self._document(history, validation, test)
        return TrainResult(model, self.place.out, history, validation, test, self.start.head, document)

    def save(self, result: TrainResult) -> None:
        in_main_process(lambda: self._write(result))

    def _write(self, result: TrainResult) -> None:
        folder, start = self.place.fresh_result(), self.start
        self._save_model(result.model)
        try:
            save_tensors(folder / INITIAL_HEAD, start.initial_head, {"head": start.head})
            publish_recipe(self.recipe, folder / "recipe.yaml")
            write_json(folder / "finetune.json", result.document)
            write_text(folder / "README.md", card_of_tuning(result.document, self.checkpoint, folder))
            if self._trajectory.is_dir():
                copy_folder(self._trajectory, folder / _TRAJECTORY)  # not moved: it may still be needed to resume
        except (OSError, SafetensorError) as error:
            raise PortError(f"cannot write to '{folder}': {error}") from error
        self.place.finish()

    def _save_model(self, model: nn.Module) -> None:
        save_model(
            self.place.result,
            model.state_dict(),
            self.checkpoint,
            num_classes=self.start.data.classes,
            labels=self.start.labels,
            config=_preprocessing(self.checkpoint, self.start),
        )

    def _score(self, model: nn.Module, split: Split) -> Score:
        size = self.recipe.port.eval_batch
        return evaluate(
            model,
            split.batches(size, workers=self.workers),
            self.start.data.classes,
            accelerator=self.accelerator,
            progress=self.progress,
            total=-(-len(split) // size),
        )

    def _options(self) -> TrainOptions:
        """Those of the recipe; without a word about checkpoints, there are some nevertheless."""
        options = self.recipe.finetune
        steps = options.total_steps(len(self.start.data.train))
        return replace(options, checkpoint_every=options.checkpoint_every or -(-steps // _CHECKPOINTS))

    @property
    def _trajectory(self) -> Path:
        return self.place.hidden / _TRAJECTORY

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that the result depends on."""
        options = asdict(self.recipe.finetune)
        del options["checkpoint_every"]
        key = {
            "model": dict(self.checkpoint.hashes),
            "data": self.start.data.fingerprint,
            "finetune": options,
            "head": self.start.head,
            "precision": str(self.accelerator.mixed_precision),
            **self.more,
            ENVIRONMENT: describe_environment(),
        }
        return dict(json.loads(json.dumps(key)))  # as it comes back from a file: tuples are lists

    def _document(self, history: History, validation: float | None, test: Score) -> dict[str, Any]:
        checkpoint, data = self.checkpoint, self.start.data
        figures = {
            "validation": {"top1": validation, "curve": [list(each) for each in history.scores]},
            "test": {"top1": test.top1, "top5": test.top5, "loss": test.loss, "images": test.count},
            "seconds": round(history.seconds, 1),
            "losses": list(history.losses),
        }
        document = {
            "format": FORMAT,
            "figures": figures,
            "head": {"kind": self.start.head, "why": self.start.why, "tensors": list(self.start.initial_head)},
            "model": {
                "reference": checkpoint.reference,
                "architecture": checkpoint.architecture,
                "revision": checkpoint.revision,
                "hub_id": checkpoint.hub_id,
                "base_models": list(checkpoint.base_models),
                "license": checkpoint.config.get("license"),
                "license_link": checkpoint.config.get("license_link"),
                "hashes": dict(checkpoint.hashes),
            },
            "data": {
                "name": data.name,
                "revision": data.revision,
                "fingerprint": data.fingerprint,
                "classes": data.classes,
                "labels": list(self.start.labels) if self.start.labels else None,
                "images": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
                "notes": [*data.notes, *describe_broken(data)],
            },
            "options": {
                **self.more,
                "device": self.accelerator.device.type,
                "precision": str(self.accelerator.mixed_precision),
                "recipe": self.recipe.to_dict(),
            },
            "command": self.command,
            "run": self.key,
            "versions": list_versions(),
        }
        return dict(shorten_all(document))  # it goes to others: the paths of this machine do not


def _preprocessing(checkpoint: Checkpoint, start: Start) -> dict[str, Any]:
    """What the model's configuration should say about images: the size they had, and what it did not say before."""
    used = asdict(start.preprocess)
    return {name: value for name, value in used.items() if name == "input_size" or not checkpoint.config.get(name)}
