"""Accuracy and loss between models: over the line through two of them, or the plane through three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_retarget.data import ImageData, load_data
from hf_retarget.devices import choose_device, in_main_process
from hf_retarget.errors import DataError, FinishedError, ModelError
from hf_retarget.files import hash_tensors
from hf_retarget.graph import PermutationGraph
from hf_retarget.landscape import Basis, Grid, lay_grid, span
from hf_retarget.models import Checkpoint, check_alike, load_checkpoint
from hf_retarget.pipeline.arrange import Arranged, Permute, arrange
from hf_retarget.pipeline.clock import Clock
from hf_retarget.pipeline.inputs import Reference, settle_recipe
from hf_retarget.pipeline.plane_result import (
    IN_PORT,
    PlaneFolder,
    PlaneResult,
    compose_plane,
    find_report,
    show_in_report,
)
from hf_retarget.pipeline.score import SPLITS, check_classes
from hf_retarget.pipeline.start import check_shapes, choose_preprocess, describe_broken, doing
from hf_retarget.pipeline.survey import Diary, Surveyor, survey, take
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

_SIZES = {2: 33, 3: 17}
_MARGINS = {2: 0.0, 3: 0.2}
"""For a line and for a plane, unless somebody says otherwise."""


def plane(
    models: Sequence[Reference] | Mapping[str, Reference],
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    grid: int | None = None,
    margin: float | None = None,
    split: str = "test",
    limit: int | None = None,
    permute: Permute = None,
    graph: PermutationGraph | str | Path | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    lock: bool = True,
    arch: str | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    progress: Progress = SILENT,
    command: str = "",
) -> PlaneResult:
    """Score models and the weights between them: over the line through two, or the plane through three.

    The models have one architecture and heads of one size; a mapping gives them names. BatchNorm statistics are
    estimated anew at every point (`port.bn_batches` of the recipe; 0 mixes the stored ones). `permute` brings models
    into the arrangement of the first: "match" does it for all by their weights, {"tuned": "ported/"} for one with the
    permutation of a port. With `out`, pictures and figures are in that folder from the first coarse grid on;
    `report`, the folder of a port, puts them there into plane/ and the picture into report.html.
    """
    clock = Clock()
    chosen, images = settle_recipe(data, recipe, preset, overrides)
    references = _name_models(models)
    _check_options(split, limit)
    page = find_report(report) if report is not None else None
    if page is not None and out is None:
        out = page.parent / IN_PORT
    folder = PlaneFolder.at(out) if out is not None else None
    accelerator = choose_device(device, precision)
    stack = ExitStack()
    if folder is not None:
        in_main_process(lambda: stack.enter_context(folder.held(resume=resume, overwrite=overwrite, lock=lock)))
    with stack:
        with clock.stage("loading"):
            loaded = _load(references, images, chosen, progress, arch=arch, allow_pickle=allow_pickle, token=token)
        with clock.stage("permuting"):
            arranged = arrange(
                {name: side.in_float32() for name, side in loaded.sides.items()},
                permute,
                loaded.model,
                loaded.data.test.preprocess.input_size,
                graph=graph,
                seed=chosen.port.seed,
                progress=progress,
            )
        count = len(loaded.sides)
        basis = span(arranged.weights, [name for name, _ in loaded.model.named_parameters()], list(loaded.sides))
        points = lay_grid(basis, grid or _SIZES[count], _MARGINS[count] if margin is None else margin)
        part = take(getattr(loaded.data, split), limit, chosen.port.seed)
        surveyor = Surveyor(
            loaded.model, loaded.data, part, loaded.classes, chosen.port, accelerator, workers, progress
        )
        task = _Task(loaded.sides, arranged, basis, points, loaded.data, split, chosen, surveyor, clock, command)
        if folder is not None and resume:
            try:
                in_main_process(lambda: folder.check_finished(task.key, overwrite=overwrite))
            except FinishedError:
                if page is not None and accelerator.is_main_process:
                    show_in_report(page, read_json(folder.path / "plane.json", MAX_DOCUMENT_BYTES))
                raise
        result = task.run(folder, resume=resume)
        if page is not None and accelerator.is_main_process:
            show_in_report(page, result.figures)
        return result


@dataclass(frozen=True)
class _Loaded:
    sides: dict[str, Checkpoint]
    data: ImageData
    model: nn.Module

    @property
    def classes(self) -> int:
        return next(iter(self.sides.values())).num_classes


def _load(
    references: Mapping[str, Reference], images: Any, recipe: Recipe, progress: Progress, **loading: Any
) -> _Loaded:
    """Models that belong together, images that they can tell apart, and a model to compute with."""
    with doing(progress, "loading the models"):
        sides = {name: load_checkpoint(reference, **loading) for name, reference in references.items()}
        check_alike(list(sides.values()))
    first = next(iter(sides.values()))
    with doing(progress, "loading the data"):
        preprocess = choose_preprocess(first, recipe.data.image_size)
        labels = next((side.labels for side in sides.values() if side.labels), None)
        data = load_data(images, recipe.data, preprocess, model_labels=labels, token=loading["token"])
        check_classes(first, data)
    model = first.build()
    check_shapes(model, preprocess, first.num_classes)
    return _Loaded(sides, data, model)


@dataclass(frozen=True)
class _Task:
    sides: Mapping[str, Checkpoint]
    arranged: Arranged
    basis: Basis
    grid: Grid
    data: ImageData
    split: str
    recipe: Recipe
    surveyor: Surveyor
    clock: Clock
    command: str

    @property
    def accelerator(self) -> Accelerator:
        return self.surveyor.accelerator

    def run(self, folder: PlaneFolder | None, *, resume: bool) -> PlaneResult:
        """Score all points, and write a picture whenever a grid is complete."""
        say, writing = self.surveyor.progress.say, self.accelerator.is_main_process
        diary = Diary.begin(folder.diary if folder else None, self.key, resume=resume, writing=writing)
        self.accelerator.wait_for_everyone()
        for note in self._notes():
            say(note)
        if diary.done:
            say(f"going on: {len(diary.done):,} of {len(self.grid):,} points are known")

        def after(level: int) -> None:
            if folder is not None and writing:
                folder.write(self._compose(diary, level))
                across, down = (len(each) for each in self.grid.axes[level])
                size = f"{across} × {down}" if down > 1 else f"{across}"
                say(f"{folder.picture}: {size} of {len(self.grid.x)}{f' × {len(self.grid.y)}' * (down > 1)} points")

        with self.clock.stage("scoring"):
            survey(self.grid, self.basis.weights, self.surveyor, diary, after)
        result = PlaneResult(self._compose(diary, len(self.grid.levels) - 1))
        if folder is not None and writing:
            folder.write(result.figures)
            folder.diary.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        return result

    def _compose(self, diary: Diary, level: int) -> dict[str, Any]:
        facts = {
            "data": {
                "name": self.data.name,
                "revision": self.data.revision,
                "fingerprint": self.data.fingerprint,
                "split": self.split,
                "images": len(self.surveyor.split),
                "classes": self.surveyor.classes,
            },
            "options": self._options(),
            "device": self.accelerator.device.type,
            "notes": [*self._notes(), *describe_broken(self.data)],
            "seconds": {name: round(value, 3) for name, value in self.clock.seconds.items()},
            "command": self.command,
            "run": self.key,
        }
        return compose_plane(self.sides, self.arranged.permuted, self.basis, self.grid, diary.done, level, facts)

    def _options(self) -> dict[str, Any]:
        port = self.recipe.port
        return {
            "bn_batches": port.bn_batches,
            "batch_size": port.batch_size,
            "eval_batch": port.eval_batch,
            "seed": port.seed,
            "precision": str(self.accelerator.mixed_precision),
        }

    @property
    def key(self) -> dict[str, Any]:
        """All that the figures depend on."""
        hashes = [hash_tensors(weights)[:20] for weights in self.arranged.weights]
        return {
            "models": dict(zip(self.sides, hashes, strict=True)),
            "data": self.data.fingerprint,
            "split": self.split,
            "images": len(self.surveyor.split),
            "grid": [len(self.grid.x), self.grid.x[0], self.grid.x[-1]],
            **self._options(),
        }

    def _notes(self) -> list[str]:
        notes = list(self.data.notes)
        if self.basis.is_line and self.basis.distances[0][1] == 0.0:
            notes.append("the two models have the same weights: nothing changes between them")
        for (name, _), how in zip(self.sides.items(), self.arranged.permuted, strict=True):
            if how is not None:
                words = "weight matching" if how["by"] == "match" else how["by"]
                notes.append(f"{name} is permuted by {words}: {how['moved']:.0%} of its neurons moved")
        return notes


def _name_models(models: Sequence[Reference] | Mapping[str, Reference]) -> dict[str, Reference]:
    """Each model under a name: as given, or the last part of its reference that tells them apart."""
    if not isinstance(models, Mapping):
        models = dict(zip(name_references(models), models, strict=True))
    if len(models) not in _SIZES:
        raise ModelError(f"{len(models)} models were given; two make a line, three a plane")
    return dict(models)


def name_references(references: Sequence[Reference]) -> list[str]:
    """Short names that tell references apart.

    Example:
        >>> name_references(["runs/1/tuned", "runs/2/tuned", "timm/resnet18.a1_in1k"])
        ['1/tuned', '2/tuned', 'timm/resnet18.a1_in1k']
        >>> name_references(["old/", "old/"])
        ['old', 'old (2)']
    """
    texts = [type(each).__name__ if isinstance(each, nn.Module) else str(each).rstrip("/") for each in references]
    parts = [text.split("/") for text in texts]
    length = 1
    while length < max(map(len, parts), default=1) and len({tuple(each[-length:]) for each in parts}) < len(set(texts)):
        length += 1
    names: list[str] = []
    for each in parts:
        name = "/".join(each[-length:]) or "/"
        same = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({same + 1})" if same else name)
    return names


def _check_options(split: str, limit: int | None) -> None:
    if split not in SPLITS:
        raise DataError(f"there is no split '{split}'; choose one of {', '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; score on at least one image")
