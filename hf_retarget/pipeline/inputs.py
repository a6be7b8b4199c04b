"""What a port starts from: three checkpoints that belong together, images, and bases with heads of the same size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_retarget.data import ImageData, Preprocess, load_data
from hf_retarget.errors import DataError, ModelError, PortError
from hf_retarget.files import load_tensors
from hf_retarget.models import Checkpoint, Comparison, compare, load_checkpoint
from hf_retarget.models.heads import Heads, fit_heads
from hf_retarget.models.weights import find_not_finite
from hf_retarget.pipeline.start import check_shapes, choose_preprocess, doing, make_model
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe, choose_recipe

Reference = str | Path | nn.Module
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Inputs:
    """All that a port begins with; weights are float32."""

    source: Checkpoint
    tuned: Checkpoint
    target: Checkpoint
    comparison: Comparison
    heads: Heads
    data: ImageData
    preprocess: Preprocess
    model: nn.Module = field(repr=False)
    """A model of this architecture with the tuned model's classes, to compute with."""
    tuned_target: Checkpoint | None = None
    """The real fine-tuning of the target, for those who have it."""

    @property
    def classes(self) -> int:
        """How many classes the ported model will have."""
        return self.tuned.num_classes

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Their names, as far as anybody knows them."""
        return self.tuned.labels or self.data.labels

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters, tied ones once: what a trajectory is made of."""
        return tuple(name for name, _ in self.model.named_parameters())

    def parameters(self, weights: Tensors) -> dict[str, Tensor]:
        """The parameters among some weights."""
        return {name: weights[name] for name in self.names}


def settle_recipe(
    data: Any = None,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Any]:
    """The recipe to follow, and the images if Python has them already (else the recipe names them).

    Example:
        >>> settle_recipe("fashion-mnist", overrides={"port.steps": 3})[0].port.steps
        3
    """
    given = isinstance(data, (str, Path)) or data is None
    name = str(data) if given and data not in (None, "") else None
    if not isinstance(recipe, Recipe):
        return choose_recipe(name, recipe, preset, overrides), "" if given else data
    if preset is not None:
        raise PortError(f"the preset '{preset}' needs the name of a recipe, not a recipe that is made already")
    if name is not None:
        recipe = recipe.override(**{"data.reference": name})
    return recipe.override(**overrides or {}), "" if given else data


def gather_inputs(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any,
    recipe: Recipe,
    *,
    tuned_target: Reference | None = None,
    initial_head: str | Path | Tensors | None = None,
    arch: str | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    progress: Progress = SILENT,
) -> Inputs:
    """Load everything, and check it against each other before anything long begins."""

    def load(reference: Reference) -> Checkpoint:
        return load_checkpoint(reference, arch=arch, allow_pickle=allow_pickle, token=token)

    with doing(progress, "loading the models"):
        source, tuned, target = load(src_base), load(src_ft), load(new_base)
        comparison = compare(source, tuned, target)
        real = None if tuned_target is None else load(tuned_target)
        _check_real(source, tuned, real)
    with doing(progress, "loading the data"):
        preprocess = choose_preprocess(tuned, recipe.data.image_size)
        images = load_data(data, recipe.data, preprocess, model_labels=tuned.labels, token=token)
        _check_images(tuned, images)
    heads = _fit_heads(source, tuned, target, comparison, recipe, initial_head)
    model = target.build(tuned.num_classes)
    model.load_state_dict(heads.target)
    check_shapes(model, preprocess, tuned.num_classes)
    return Inputs(source, tuned, target, comparison, heads, images, preprocess, model, real)


def _check_real(source: Checkpoint, tuned: Checkpoint, real: Checkpoint | None) -> None:
    if real is None:
        return
    compare(source, tuned, real)
    if real.num_classes != tuned.num_classes:
        raise ModelError(
            f"'{real.reference}' has {real.num_classes} classes, but '{tuned.reference}' has {tuned.num_classes}; "
            "the real fine-tuning of the new base must be one on the same data"
        )


def _check_images(tuned: Checkpoint, data: ImageData) -> None:
    few = data.labels is None and data.classes < tuned.num_classes  # the last class need not be in every dataset
    if data.classes != tuned.num_classes and not few:
        raise DataError(
            f"'{data.name}' has {data.classes} classes, but '{tuned.reference}' tells {tuned.num_classes} apart; "
            "a port needs the data of the fine-tuning (--data-classes chooses among them)"
        )
    if not len(data.validation):
        raise DataError("a port chooses its best step on validation images, and there are none; set data.validation")


def _fit_heads(
    source: Checkpoint,
    tuned: Checkpoint,
    target: Checkpoint,
    comparison: Comparison,
    recipe: Recipe,
    initial_head: str | Path | Tensors | None,
) -> Heads:
    policy, names = recipe.port.head, comparison.head
    fresh = given = None
    if policy == "shared":
        state = make_model(target, tuned.num_classes, "fresh", recipe.port.seed).state_dict()
        fresh = {name: state[name] for name in names if name in state}
    if initial_head is not None:
        given = {name: tensor.float() for name, tensor in _read_head(initial_head).items() if name in names}
    return fit_heads(
        source.in_float32(),
        tuned.in_float32(),
        target.in_float32(),
        names,
        policy,
        fresh=fresh,
        given=given,
        labels_agree=comparison.labels_agree,
    )


def _read_head(head: str | Path | Tensors) -> Tensors:
    if isinstance(head, Mapping):
        return head
    try:
        found, _ = load_tensors(head)
    except OSError as error:
        raise ModelError(f"cannot read the initial head '{head}': {error}; it must be a safetensors file") from error
    if broken := find_not_finite(found):
        raise ModelError(f"'{broken}' in the initial head '{head}' is not made of finite real numbers")
    return found
