"""`rt.finetune` and `hf-retarget finetune`: load a model, choose a head, train, score and save."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_retarget.data import ImageData, Preprocess, Split, check_classes, choose_preprocess, load_data
from hf_retarget.errors import PortError, RecipeError
from hf_retarget.evaluation.scorer import Score, Scorer, Teacher
from hf_retarget.files import copy_folder, save_tensors, write_json, write_text
from hf_retarget.models import Checkpoint, Reference, head_names, load_checkpoint, save_model
from hf_retarget.models.classifier import check_shapes
from hf_retarget.models.heads import check_head, choose_head, make_model, match_names
from hf_retarget.names import CARD, FINETUNE, INITIAL_HEAD, RECIPE
from hf_retarget.porting.result import CURVE, name_library, save_recipe
from hf_retarget.porting.resume import ENVIRONMENT, PlaceArguments, Workplace
from hf_retarget.publish.card import write_tuned_card
from hf_retarget.publish.contents import shorten_all
from hf_retarget.recipe import Recipe, TrainOptions, finish_recipe
from hf_retarget.run import (
    Run,
    RunArguments,
    check_arguments,
    describe_environment,
    in_main_process,
    list_versions,
    pick,
)
from hf_retarget.training import History, TrajectoryRecorder, train_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/finetune/1"
_PINNED = ("reference", "architecture", "revision", "hub_id", "base_models", "license", "license_link", "hashes")
_TRAJECTORY = "trajectory"
_CHECKPOINTS = 10  # per run, unless the options set an interval


class FinetuneArguments(RunArguments, PlaceArguments, total=False):
    """Further options of `finetune`."""

    head: str
    record: int | None
    num_classes: int | None
    teacher: Reference | None


@dataclass(frozen=True, eq=False)
class FinetuneResult:
    """A fine-tuned model, its folder and its history."""

    model: nn.Module = field(repr=False)
    folder: Path
    history: History = field(repr=False)
    validation: float | None
    """Top-1 accuracy on validation images after the last step; None without such images."""
    test: Score = field(repr=False)
    head: str
    """The kind of initial head: `keep`, `fresh` or `zero`."""
    document: dict[str, Any] = field(repr=False)
    """The content of finetune.json."""


def finetune(
    model: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    out: str | Path,
    **options: Unpack[FinetuneArguments],
) -> FinetuneResult:
    """Fine-tune a model on the training images of `data`, or of the recipe, and save it to the folder `out`.

    `head` is the initial classifier (auto, keep, fresh, zero). `record` saves the weights of every N-th step to
    OUT/trajectory. With a `teacher`, the model learns its answers, and the images need no labels. `out` appears only
    when complete; an interrupted run continues with `resume=True`, to the same weights. The other options are those of
    `port`.
    """
    check_arguments("finetune", options, FinetuneArguments)
    chosen, images = finish_recipe(data, recipe)
    if not (chosen.finetune.steps or chosen.finetune.epochs):
        how = "give --steps or --epochs, or a preset that sets them (pets@source)"
        raise RecipeError(f"recipe '{chosen.name}' does not say how long to fine-tune; {how}")
    head = options.get("head", "auto")
    check_head(head)
    read = (model, chosen.data.reference, options.get("teacher"))
    run, pictures = Run(**pick(options, Run)), (chosen.data.reference,)
    place = Workplace.at(out, inputs=read, images=pictures, **pick(options, PlaceArguments))
    _ = run.accelerator  # before the lock, which only the main process holds
    with place.held():
        with run.stage("loading", "loading the model"):
            checkpoint = load_checkpoint(model, num_classes=options.get("num_classes"), **run.loading)
            named = options.get("teacher")
            teacher = None if named is None else load_checkpoint(named, **run.loading)
        with run.stage("loading", "loading the data"):
            start = prepare_start(checkpoint, images, chosen, head, run, teacher)
        if teacher is not None:
            start = _learn_from(teacher, start, chosen, run)
        work = _Finetuning(chosen, checkpoint, start, place, run, options.get("record"), teacher)
        work.introduce()
        result = work.measure(work.train())
        place.finish(lambda folder: work.write(result, folder), run)
        return result


@dataclass(frozen=True, eq=False)
class Start:
    """A model with a matching head, and the images."""

    model: nn.Module
    data: ImageData
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    head: str
    why: str
    initial_head: dict[str, Tensor]
    """A copy of the head, which cannot be recovered from the tuned model."""
    train: Split
    """The training images, with labels or a teacher's answers as targets."""


def prepare_start(
    checkpoint: Checkpoint,
    images: Any,
    recipe: Recipe,
    head: str = "auto",
    run: Run | None = None,
    teacher: Checkpoint | None = None,
) -> Start:
    """Load the images with labels in the model's (or teacher's) order, and give the checkpoint a matching head."""
    token, asked = (run.token, run.preprocess) if run else (None, None)
    preprocess = choose_preprocess(checkpoint, recipe.data.image_size, asked)
    if teacher is None:
        data = _load(checkpoint, images, recipe, preprocess, head, token)
    else:
        data = load_data(images, recipe.data, preprocess, model_labels=teacher.labels, token=token, need_labels=False)
        check_classes(data.name, data.classes, data.labels, teacher.reference, teacher.num_classes)
        data = replace(data, classes=teacher.num_classes)
    preprocess = data.train.preprocess
    kind, why = choose_head(checkpoint, data.classes, data.labels, head)
    if teacher is not None and kind == "keep" and head == "auto" and checkpoint.labels != teacher.labels:
        kind, why = "zero", "the teacher has other labels"
    model = make_model(checkpoint, data.classes, kind, recipe.finetune.seed)
    check_shapes(model, preprocess.input_size, data.classes)
    state = model.state_dict()
    names = head_names(replace(checkpoint, weights=state, num_classes=data.classes))
    labels = checkpoint.labels if kind == "keep" and checkpoint.labels and teacher is None else data.labels
    initial_head = {name: state[name].detach().clone() for name in names}
    return Start(model, data, preprocess, labels, kind, why, initial_head, data.train)


def _learn_from(teacher: Checkpoint, start: Start, recipe: Recipe, run: Run) -> Start:
    """Use the teacher's answers as targets, and as labels if there are none."""
    model, own, data = teacher.build(), choose_preprocess(teacher, recipe.data.image_size, run.preprocess), start.data
    own = own.fit(data.train.item(0))
    check_shapes(model, own.input_size, teacher.num_classes)
    answers = Teacher(Scorer(model, data, teacher.num_classes, recipe.port, run), teacher.in_float32())
    seen = {name: replace(getattr(data, name), preprocess=own) for name in ("train", "validation", "test")}
    train = replace(data.train, targets=answers.teach(seen["train"], "teacher").targets)
    if not data.labelled:
        told = {name: replace(getattr(data, name), targets=answers.label(each).targets) for name, each in seen.items()}
        data = replace(data, train=told["train"], validation=told["validation"], test=told["test"])
    return replace(start, data=data, train=train)


def _load(
    checkpoint: Checkpoint, images: Any, recipe: Recipe, preprocess: Preprocess, head: str, token: str | None
) -> ImageData:
    """Load the images, with labels in the model's order if its head is kept."""
    name = f"'{checkpoint.reference}' (which keeps its head)"
    if head == "keep":
        return load_data(images, recipe.data, preprocess, model_labels=checkpoint.labels, model=name, token=token)
    found = load_data(images, recipe.data, preprocess, token=token)
    if head == "auto" and found.labels and checkpoint.labels:
        numbers = match_names(found.labels, checkpoint.labels)
        if numbers is not None and numbers != sorted(numbers):
            return load_data(images, recipe.data, preprocess, model_labels=checkpoint.labels, model=name, token=token)
    return found


@dataclass(frozen=True, eq=False)
class _Finetuning:
    recipe: Recipe
    checkpoint: Checkpoint
    start: Start
    place: Workplace
    run: Run
    record: int | None
    teacher: Checkpoint | None

    def introduce(self) -> None:
        """Show notes on the run, and create its workplace."""
        start = self.start
        for note in (*self.checkpoint.notes, *start.data.notes, f"head: {start.head} ({start.why})"):
            self.run.progress.say(note)
        self.place.begin(self.key, self.run)
        # A model that cannot be saved should fail before training, not after it.
        in_main_process(lambda: self.save_model(start.model, self.place.result))

    def train(self) -> History:
        data, options = self.start.data, self.options
        recorder = TrajectoryRecorder(self.trajectory, self.record) if self.record is not None else None

        def score(model: nn.Module, step: int) -> float:
            return self.scorer.score(data.validation).top1

        return train_model(
            self.start.model,
            self.start.train,
            options,
            self.run,
            checkpoint=self.place.hidden / self.place.unfinished,
            recorder=recorder,
            score=score if len(data.validation) else None,
        )

    def measure(self, history: History) -> FinetuneResult:
        self.start.model.eval()
        test = self.scorer.score(self.start.data.test)
        validation = history.scores[-1][1] if history.scores else None
        for note in self.start.data.broken_notes:
            self.run.progress.say(note)
        document = self.document(history, validation, test)
        return FinetuneResult(self.start.model, self.place.folder, history, validation, test, self.start.head, document)

    def write(self, result: FinetuneResult, folder: Path) -> None:
        start = self.start
        self.save_model(result.model, folder)
        try:
            save_tensors(folder / INITIAL_HEAD, start.initial_head, {"head": start.head})
            save_recipe(self.recipe, folder / RECIPE)
            write_json(folder / FINETUNE, result.document)
            curve = CURVE if (folder / CURVE).is_file() else None
            write_text(
                folder / CARD, write_tuned_card(result.document, library=name_library(self.checkpoint), curve=curve)
            )
            if self.trajectory.is_dir():
                copy_folder(self.trajectory, folder / _TRAJECTORY)  # not moved: resuming may still need it
        except OSError as error:
            raise PortError(f"cannot write to '{folder}': {error}") from error

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Save the model; its configuration gets the input size, and preprocessing entries it lacked."""
        used, config = self.start.preprocess.config, self.checkpoint.config
        save_model(
            folder,
            model.state_dict(),
            self.checkpoint,
            num_classes=self.start.data.classes,
            labels=self.start.labels,
            config={name: value for name, value in used.items() if name == "input_size" or not config.get(name)},
        )

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.start.model, self.start.data, self.start.data.classes, self.recipe.port, self.run)

    @property
    def options(self) -> TrainOptions:
        """The recipe's training options, with a default interval of checkpoints."""
        options = self.recipe.finetune
        steps = options.total_steps(len(self.start.data.train))
        return replace(options, checkpoint_every=options.checkpoint_every or -(-steps // _CHECKPOINTS))

    @property
    def trajectory(self) -> Path:
        return self.place.hidden / _TRAJECTORY

    @property
    def key(self) -> dict[str, Any]:
        """Everything the result depends on."""
        options = asdict(self.recipe.finetune)
        del options["checkpoint_every"]
        return {
            "model": dict(self.checkpoint.hashes),
            "data": self.start.data.fingerprint,
            "finetune": options,
            "head": self.start.head,
            "teacher": dict(self.teacher.hashes) if self.teacher else None,
            "precision": self.run.precision,
            "record": self.record,
            ENVIRONMENT: describe_environment(self.run.accelerator.device.type),
        }

    def document(self, history: History, validation: float | None, test: Score) -> dict[str, Any]:
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
            "model": {name: value for name, value in asdict(checkpoint.facts).items() if name in _PINNED},
            "data": {
                "name": data.name,
                "revision": data.revision,
                "fingerprint": data.fingerprint,
                "classes": data.classes,
                "labels": list(self.start.labels) if self.start.labels else None,
                "images": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
                "notes": [*data.notes, *data.broken_notes],
                "preprocess": self.start.preprocess.facts,
                "made": self.start.preprocess.sentence,
            },
            "labelled": data.labelled,
            "teacher": self.teacher.reference if self.teacher else None,
            "options": {
                "record": self.record,
                "device": self.run.accelerator.device.type,
                "precision": self.run.precision,
                "recipe": self.recipe.to_dict(),
            },
            "command": self.run.command,
            "run": self.key,
            "versions": list_versions(),
        }
        return dict(shorten_all(document))  # without local paths, since it may be published
