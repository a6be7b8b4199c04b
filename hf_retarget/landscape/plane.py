"""`rt.plane` and `hf-retarget plane`: score models and the weights between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_retarget.data import ImageData, Split, check_classes, choose_preprocess, load_data
from hf_retarget.errors import DataError, FinishedError, ModelError, NotFiniteError, PermutationError, RetargetError
from hf_retarget.evaluation.evaluate import check_split
from hf_retarget.evaluation.scorer import Scorer
from hf_retarget.files import hash_tensors
from hf_retarget.graph import Permutation, PermutationGraph, load_permutation
from hf_retarget.landscape.geometry import Tensors, lay_grid, span
from hf_retarget.landscape.result import (
    IN_PORT,
    Figures,
    PlaneFolder,
    PlaneResult,
    Surveyed,
    find_report,
    show_in_report,
)
from hf_retarget.matching.methods import match
from hf_retarget.models import Checkpoint, check_alike, load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.names import PERMUTATION, PLANE
from hf_retarget.porting.inputs import Reference, trace_model
from hf_retarget.porting.resume import PlaceArguments
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments, doing_now, in_main_process, pick
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json
from hf_retarget.words import shorten_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SIZES = {2: 33, 3: 17}
_MARGINS = {2: 0.0, 3: 0.2}
"""Defaults for a line and for a plane."""
_NOTHING: Figures = {"loss": None, "top1": 0.0, "top5": None}
"""Of a model that answers with NaN: none of its answers is right."""

MATCH = "match"

Permute = str | Mapping[str, str | Path | Permutation] | None
"""`match`: all models but the first; else from names of models to `match`, a permutation, its file or a port."""


class PlaneArguments(RunArguments, PlaceArguments, total=False):
    """Options of a plane besides models, data, recipe and folder."""

    preset: str | None
    overrides: Mapping[str, Any] | None
    grid: int | None
    margin: float | None
    split: str
    limit: int | None
    permute: Permute
    graph: PermutationGraph | str | Path | None
    report: str | Path | None


def plane(
    models: Sequence[Reference] | Mapping[str, Reference],
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    **options: Unpack[PlaneArguments],
) -> PlaneResult:
    """Score models and the weights between them: over the line through two, or the plane through three.

    The models have one architecture and heads of one size; a mapping gives them names. BatchNorm statistics are
    re-estimated at every point (`port.bn_batches` of the recipe; 0 mixes the stored ones). With `out`, pictures and
    figures are in that folder from the first coarse grid on. Further options:

    - `grid`: points along a side (33 for a line, 17 for a plane). `margin`: how far beyond the models to look.
    - `split` and `limit`: the images to score on. `graph`: that of a permutation, if it need not be traced.
    - `permute` brings models into the arrangement of the first: "match" does it for all by their weights,
      {"tuned": "ported/"} for one with the permutation of a port.
    - `report`, the folder of a port, puts the figures into its plane/ and the picture into its report.html.
    - `resume`, `overwrite`, `lock`, `device`, `precision` and the others are as in `port`.
    """
    check_arguments("plane", options, PlaneArguments)
    run = Run(**pick(options, Run))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    references, split, limit = _name_models(models), options.get("split", "test"), options.get("limit")
    check_split(split)
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; score on at least one image")
    report = options.get("report")
    page = find_report(report) if report is not None else None
    if page is not None and out is None:
        out = page.parent / IN_PORT
    folder = PlaneFolder.at(out, **pick(options, PlaceArguments)) if out is not None else None
    _ = run.accelerator  # before the lock: among several processes only the first holds it
    with ExitStack() as stack:
        if folder is not None:
            in_main_process(lambda: stack.enter_context(folder.held()))
        sides, scorer = _load(references, images, chosen, run)
        with run.clock.stage("permuting"):
            weights = {name: side.in_float32() for name, side in sides.items()}
            arranged = arrange(weights, options.get("permute"), scorer, options.get("graph"), run)
        basis = span(arranged.weights, [name for name, _ in scorer.model.named_parameters()], list(sides))
        margin = options.get("margin")
        margin = _MARGINS[len(sides)] if margin is None else margin
        points = lay_grid(basis, options.get("grid") or _SIZES[len(sides)], margin)
        part = getattr(scorer.data, split).take(limit, chosen.port.seed)
        survey = _Survey(Surveyed(sides, arranged.permuted, basis, points), scorer, split, part, folder)
        try:
            result = survey.run()
        except FinishedError:
            if page is not None and folder is not None and run.is_main:
                show_in_report(page, read_json(folder.path / PLANE, MAX_DOCUMENT_BYTES))
            raise
        if page is not None and run.is_main:
            show_in_report(page, result.figures)
        return result


def _name_models(models: Sequence[Reference] | Mapping[str, Reference]) -> dict[str, Reference]:
    """Each model under a name: as given, or the last part of its reference that tells them apart."""
    if not isinstance(models, Mapping):
        texts = [type(each).__name__ if isinstance(each, nn.Module) else str(each) for each in models]
        models = dict(zip(shorten_names(texts), models, strict=True))
    if len(models) not in _SIZES:
        raise ModelError(f"{len(models)} models were given; two make a line, three a plane")
    return dict(models)


def _load(
    references: Mapping[str, Reference], images: Any, recipe: Recipe, run: Run
) -> tuple[dict[str, Checkpoint], Scorer]:
    """Models that fit together, and a scorer with images for them."""
    with run.stage("loading", "loading the models"):
        sides = {name: load_checkpoint(reference, **run.loading) for name, reference in references.items()}
        check_alike(list(sides.values()))
    first = next(iter(sides.values()))
    with run.stage("loading", "loading the data"):
        preprocess = choose_preprocess(first, recipe.data.image_size)
        labels = next((side.labels for side in sides.values() if side.labels), None)
        data: ImageData = load_data(images, recipe.data, preprocess, model_labels=labels, token=run.token)
        check_classes(data.name, data.classes, data.labels, first.reference, first.num_classes)
        model = first.build()
        check_shapes(model, preprocess.input_size, first.num_classes)
    return sides, Scorer(model, data, first.num_classes, recipe.port, run)


@dataclass(frozen=True)
class _Survey:
    found: Surveyed
    scorer: Scorer
    split: str
    images: Split
    folder: PlaneFolder | None

    def run(self) -> PlaneResult:
        """Score all points that are not known yet, and write a picture whenever a grid is complete."""
        run, known, grid, folder = self.scorer.run, self.found.known, self.found.grid, self.folder
        if folder is not None:
            # Every process reads; none writes before all have read.
            known.update(folder.read_points(self.key))
            run.accelerator.wait_for_everyone()
        for note in self.notes:
            run.progress.say(note)
        if known:
            run.progress.say(f"continuing: {len(known):,} of {len(grid):,} points are known")
        levels = [[point for point in level if point.shares not in known] for level in grid.levels]
        left = [
            (number, place + 1 == len(level), point)
            for number, level in enumerate(levels)
            for place, point in enumerate(level)
        ]
        with run.clock.stage("scoring"):
            for number, last, point in run.progress.track(left, "scoring points", len(left)):
                known[point.shares] = self.score(self.found.basis.weights(point.shares))
                if folder is not None and run.is_main:
                    folder.keep_points(self.key, known)
                    if last and number + 1 < len(levels):
                        folder.write(self.found.compose(number, self.facts))
                        self.say_level(folder, number)
        result = PlaneResult(self.found.compose(len(levels) - 1, self.facts))
        if folder is not None and run.is_main:
            folder.finish(result.figures)
        run.accelerator.wait_for_everyone()
        return result

    def score(self, weights: Mapping[str, Tensor]) -> Figures:
        """As a port does it, so that a ported model has the score of its port.json."""
        try:
            self.scorer.load(weights)
            self.scorer.reset_batchnorm()
            found = self.scorer.score(self.images)
        except NotFiniteError:  # far from the models, weights may be of no use at all
            return dict(_NOTHING)
        return {"loss": found.loss if math.isfinite(found.loss) else None, "top1": found.top1, "top5": found.top5}

    def say_level(self, folder: PlaneFolder, level: int) -> None:
        """Name the picture, and how fine it is."""
        across, down = (len(each) for each in self.found.grid.axes[level])
        shape = f"{across} × {down}" if down > 1 else f"{across}"
        whole = f"{len(self.found.grid.x)}{f' × {len(self.found.grid.y)}' * (down > 1)}"
        self.scorer.run.progress.say(f"{folder.picture}: {shape} of {whole} points")

    @property
    def facts(self) -> dict[str, Any]:
        """What was scored, and how."""
        data, run = self.scorer.data, self.scorer.run
        return {
            "data": {
                "name": data.name,
                "revision": data.revision,
                "fingerprint": data.fingerprint,
                "split": self.split,
                "images": len(self.images),
                "classes": self.scorer.classes,
            },
            "options": self.options,
            "device": run.accelerator.device.type,
            "notes": [*self.notes, *data.broken_notes],
            "seconds": {name: round(value, 3) for name, value in run.clock.seconds.items()},
            "command": run.command,
            "run": self.key,
        }

    @property
    def options(self) -> dict[str, Any]:
        """What decides about a score."""
        port = self.scorer.options
        names = ("bn_batches", "batch_size", "eval_batch", "seed")
        return {**{name: getattr(port, name) for name in names}, "precision": self.scorer.run.precision}

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that the figures depend on."""
        grid, corners = self.found.grid, self.found.basis.corners
        return {
            "models": {name: hash_tensors(each)[:20] for name, each in zip(self.found.sides, corners, strict=True)},
            "data": self.scorer.data.fingerprint,
            "split": self.split,
            "images": len(self.images),
            "grid": [len(grid.x), grid.x[0], grid.x[-1]],
            **self.options,
        }

    @property
    def notes(self) -> list[str]:
        """What there is to say about images and models."""
        notes = list(self.scorer.data.notes)
        if self.found.basis.is_line and self.found.basis.distances[0][1] == 0.0:
            notes.append("the two models have the same weights: nothing changes between them")
        for name, how in zip(self.found.sides, self.found.permuted, strict=True):
            if how is not None:
                words = "weight matching" if how["by"] == MATCH else how["by"]
                notes.append(f"{name} is permuted by {words}: {how['moved']:.0%} of its neurons moved")
        return notes


# ---- models in the arrangement of the first


@dataclass(frozen=True, eq=False)
class Arranged:
    """Weights as they are compared, and how each model was permuted, if it was."""

    weights: tuple[dict[str, Tensor], ...] = field(repr=False)
    permuted: tuple[dict[str, Any] | None, ...]


def arrange(
    models: Mapping[str, dict[str, Tensor]],
    permute: Permute,
    scorer: Scorer,
    graph: PermutationGraph | str | Path | None,
    run: Run,
) -> Arranged:
    """Bring models into the arrangement of the first, so that the weights between them mean something."""
    names, model = list(models), scorer.model
    wanted = dict.fromkeys(names[1:], MATCH) if permute == MATCH else _named(permute, names)
    if not wanted:
        return Arranged(tuple(models.values()), (None,) * len(models))
    with doing_now(run.progress, "tracing the model"):
        graph = _find_graph(graph, model, scorer.data.test.preprocess.input_size)
    weights: list[dict[str, Tensor]] = []
    permuted: list[dict[str, Any] | None] = []
    parameters = [name for name, _ in model.named_parameters()]
    for name, tensors in models.items():
        how = wanted.get(name)
        if how is None:
            weights.append(tensors)
            permuted.append(None)
            continue
        with doing_now(run.progress, f"permuting {name}"):
            chosen, words = _find(how, graph, (models[names[0]], tensors), parameters, scorer.options.seed)
            weights.append(graph.apply(chosen, tensors))
        permuted.append({"by": words, "moved": chosen.moved, "hash": hash_tensors(chosen.indices)})
    return Arranged(tuple(weights), tuple(permuted))


def _named(permute: Permute, names: Sequence[str]) -> dict[str, str | Path | Permutation]:
    if permute is None:
        return {}
    if not isinstance(permute, Mapping):
        raise RetargetError(f"models cannot be permuted by '{permute}'; say '{MATCH}', or NAME={MATCH} or NAME=FILE")
    for name in permute:
        if name not in names:
            raise RetargetError(f"there is no model '{name}' to permute; the models are {', '.join(names)}")
        if name == names[0] and permute[name] == MATCH:
            raise RetargetError(f"'{name}' is the first model, which the others are matched with; permute another one")
    return dict(permute)


def _find_graph(
    graph: PermutationGraph | str | Path | None, model: nn.Module, input_size: tuple[int, int, int]
) -> PermutationGraph:
    if isinstance(graph, PermutationGraph):
        return graph
    return PermutationGraph.load(graph) if graph is not None else trace_model(model, input_size).graph


def _find(
    how: str | Path | Permutation,
    graph: PermutationGraph,
    sides: tuple[Tensors, Tensors],
    parameters: Sequence[str],
    seed: int,
) -> tuple[Permutation, str]:
    if isinstance(how, Permutation):
        return how, "a given permutation"
    if how == MATCH:
        first, second = ({name: side[name] for name in parameters} for side in sides)
        return match(graph, first, second, seed=seed).permutation, MATCH
    path = Path(how).expanduser()
    path = path / PERMUTATION if path.is_dir() else path
    if not path.is_file():
        raise PermutationError(f"there is no permutation '{path}'; give the file, the folder of a port, or '{MATCH}'")
    return load_permutation(path, graph), path.parent.name if path.name == PERMUTATION else path.name
