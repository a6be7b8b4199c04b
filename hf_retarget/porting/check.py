"""Before a port: whether the inputs fit together, and what it would cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_retarget.adapters.reading import peek_tuned
from hf_retarget.data import DataDescription, check_classes, choose_preprocess, describe_data, match_labels
from hf_retarget.data.load import NO_DATA, load_data
from hf_retarget.document import GateFacts, RelationFacts
from hf_retarget.errors import DataError, ModelError, PortError, RetargetError
from hf_retarget.evaluation.batchnorm import has_batchnorm
from hf_retarget.evaluation.gates import Evidence, list_errors, look_at_gates
from hf_retarget.models import (
    Checkpoint,
    Comparison,
    Difference,
    Peeked,
    Reference,
    compare_checkpoints,
    list_differences,
    peek_checkpoint,
)
from hf_retarget.models.heads import foresee_policy
from hf_retarget.models.relation import compare_samples, recommend
from hf_retarget.porting.contest import Contest
from hf_retarget.porting.cost import (
    Cost,
    ImageCounts,
    Price,
    count_images,
    estimate_cost,
    estimate_growth,
    estimate_other_images,
    price_port,
    price_unmatched,
)
from hf_retarget.porting.inputs import WRONG_CLASSES, Given, load_inputs, trace_model
from hf_retarget.porting.port import PortArguments
from hf_retarget.porting.resume import Workplace
from hf_retarget.porting.streamed import look_first, open_sides
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments, doing_now, peak_memory, pick

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TRIED = 1_000_000_000
"""Maximum number of parameters of a model that is built with random weights to time a gradient."""

CHECK_FORMAT, PLAN_FORMAT = "hf-retarget/check/1", "hf-retarget/plan/1"


# ---- check: from configurations and headers


@dataclass(frozen=True)
class Side:
    """One of the three models, as described by its configuration and weight headers."""

    reference: str
    library: str
    architecture: str
    parameters: int
    """Numbers in its state dict, including BatchNorm statistics."""
    classes: int
    labels: tuple[str, ...] | None
    dtype: str
    revision: str | None
    download: int
    """Bytes to download; 0 if the model is on this machine."""


@dataclass(frozen=True)
class HeadFacts:
    """The classifier tensors, and the head both bases will start from."""

    tensors: tuple[str, ...]
    policy: str | None
    """None if it can only be decided once the weights are loaded."""
    why: str
    labels_agree: bool | None
    """Whether all three models have the same labels in the same order; None if unknown."""


@dataclass(frozen=True)
class GraphFacts:
    """How much of the model may be permuted, according to an unverified trace."""

    groups: int
    share: float
    """Share of the parameters on a free axis."""
    held: tuple[str, ...]
    unknown_operators: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class InputCheck:
    """The result of `check`; fields that could not be determined are None."""

    sides: Mapping[str, Side]
    """source, tuned and target."""
    problems: tuple[str, ...]
    """Reasons that rule out a port, as sentences."""
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    """Tensors that differ between the three models; those of the classifier may."""
    head: HeadFacts | None = None
    graph: GraphFacts | None = None
    data: DataDescription | None = None
    relation: RelationFacts | None = None
    """How the bases are related, from a sample of their weights; None if they cannot be sampled."""
    gates: tuple[GateFacts, ...] = ()
    """Results of the gates, as far as they could be evaluated."""
    advice: str | None = None
    """The recommended action: `port` (without gradients), `fit a head` or `retrain`."""
    cost: Cost | None = None

    def __repr__(self) -> str:
        return f"InputCheck({'; '.join(self.problems) or f'compatible, advice: {self.advice}'})"

    @property
    def compatible(self) -> bool:
        """Whether a port is possible."""
        return not self.problems

    @property
    def download(self) -> int:
        """Bytes of weights to download."""
        return sum(side.download for side in self.sides.values())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {"format": CHECK_FORMAT, "compatible": self.compatible, "download": self.download, **asdict(self)}


class CheckArguments(RunArguments, total=False):
    """Further options of `check`."""

    preset: str | None
    overrides: Mapping[str, Any] | None
    force_base: bool


def check(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    **options: Unpack[CheckArguments],
) -> InputCheck:
    """Check whether a port is possible and what it costs, from configurations, headers and samples of weights.

    The arguments are those of `port`; without `data`, only the models are checked. A missing or unreadable model is an
    error; models that do not fit together are listed as problems.
    """
    check_arguments("check", options, CheckArguments)
    run = Run(**pick(options, Run))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    given = chosen.data.reference not in ("", NO_DATA) or not isinstance(images, str)
    if chosen.data.reference == NO_DATA and not given:
        return _check_streamed((src_base, src_ft, new_base), run, options.get("force_base", False))
    with doing_now(run.progress, "reading headers"):
        old, new = (peek_checkpoint(each, **run.loading) for each in (src_base, new_base))
        peeked = [old, peek_tuned(src_ft, old, force_base=options.get("force_base", False), **run.loading), new]
    source, tuned, target = (each.checkpoint for each in peeked)
    sides = dict(zip(("source", "tuned", "target"), map(_describe_side, peeked), strict=True))
    found = InputCheck(sides, (), (), list_differences(source, tuned, target))
    try:
        comparison = compare_checkpoints(source, tuned, target)
    except ModelError as error:
        return replace(found, problems=(str(error),))
    relation = compare_samples([each.sample for each in peeked], comparison.head)
    head = _describe_head((source, tuned, target), comparison, chosen)
    resized = any(each.head and each.source != each.tuned for each in found.differences)
    gates = look_at_gates(Evidence(relation, head_tuned=resized or None))
    found = replace(found, notes=comparison.notes, head=head, relation=relation, gates=gates)
    found = replace(found, problems=tuple(list_errors(gates)))
    if given:
        with doing_now(run.progress, "reading about the data"):
            found = _with_data(found, tuned, images, chosen, run)
    with doing_now(run.progress, "tracing the model"):
        found = _with_graph(found, (tuned, target), images if given else None, chosen, run)
    return found


def _check_streamed(models: tuple[Reference, ...], run: Run, force_base: bool) -> InputCheck:
    """The same for a port without images, which takes models of any kind."""
    given = Given(force_base=force_base)
    with doing_now(run.progress, "reading headers"), tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
        sides = open_sides(models, run, given, Path(place), peek=True)
        about = {
            name: Side(
                reference=side.reference,
                library=side.library,
                architecture=side.architecture,
                parameters=sum(each.numbers for each in side.tensors.values()),
                classes=side.classes,
                labels=None,
                dtype=side.facts.dtype,
                revision=side.facts.revision,
                download=side.hub.remaining if side.hub else 0,
            )
            for name, side in sides.items()
        }
        found = InputCheck(about, (), (), ())
        try:
            relation = look_first(sides, given)
        except (ModelError, PortError) as error:
            return replace(found, problems=(str(error),))
    gates = look_at_gates(Evidence(relation))
    return replace(found, relation=relation, gates=gates, problems=tuple(list_errors(gates)))


def _describe_side(peeked: Peeked) -> Side:
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


def _describe_head(
    sides: tuple[Checkpoint, Checkpoint, Checkpoint], comparison: Comparison, recipe: Recipe
) -> HeadFacts:
    policy: str | None = recipe.port.head
    why = "as requested"
    if policy == "auto":
        policy, why = foresee_policy(
            sides[0].weights, sides[1].weights, sides[2].weights, comparison.head, comparison.labels_agree
        )
    return HeadFacts(comparison.head, policy, why, comparison.labels_agree)


def _with_data(found: InputCheck, tuned: Checkpoint, images: Any, recipe: Recipe, run: Run) -> InputCheck:
    try:
        facts = describe_data(images, recipe.data, token=run.token)
        found = replace(found, data=facts, notes=(*found.notes, *facts.notes))
        if facts.labels and tuned.labels:
            match_labels(facts.labels, tuned.labels, f"the tuned model '{tuned.reference}'")
        elif facts.classes is not None:
            sides = (tuned.reference, tuned.num_classes)
            check_classes(facts.name, facts.classes, facts.labels, *sides, advice=WRONG_CLASSES)
    except DataError as error:
        return replace(found, problems=(*found.problems, str(error)))
    seen = look_at_gates(Evidence(counts=facts.counts, labels=facts.labels))
    gates = tuple(new if new.found is not None else old for old, new in zip(found.gates, seen, strict=True))
    return replace(found, gates=gates)


def _with_graph(
    found: InputCheck, sides: tuple[Checkpoint, Checkpoint], data_given: Any, recipe: Recipe, run: Run
) -> InputCheck:
    tuned, target = sides
    try:
        preprocess = choose_preprocess(tuned, recipe.data.image_size, run.preprocess)
        if preprocess.transform is not None and data_given is not None:
            preprocess = load_data(
                data_given, recipe.data, preprocess, token=run.token, need_labels=False
            ).train.preprocess
        elif preprocess.transform is not None:
            note = "the input size is known only with data, so the model was not traced (--data)"
            return replace(found, notes=(*found.notes, note))
        found = replace(found, notes=(*found.notes, f"images: {preprocess.sentence}"))
        size = preprocess.input_size
        model: nn.Module = target.skeleton(tuned.num_classes)
        traced = trace_model(model, size, check=False)
    except RetargetError as error:
        return replace(found, problems=(*found.problems, str(error)))
    graph, about = traced.graph, found.data
    counts = [(about.divided.get(name) if about else None) or 0 for name in ("train", "validation", "test")]
    images = ImageCounts(train=counts[0], validation=counts[1], test=counts[2])
    unknown = tuple(map(str, graph.unknown_operators))
    facts = GraphFacts(len(graph.groups), graph.share(1), traced.held, unknown)
    if found.relation:
        found = replace(found, advice=recommend(found.relation.word, has_batchnorm=has_batchnorm(model)))
    if sum(each.numel() for each in model.parameters()) <= _TRIED:
        model = replace(target, weights={}).build(tuned.num_classes)  # with random weights
    with doing_now(run.progress, "timing a few images"):
        return replace(found, graph=facts, cost=estimate_cost(model, size, recipe, run, images, found.relation))


# ---- plan: everything loaded, one minibatch timed


@dataclass(frozen=True)
class Plan:
    """The plan of a port, from a dry run."""

    architecture: str
    parameters: int
    classes: int
    head: str
    why: str
    groups: int
    held: tuple[str, ...]
    data: str
    images: Mapping[str, int]
    made: str
    """The preprocessing of images, for display."""
    method: str
    steps: int
    gradients: int
    """Minibatch gradients on both sides; `auto` takes them only if it has to match."""
    forwards: float
    """Forward-only minibatches."""
    control_steps: int
    finetune_steps: int
    relation: RelationFacts
    compressed: bool
    memory: int
    """Estimated peak bytes: those of one minibatch, and what the steps add."""
    seconds: float
    """Estimated from one minibatch, without the search for permutations."""
    seconds_unmatched: float | None = None
    """The same if matching turns out to be unnecessary; None if it cannot."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {"format": PLAN_FORMAT, **asdict(self)}


def plan(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    **options: Unpack[PortArguments],
) -> Plan:
    """Load and check everything as `port` would, then time one minibatch; the arguments are those of `port`."""
    check_arguments("plan", options, PortArguments)
    run, given = Run(**pick(options, Run)), Given(**pick(options, Given))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    if chosen.data.reference == NO_DATA and isinstance(images, str):
        raise PortError("a port without images costs little more than reading the models; leave out --dry-run")
    inputs = load_inputs((src_base, src_ft, new_base), images, given.complete(chosen), run, given)
    contest = Contest(inputs, run, Workplace(None))
    if errors := list_errors(look_at_gates(Evidence(inputs.relation, inputs.head_tuned))):
        raise PortError(errors[0])
    if given.permutation is not None:
        _ = contest.given_permutation  # an error if it does not fit
    chosen, problem, traced = contest.recipe, contest.problem, contest.traced
    with doing_now(run.progress, "timing one minibatch"):
        began = time.perf_counter()
        inputs.gradients(run, grad_batches=1)(problem.target, 1)
        each = time.perf_counter() - began
    steps, train = problem.trajectory.steps, len(inputs.data.train)
    price = price_port(chosen, count_images(inputs), steps=steps, asked=given.asked(chosen))
    unmatched = price_unmatched(chosen, count_images(inputs), inputs.relation)
    return Plan(
        architecture=inputs.target.architecture,
        parameters=inputs.size,
        classes=inputs.classes,
        head=inputs.heads.policy,
        why=inputs.heads.why,
        groups=len(traced.graph.groups),
        held=traced.held,
        data=inputs.data.name,
        images={name: len(getattr(inputs.data, name)) for name in ("train", "validation", "test")},
        made=inputs.preprocess.sentence,
        method=given.asked(chosen).method,
        steps=steps,
        gradients=price.gradients,
        forwards=price.forwards,
        control_steps=price.alternative,
        finetune_steps=chosen.finetune.total_steps(train),
        relation=inputs.relation,
        compressed=problem.options.compression is not None,
        memory=_estimate_memory(contest, price),
        seconds=each * price.total,
        seconds_unmatched=each * unmatched.total if unmatched and given.permutation is None else None,
        notes=(*inputs.comparison.notes, *inputs.data.notes),
    )


def _estimate_memory(contest: Contest, price: Price) -> int:
    """The peak so far, after one gradient with everything loaded, and what the steps will add."""
    inputs, problem = contest.inputs, contest.problem
    searches = price.gradients > 0
    others = estimate_other_images(contest.recipe.port, inputs.preprocess.input_size, searches=searches)
    growth = estimate_growth(inputs.size, problem.trajectory.steps, problem.options.compression, searches=searches)
    return (peak_memory() or 0) + others + growth
