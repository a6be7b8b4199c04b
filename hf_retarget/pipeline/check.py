"""Whether three models and data would make a port, and what it would cost: found out before weights are downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_retarget.data.describe import DataFacts, describe_data
from hf_retarget.data.labels import match_labels
from hf_retarget.errors import DataError, ModelError, RetargetError
from hf_retarget.models import Checkpoint, Comparison, Difference, Peeked, compare, list_differences, peek_checkpoint
from hf_retarget.models.heads import foresee_policy
from hf_retarget.pipeline.cost import Cost, estimate_cost
from hf_retarget.pipeline.held import derive_graph
from hf_retarget.pipeline.inputs import Reference, settle_recipe
from hf_retarget.pipeline.probe import Probe, probe
from hf_retarget.pipeline.start import choose_preprocess, doing
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import Recipe

FORMAT = "hf-retarget/check/1"


@dataclass(frozen=True)
class Side:
    """One of the three models, as far as its configuration and the headers of its weights tell."""

    reference: str
    library: str
    architecture: str
    parameters: int
    """Numbers in its state dict, BatchNorm's statistics included."""
    classes: int
    labels: tuple[str, ...] | None
    dtype: str
    revision: str | None
    download: int
    """Bytes; 0 if it is on this machine already."""


@dataclass(frozen=True)
class HeadFacts:
    """The classifier, and what both bases will get for one."""

    tensors: tuple[str, ...]
    policy: str | None
    """None if only the weights tell."""
    why: str
    labels_agree: bool | None
    """Whether all three are known to have the same labels in the same order."""


@dataclass(frozen=True)
class GraphFacts:
    """How much of the model may be permuted: derived from a trace, and verified only when a port begins."""

    groups: int
    share: float
    """Of the parameters, on a free axis."""
    held: tuple[str, ...]
    unknown_operators: tuple[str, ...]


@dataclass(frozen=True)
class InputCheck:
    """What was found. Where something stands against a port, what depends on it is None."""

    sides: Mapping[str, Side]
    """source, tuned and target."""
    problems: tuple[str, ...]
    """What stands against a port, in sentences."""
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    """Tensors that are not the same on all three sides; those of the classifier may differ."""
    head: HeadFacts | None = None
    graph: GraphFacts | None = None
    data: DataFacts | None = None
    cost: Cost | None = None
    probe: Probe | None = None

    @property
    def compatible(self) -> bool:
        """Whether nothing was found that stands against a port."""
        return not self.problems

    @property
    def download(self) -> int:
        """Bytes of weights that a port would download."""
        return sum(side.download for side in self.sides.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"format": FORMAT, "compatible": self.compatible, "download": self.download, **asdict(self)}


def check(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    load_weights: bool = False,
    arch: str | None = None,
    allow_pickle: bool = False,
    token: str | None = None,
    device: str | None = None,
    precision: str = "no",
    workers: int = 0,
    progress: Progress = SILENT,
) -> InputCheck:
    """Find out whether a port is possible and what it costs, from configurations and headers: no weights are read.

    The arguments are those of `port`; without `data`, only the models are checked. With `load_weights`, the weights
    are loaded after all, and cheap signs are measured of whether a port will pay. A model that cannot be found or read
    is an error; models that do not fit together are a result.
    """
    chosen, images = settle_recipe(data, recipe, preset, overrides)
    given = chosen.data.reference or not isinstance(images, str)
    loading: dict[str, Any] = {"arch": arch, "allow_pickle": allow_pickle, "token": token}
    with doing(progress, "reading headers"):
        peeked = [peek_checkpoint(each, **loading) for each in (src_base, src_ft, new_base)]
    source, tuned, target = (each.checkpoint for each in peeked)
    sides = dict(zip(("source", "tuned", "target"), map(_side, peeked), strict=True))
    found = InputCheck(sides, (), (), list_differences(source, tuned, target))
    try:
        comparison = compare(source, tuned, target)
    except ModelError as error:
        return replace(found, problems=(str(error),))
    found = replace(found, notes=comparison.notes, head=_head(source, tuned, target, comparison, chosen))
    if given:
        with doing(progress, "reading about the data"):
            found = _with_data(found, tuned, images, chosen, token)
    with doing(progress, "tracing the model"):
        found = _with_graph(found, tuned, target, chosen, device)
    if load_weights and found.compatible:
        running = {"device": device, "precision": precision, "workers": workers, "progress": progress}
        signs = probe(src_base, src_ft, new_base, images if given else None, chosen, loading, running)
        found = replace(found, probe=signs)
    return found


def _side(peeked: Peeked) -> Side:
    checkpoint = peeked.checkpoint
    return Side(
        reference=checkpoint.reference,
        library=checkpoint.library,
        architecture=checkpoint.architecture,
        parameters=sum(tensor.numel() for tensor in checkpoint.weights.values()),
        classes=checkpoint.num_classes,
        labels=checkpoint.labels,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        revision=checkpoint.revision,
        download=peeked.download,
    )


def _head(
    source: Checkpoint, tuned: Checkpoint, target: Checkpoint, comparison: Comparison, recipe: Recipe
) -> HeadFacts:
    policy: str | None = recipe.port.head
    why = "asked for"
    if policy == "auto":
        sides = (source.weights, tuned.weights, target.weights)
        policy, why = foresee_policy(*sides, comparison.head, comparison.labels_agree)
    return HeadFacts(comparison.head, policy, why, comparison.labels_agree)


def _with_data(found: InputCheck, tuned: Checkpoint, images: Any, recipe: Recipe, token: str | None) -> InputCheck:
    try:
        facts = describe_data(images, recipe.data, token=token)
        found = replace(found, data=facts, notes=(*found.notes, *facts.notes))
        if facts.labels and tuned.labels:
            match_labels(facts.labels, tuned.labels)
        elif facts.classes is not None and _too_many(facts, tuned):
            raise DataError(
                f"'{facts.name}' has {facts.classes} classes, but '{tuned.reference}' tells {tuned.num_classes} apart; "
                "a port needs the data of the fine-tuning (--data-classes chooses among them)"
            )
    except DataError as error:
        return replace(found, problems=(*found.problems, str(error)))
    return found


def _too_many(facts: DataFacts, tuned: Checkpoint) -> bool:
    few = facts.labels is None and (facts.classes or 0) < tuned.num_classes  # the last class need not be everywhere
    return facts.classes != tuned.num_classes and not few


def _with_graph(
    found: InputCheck, tuned: Checkpoint, target: Checkpoint, recipe: Recipe, device: str | None
) -> InputCheck:
    try:
        size = choose_preprocess(tuned, recipe.data.image_size).input_size
        model: nn.Module = target.skeleton(tuned.num_classes)
        derived = derive_graph(model, size, verify=False)
    except RetargetError as error:
        return replace(found, problems=(*found.problems, str(error)))
    graph = derived.graph
    unknown = tuple(map(str, graph.unknown_operators))
    facts = GraphFacts(len(graph.groups), graph.share(1), derived.held, unknown)
    return replace(
        found, graph=facts, cost=estimate_cost(model, size, recipe, device, found.data.training if found.data else None)
    )
