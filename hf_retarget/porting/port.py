"""The port: the whole pipeline on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_retarget.contenders import choose_contenders
from hf_retarget.data.load import NO_DATA
from hf_retarget.errors import PortError
from hf_retarget.files import hash_tensors
from hf_retarget.graph import Permutation
from hf_retarget.models import Reference
from hf_retarget.names import DTYPES, PORT
from hf_retarget.porting.contest import Contest
from hf_retarget.porting.inputs import Checkpoints, Given, load_inputs
from hf_retarget.porting.result import PortResult, make_result
from hf_retarget.porting.resume import ENVIRONMENT, PlaceArguments, Workplace
from hf_retarget.porting.streamed import StreamedPort, port_streamed
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments, describe_environment, pick

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack


class PortArguments(RunArguments, PlaceArguments, total=False):
    """Further options of `port`."""

    preset: str | None
    overrides: Mapping[str, Any] | None
    permutation: Permutation | str | Path | None
    tuned_target: Reference | None
    initial_head: str | Path | Mapping[str, Tensor] | None
    checkpoints: Checkpoints | None
    gradient_cache: str | Path | None
    also_data: Any
    also_data_fit: bool
    force_base: bool
    dtype: str | None
    text: str | Path | None
    force_relation: bool


def port(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    **options: Unpack[PortArguments],
) -> PortResult | StreamedPort:
    """Move a fine-tuning (from `src_base` to `src_ft`) to a new base, and measure whether that was worth it.

    Models are references (timm name, Hub id, folder, file with `arch`) or modules; `src_ft` may be a PEFT adapter of
    `src_base`. `data` is the name of a recipe, a reference, a dataset, or "none", which adds the fine-tuning of any
    model between related bases without BatchNorm, file by file, and returns a `StreamedPort`. With `out`, the result
    is saved there atomically, and an interrupted run continues with `resume=True`. Further options:

    - `overrides`: fields of the recipe to change (`{"port.steps": 15}`). `preset`: one of the recipe's presets.
    - `permutation`: an earlier permutation, or the folder of its port; no gradients are taken.
    - `tuned_target`: the real fine-tuning of the new base, to compare with. `initial_head`: the initial head of the
      fine-tuning. `checkpoints`: checkpoints of the fine-tuning, to port along.
    - `also_data`: a second set of images to score on (noisy ones, another camera). `also_data_fit`: fit closed-form
      heads on its training images as well.
    - `force_base`: accept an adapter that names a base other than `src_base`.
    - `gradient_cache`: a folder for the gradients along the fine-tuning, reused by ports of it to other bases.
    - `text`: with data "none", a file of texts on which to measure how much of a language model's fine-tuning is
      kept. `force_relation`: add the fine-tuning even between independent bases.
    - `dtype`: the type to store weights in. `overwrite`, `resume`, `lock`: how to treat an earlier result.
    - `device`, `precision`, `workers`, `arch`, `allow_pickle`, `token`: where and how to run.
    - `quiet=True`: show no progress; by default, terminals and notebooks do. `progress`: a custom display.
    """
    check_arguments("port", options, PortArguments)
    dtype, run, given = _read_dtype(options.get("dtype")), Run(**pick(options, Run)), Given(**pick(options, Given))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    chosen = given.complete(chosen)
    _ = run.accelerator  # before the lock, which only the main process holds
    read = (src_base, src_ft, new_base, chosen.data.reference, *vars(given).values())
    pictures = (chosen.data.reference, given.also_data)
    place = port_place(out, inputs=read, images=pictures, **pick(options, PlaceArguments))
    if chosen.data.reference == NO_DATA and isinstance(images, str):
        return port_streamed((src_base, src_ft, new_base), chosen, run, given, place, options.get("dtype"))
    with place.held():
        inputs = load_inputs((src_base, src_ft, new_base), images, chosen, run, given)
        contest = Contest(inputs, run, place)
        key = describe_run(contest, dtype)
        contest.refuse_nonsense()
        place.begin(key, run)
        _introduce(contest)
        for contender, role in choose_contenders(given.asked(chosen)):
            contest.enter(contender, role)  # made, chosen on validation images, scored on test images
        bases = {"src_base": src_base, "src_ft": src_ft, "new_base": new_base}
        result = make_result(contest, dtype, key).advised(out or "ported", {**options, **bases})
        place.finish(result.write, run)
        return result


def port_place(out: str | Path | None, **options: Any) -> Workplace:
    """The place for a port's result and unfinished work."""
    return Workplace.at(out, record=PORT, unfinished="*.progress.json", **options)


def describe_run(contest: Contest, dtype: torch.dtype | None) -> dict[str, Any]:
    """Everything the result depends on."""
    inputs, recipe, given = contest.inputs, contest.recipe, contest.inputs.given
    weights = {"source": inputs.heads.source, "tuned": inputs.tuned.in_float32(), "target": inputs.heads.target}
    if inputs.tuned_target is not None:
        weights["tuned_target"] = inputs.tuned_target.in_float32()
    return {
        **{name: hash_tensors(tensors)[:20] for name, tensors in weights.items()},
        "data": inputs.data.fingerprint,
        "port": asdict(recipe.port),
        "finetune": asdict(recipe.finetune),
        "also": inputs.also.fingerprint if inputs.also else None,
        "also_fit": given.also_data_fit,
        "permutation": hash_tensors(contest.given_permutation.indices)[:20] if given.permutation is not None else None,
        "checkpoints": inputs.checkpoint_hashes,
        "precision": contest.run.precision,
        "dtype": str(dtype),
        ENVIRONMENT: describe_environment(contest.run.accelerator.device.type),
    }


def _introduce(contest: Contest) -> None:
    inputs = contest.inputs
    head = f"head: {inputs.heads.policy} ({inputs.heads.why})"
    for note in (*inputs.comparison.notes, *inputs.data.notes, head, f"bases: {inputs.relation.sentence}"):
        contest.run.progress.say(note)


def _read_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise PortError(f"weights cannot be stored as '{name}'; choose one of {', '.join(DTYPES)}")
    found: torch.dtype | None = getattr(torch, name) if name else None
    return found
