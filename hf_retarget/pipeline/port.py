"""The port: load, trace, match along the trajectory, transplant, reset BatchNorm, evaluate, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_retarget.devices import choose_device, in_main_process
from hf_retarget.errors import PortError
from hf_retarget.files import hash_file, hash_tensors
from hf_retarget.graph import Permutation
from hf_retarget.pipeline.controls import measure
from hf_retarget.pipeline.document import compose_document
from hf_retarget.pipeline.inputs import Reference
from hf_retarget.pipeline.pose import Checkpoints, find_checkpoints
from hf_retarget.pipeline.prepare import Prepared, prepare
from hf_retarget.pipeline.result import PortResult
from hf_retarget.pipeline.samples import draw_samples
from hf_retarget.pipeline.steps import PROGRESS, Diary, walk
from hf_retarget.pipeline.versions import describe_environment
from hf_retarget.pipeline.workplace import ENVIRONMENT, Workplace
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class PortPlace(Workplace):
    """Where an unfinished port is kept; there is something to go on from as soon as one step is finished."""

    record: ClassVar[str] = "port.json"

    @property
    def state(self) -> Path:
        """The file that says how far it has come."""
        return self.hidden / PROGRESS


def port(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    permutation: Permutation | str | Path | None = None,
    tuned_target: Reference | None = None,
    initial_head: str | Path | Mapping[str, Tensor] | None = None,
    checkpoints: Checkpoints | None = None,
    gradient_cache: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    lock: bool = True,
    dtype: str | None = None,
    arch: str | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    command: str = "",
    progress: Progress = SILENT,
) -> PortResult:
    """Move a fine-tuning (from `src_base` to `src_ft`) to a new base, and measure whether that was worth it.

    Models are references (timm name, Hub id, folder, file with `arch`) or modules; `data` is the name of a recipe, a
    reference, or a dataset. `overrides` changes single fields of the recipe. With `permutation`, one that was found
    before is used, and no gradients are taken. With `out`, the result is saved there, all at once, and a run that was
    killed goes on with `resume`; without, nothing is written. `lock=False` is for file systems that have no locks.
    """
    _check_dtype(dtype)
    place = PortPlace.at(out) if out is not None else None
    if resume and place is None:
        raise PortError("only a port with a folder to be made can go on; give out=, too")
    choose_device(device, precision)  # before the lock: among several processes only the first holds it
    with place.held(resume=resume, overwrite=overwrite, lock=lock) if place else nullcontext():
        prepared = prepare(
            src_base,
            src_ft,
            new_base,
            data,
            recipe=recipe,
            preset=preset,
            overrides=overrides,
            permutation=permutation,
            tuned_target=tuned_target,
            initial_head=initial_head,
            checkpoints=checkpoints,
            gradient_cache=gradient_cache,
            arch=arch,
            allow_pickle=allow_pickle,
            token=token,
            device=device,
            precision=precision,
            workers=workers,
            progress=progress,
        )
        run = _Run(prepared, place, getattr(torch, dtype) if dtype else None, command, checkpoints)
        run.open(resume=resume, overwrite=overwrite)
        result = run.port()
        run.publish(result)
        return result


@dataclass(frozen=True)
class _Run:
    prepared: Prepared
    place: Workplace | None
    dtype: torch.dtype | None
    command: str
    checkpoints: Checkpoints | None

    @property
    def accelerator(self) -> Accelerator:
        return self.prepared.judge.accelerator

    def port(self) -> PortResult:
        """Match and transplant step by step, measure, and put all together."""
        recipe, inputs, derived = self.prepared.recipe, self.prepared.inputs, self.prepared.derived
        task, judge = self.prepared.task, self.prepared.judge
        self._introduce()
        work = self.place.hidden if self.place else None
        found = walk(task, judge, diary=Diary(work, derived.graph, self.accelerator) if work else None)
        measured = measure(task, judge, found, recipe, work)
        samples = draw_samples(inputs.data.test, measured.scores, recipe.port.samples, recipe.port.seed)
        judge.load(measured.weights)
        return PortResult(
            model=judge.model.cpu().eval(),
            weights=measured.weights,
            history=found.history,
            permutation=found.best.permutation,
            best_step=found.best.step,
            figures=compose_document(
                recipe, inputs, derived, task, judge, found, measured, samples.to_json(), self.command
            )
            | {"run": self.key},
            thumbnails=samples.thumbnails,
            recipe=recipe,
            graph=derived.graph,
            inputs=inputs,
            dtype=self.dtype,
        )

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Make the hidden place, or go on in it."""
        if place := self.place:
            say = self.prepared.judge.progress.say
            in_main_process(lambda: place.open(self.key, resume=resume, overwrite=overwrite, say=say))

    def publish(self, result: PortResult) -> None:
        """Put the result into its place; only the main process writes."""
        if not (place := self.place):
            return

        def publish() -> None:
            for each in self.prepared.judge.progress.track([result], "writing model and report"):
                each.write(place.fresh_result())
            place.finish()

        in_main_process(publish)

    def _introduce(self) -> None:
        inputs, derived, say = self.prepared.inputs, self.prepared.derived, self.prepared.judge.progress.say
        for note in (*inputs.comparison.notes, *inputs.data.notes):
            say(note)
        say(f"head: {inputs.heads.policy} ({inputs.heads.why})")
        if derived.held:
            say(f"{len(derived.held)} groups act on tables that the new base keeps, and stay as they are")
        for unknown in derived.graph.unknown_operators[:3]:
            say(str(unknown))

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that the result depends on."""
        inputs, recipe, given = self.prepared.inputs, self.prepared.recipe, self.prepared.task.permutation
        weights = {"source": inputs.heads.source, "tuned": inputs.tuned.in_float32(), "target": inputs.heads.target}
        if inputs.tuned_target is not None:
            weights["tuned_target"] = inputs.tuned_target.in_float32()
        key = {
            **{name: hash_tensors(tensors)[:20] for name, tensors in weights.items()},
            "data": inputs.data.fingerprint,
            "port": asdict(recipe.port),
            "finetune": asdict(recipe.finetune),
            "graph": self.prepared.derived.graph.fingerprint[:20],
            "permutation": hash_tensors(given.indices)[:20] if given else None,
            "checkpoints": [hash_file(path) for path in find_checkpoints(self.checkpoints)]
            if self.checkpoints
            else None,
            "precision": str(self.accelerator.mixed_precision),
            "dtype": str(self.dtype),
            ENVIRONMENT: describe_environment(),
        }
        return dict(json.loads(json.dumps(key)))  # as it comes back from a file: tuples are lists


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise PortError(f"weights cannot be stored as '{dtype}'; choose one of {', '.join(DTYPES)}")
