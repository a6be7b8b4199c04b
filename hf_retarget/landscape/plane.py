"""`rt.plane` and `hf-retarget plane`: score models and the weights between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_retarget.data import Split, check_classes, choose_preprocess, load_data
from hf_retarget.errors import DataError, FinishedError, ModelError, NotFiniteError, PermutationError, RetargetError
from hf_retarget.evaluation.evaluate import check_split
from hf_retarget.evaluation.scorer import Scorer
from hf_retarget.files import hash_tensors
from hf_retarget.graph import Permutation, PermutationGraph, load_graph, load_permutation
from hf_retarget.landscape.geometry import Basis, Grid, Shares, lay_grids, mix, span
from hf_retarget.landscape.result import Figures, PlaneFolder, PlaneResult, find_barrier
from hf_retarget.matching.methods import match
from hf_retarget.models import Checkpoint, Reference, check_alike, load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.names import PERMUTATION, PLANE, REPORT
from hf_retarget.porting.inputs import trace_model
from hf_retarget.porting.resume import PlaceArguments, refuse_inside
from hf_retarget.publish.contents import shorten_all
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.report.plane import show_in_report
from hf_retarget.run import Run, RunArguments, check_arguments, doing_now, in_main_process, list_versions, pick
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json
from hf_retarget.words import shorten_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/plane/1"
MATCH = "match"
_DEFAULTS = {2: (33, 0.0), 3: (17, 0.2)}
"""Points along a side, and margin: for a line and for a plane."""

Permute = str | Mapping[str, str | Path | Permutation] | None
"""`match` for all models but the first, or a mapping from model names to `match`, a permutation, a file or a port."""


class PlaneArguments(RunArguments, PlaceArguments, total=False):
    """Further options of `plane`."""

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
    """Score models and the weights between them, on the line through two or the plane through three.

    The models share an architecture and the size of the head; a mapping gives them names. BatchNorm statistics are
    re-estimated at every point (`port.bn_batches` of the recipe; 0 mixes the stored ones). With `out`, pictures and
    figures are written to that folder, starting with a coarse grid. Further options:

    - `grid`: points along a side (33 for a line, 17 for a plane). `margin`: how far to extend beyond the models.
    - `split` and `limit`: the images to score on. `graph`: the graph of a permutation, which is traced by default.
    - `permute`: align models with the first; "match" matches the weights of all others, {"tuned": "ported/"} applies
      the permutation of a port to one.
    - `report`: the folder of a port; writes to its plane/ and adds the picture to its report.html.
    - `resume`, `overwrite`, `lock`, `device`, `precision` and the others are as in `port`.
    """
    check_arguments("plane", options, PlaneArguments)
    run = Run(**pick(options, Run))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    references, split, limit = _name_models(models), options.get("split", "test"), options.get("limit")
    check_split(split)
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; score on at least one image")
    page = None
    if (report := options.get("report")) is not None:
        page = Path(report).expanduser() / REPORT
        if not page.is_file():
            raise RetargetError(f"there is no {REPORT} in '{report}'; --report takes the folder of a port")
        out = page.parent / "plane" if out is None else out
    folder = PlaneFolder.at(out, **pick(options, PlaceArguments)) if out is not None else None
    if folder is not None:
        refuse_inside(folder.path.resolve(), (chosen.data.reference,))
    _ = run.accelerator  # before the lock, which only the main process holds
    with ExitStack() as stack:
        if folder is not None:
            in_main_process(lambda: stack.enter_context(folder.held()))
        sides, scorer = _load(references, images, chosen, run)
        with run.clock.stage("permuting"):
            weights, permuted = _permute(sides, options.get("permute"), options.get("graph"), scorer)
        basis = span(weights, [name for name, _ in scorer.model.named_parameters()], list(sides))
        size, margin = _DEFAULTS[len(sides)]
        margin = margin if (given := options.get("margin")) is None else given
        grids = lay_grids(basis, options.get("grid") or size, margin)
        part = getattr(scorer.data, split).take(limit, chosen.port.seed)
        scoring = _Scoring(sides, permuted, basis, grids, scorer, part, split)
        try:
            figures = scoring.run(folder)
        except FinishedError:
            if page is not None and folder is not None and run.is_main:
                show_in_report(page, read_json(folder.path / PLANE, MAX_DOCUMENT_BYTES))
            raise
        if page is not None and run.is_main:
            show_in_report(page, figures)
        return PlaneResult(figures)


def _name_models(models: Sequence[Reference] | Mapping[str, Reference]) -> dict[str, Reference]:
    """Name each model: as given, or by the end of its reference."""
    if not isinstance(models, Mapping):
        texts = [type(each).__name__ if isinstance(each, nn.Module) else str(each) for each in models]
        models = dict(zip(shorten_names(texts), models, strict=True))
    if len(models) not in _DEFAULTS:
        raise ModelError(f"{len(models)} models were given; give two for a line or three for a plane")
    return dict(models)


def _load(
    references: Mapping[str, Reference], images: Any, recipe: Recipe, run: Run
) -> tuple[dict[str, Checkpoint], Scorer]:
    """Load models that fit together, and a scorer with their images."""
    with run.stage("loading", "loading the models"):
        sides = {name: load_checkpoint(reference, **run.loading) for name, reference in references.items()}
        check_alike(list(sides.values()))
    first = next(iter(sides.values()))
    with run.stage("loading", "loading the data"):
        preprocess = choose_preprocess(first, recipe.data.image_size, run.preprocess)
        labels = next((side.labels for side in sides.values() if side.labels), None)
        data = load_data(images, recipe.data, preprocess, model_labels=labels, token=run.token)
        check_classes(data.name, data.classes, data.labels, first.reference, first.num_classes)
        model = first.build()
        check_shapes(model, data.train.preprocess.input_size, first.num_classes)
    return sides, Scorer(model, data, first.num_classes, recipe.port, run)


def _permute(
    sides: Mapping[str, Checkpoint], permute: Permute, graph: PermutationGraph | str | Path | None, scorer: Scorer
) -> tuple[list[dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """Align weights with the first model where requested; also returns how each was permuted: by, moved and hash."""
    weights = {name: side.in_float32() for name, side in sides.items()}
    first, *others = weights
    wanted = {} if permute is None else dict.fromkeys(others, MATCH) if permute == MATCH else permute
    if not isinstance(wanted, Mapping):
        raise RetargetError(f"models cannot be permuted by '{permute}'; give '{MATCH}', NAME={MATCH} or NAME=FILE")
    for name, how in wanted.items():
        if name not in weights:
            raise RetargetError(f"there is no model '{name}' to permute; the models are {', '.join(weights)}")
        if name == first and how == MATCH:
            raise RetargetError(f"'{name}' is the first model, with which the others are matched; permute another one")
    if not wanted:
        return list(weights.values()), {}
    progress, permuted = scorer.run.progress, {}
    with doing_now(progress, "tracing the model"):
        size = scorer.data.test.preprocess.input_size
        if graph is None:
            graph = trace_model(scorer.model, size).graph
        elif not isinstance(graph, PermutationGraph):
            graph = load_graph(graph, scorer.model, torch.zeros(1, *size))
    parameters = [name for name, _ in scorer.model.named_parameters()]
    reference = {each: weights[first][each] for each in parameters}
    for name in (each for each in weights if each in wanted):
        with doing_now(progress, f"permuting {name}"):
            how = wanted[name]
            if isinstance(how, Permutation):
                found, words = how, "a given permutation"
            elif how == MATCH:
                own = {each: weights[name][each] for each in parameters}
                found, words = match(graph, reference, own, seed=scorer.options.seed).permutation, MATCH
            else:
                found, words = _load_permutation(how, graph)
            weights[name] = graph.apply(found, weights[name])
        permuted[name] = {"by": words, "moved": found.moved, "hash": hash_tensors(found.indices)}
    return list(weights.values()), permuted


def _load_permutation(place: str | Path, graph: PermutationGraph) -> tuple[Permutation, str]:
    """Load a permutation from a file or the folder of a port; also returns its name."""
    path = Path(place).expanduser()
    path = path / PERMUTATION if path.is_dir() else path
    if not path.is_file():
        raise PermutationError(f"there is no permutation '{path}'; give the file, the folder of a port, or '{MATCH}'")
    return load_permutation(path, graph), path.parent.name if path.name == PERMUTATION else path.name


@dataclass(eq=False)
class _Scoring:
    """A run over all points, and the scores known so far."""

    sides: Mapping[str, Checkpoint]
    permuted: Mapping[str, Mapping[str, Any]]
    basis: Basis
    grids: Sequence[Grid]
    scorer: Scorer
    images: Split
    split: str
    known: dict[Shares, Figures] = field(default_factory=dict)

    def run(self, folder: PlaneFolder | None) -> Figures:
        """Score the remaining points, and write a picture whenever a grid is complete."""
        run, known, (*coarse, fine) = self.scorer.run, self.known, self.grids
        if folder is not None:
            # Every process reads before the main one writes.
            known.update(folder.read_points(self.key))
            run.accelerator.wait_for_everyone()
        for note in self.notes:
            run.progress.say(note)
        if known:
            run.progress.say(f"continuing: {len(known):,} of {len(fine.points):,} points are known")
        left = [point.shares for point in fine.points if point.shares not in known]
        complete = {len(grid.points): grid for grid in coarse}  # points are scored in order
        with run.clock.stage("scoring"):
            for shares in run.progress.track(left, "scoring points", len(left)):
                known[shares] = self.score(mix(self.basis.corners, shares))
                if folder is not None and run.is_main:
                    folder.keep_points(self.key, known)
                    if grid := complete.get(len(known)):
                        folder.write(self.compose(grid))
                        run.progress.say(f"{folder.path / 'plane.png'}: {_size(grid)} of {_size(fine)} points")
        figures = self.compose(fine)
        if folder is not None and run.is_main:
            folder.write(figures)
        run.accelerator.wait_for_everyone()
        return figures

    def score(self, weights: Mapping[str, Tensor]) -> Figures:
        """Score weights as a port does, so that a ported model gets the score in its port.json."""
        try:
            self.scorer.load(weights)
            self.scorer.reset_batchnorm()
            found = self.scorer.score(self.images)
        except NotFiniteError:  # far from the models, weights may be useless
            return {"loss": None, "top1": 0.0, "top5": None}
        return {"loss": found.loss if math.isfinite(found.loss) else None, "top1": found.top1, "top5": found.top5}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options that affect scores."""
        names = ("bn_batches", "batch_size", "eval_batch", "seed")
        return {name: getattr(self.scorer.options, name) for name in names} | {"precision": self.scorer.run.precision}

    @cached_property
    def key(self) -> dict[str, Any]:
        """Everything the figures depend on."""
        columns = self.grids[-1].x
        return {
            "models": {
                name: hash_tensors(each)[:20] for name, each in zip(self.sides, self.basis.corners, strict=True)
            },
            "data": self.scorer.data.fingerprint,
            "split": self.split,
            "images": len(self.images),
            "grid": [len(columns), columns[0], columns[-1]],
            **self.options,
        }

    @property
    def notes(self) -> list[str]:
        """Notes about images and models."""
        notes = list(self.scorer.data.notes)
        if self.basis.is_line and self.basis.distances[0][1] == 0.0:
            notes.append("the two models have the same weights, so nothing changes between them")
        for name, how in self.permuted.items():
            words = "weight matching" if how["by"] == MATCH else how["by"]
            notes.append(f"{name} is permuted by {words}: {how['moved']:.0%} of its neurons moved")
        return notes

    def compose(self, grid: Grid) -> Figures:
        """The content of plane.json once the points of a grid are known."""
        data, run, versions = self.scorer.data, self.scorer.run, list_versions()
        points = [
            {"x": each.x, "y": each.y, "shares": list(each.shares), **self.known[each.shares]} for each in grid.points
        ]
        models = [
            {
                "name": name,
                "reference": side.reference,
                "architecture": side.architecture,
                "classes": side.num_classes,
                "revision": side.revision,
                "hashes": dict(side.hashes),
                "permuted": self.permuted.get(name),
                "x": corner.x,
                "y": corner.y,
                **self.known[corner.shares],
            }
            for (name, side), corner in zip(self.sides.items(), grid.points, strict=False)  # corners come first
        ]
        figures = {
            "format": FORMAT,
            "version": versions["hf-retarget"],
            "kind": "line" if self.basis.is_line else "plane",
            "finished": grid is self.grids[-1],
            "models": models,
            "distances": [list(row) for row in self.basis.distances],
            "barrier": find_barrier(points) if self.basis.is_line else None,
            "grid": {"x": list(grid.x), "y": list(grid.y), "planned": len(self.grids[-1].x)},
            "points": points,
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
            "versions": versions,
        }
        return dict(shorten_all(figures))  # without local paths, since it may be published


def _size(grid: Grid) -> str:
    return f"{len(grid.x)} × {len(grid.y)}" if len(grid.y) > 1 else f"{len(grid.x)}"
