"""The first half of a port: load and compare everything, trace the model, pose the problem. A plan ends here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_retarget.devices import choose_device
from hf_retarget.graph import Permutation
from hf_retarget.pipeline.clock import Clock
from hf_retarget.pipeline.held import Derived, derive_graph
from hf_retarget.pipeline.inputs import Inputs, Reference, gather_inputs, settle_recipe
from hf_retarget.pipeline.judge import Judge
from hf_retarget.pipeline.pose import Checkpoints, StepGradients, Task, complete_recipe, pose_task
from hf_retarget.pipeline.start import doing
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Prepared:
    """A port that is about to begin."""

    recipe: Recipe
    inputs: Inputs
    derived: Derived
    task: Task
    judge: Judge


def prepare(
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
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    progress: Progress = SILENT,
    **loading: Any,
) -> Prepared:
    """Do all that can fail for a reason in the input; the arguments are those of `port`, `loading` among them."""
    chosen, images = settle_recipe(data, recipe, preset, overrides)
    given: dict[str, Any] = {"initial_head": initial_head, "tuned_target": tuned_target}
    chosen = complete_recipe(chosen, checkpoints=checkpoints, **given)
    accelerator, clock = choose_device(device, precision), Clock()
    with clock.stage("loading"):
        inputs = gather_inputs(src_base, src_ft, new_base, images, chosen, progress=progress, **given, **loading)
    with clock.stage("tracing"), doing(progress, "tracing the model"):
        derived = derive_graph(inputs.model, inputs.preprocess.input_size, verify=chosen.port.check)
    with clock.stage("loading"):
        task = pose_task(
            inputs,
            derived.graph,
            chosen.port,
            StepGradients(inputs, chosen.port, accelerator, workers, clock, progress),
            checkpoints=checkpoints,
            permutation=permutation,
            gradient_cache=gradient_cache,
        )
    judge = Judge(inputs, chosen.port, accelerator, workers, progress, clock)
    return Prepared(chosen, inputs, derived, task, judge)
