"""Before a port: whether inputs fit together, what it would cost, and cheap signs of whether it will pay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_retarget.data import BatchCache, DataFacts, check_classes, choose_preprocess, describe_data, match_labels
from hf_retarget.data.load import NO_DATA
from hf_retarget.document import GateFacts, RelationFacts
from hf_retarget.errors import DataError, ModelError, PortError, RetargetError
from hf_retarget.evaluation.gates import Evidence, list_errors, look_at_gates
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.matching.methods import match
from hf_retarget.models import (
    Checkpoint,
    Comparison,
    Difference,
    Peeked,
    compare,
    list_differences,
    load_checkpoint,
    peek_checkpoint,
)
from hf_retarget.models.heads import foresee_policy
from hf_retarget.models.relation import compare_samples
from hf_retarget.porting.contest import Contest
from hf_retarget.porting.cost import (
    Cost,
    ImageCounts,
    Price,
    count_images,
    estimate_cost,
    estimate_growth,
    price_port,
)
from hf_retarget.porting.inputs import STEP_IMAGES, WRONG_CLASSES, Given, Inputs, Reference, load_inputs, trace_model
from hf_retarget.porting.port import PortArguments
from hf_retarget.porting.resume import Workplace
from hf_retarget.recipe import Recipe, finish_recipe
from hf_retarget.run import Run, RunArguments, check_arguments, doing_now, peak_memory, pick

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensors = Mapping[str, Tensor]

CHECK_FORMAT, PLAN_FORMAT = "hf-retarget/check/1", "hf-retarget/plan/1"


# ---- check: from configurations and headers


@dataclass(frozen=True)
class Side:
    """One of the three models, as far as its configuration and the headers of its weights tell."""

    reference: str
    library: str
    architecture: str
    parameters: int
    """Numbers in its state dict, BatchNorm statistics included."""
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
    """What was found. Where something rules out a port, what depends on it is None."""

    sides: Mapping[str, Side]
    """source, tuned and target."""
    problems: tuple[str, ...]
    """What rules out a port, in sentences."""
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    """Tensors that are not the same on all three sides; those of the classifier may differ."""
    head: HeadFacts | None = None
    graph: GraphFacts | None = None
    data: DataFacts | None = None
    relation: RelationFacts | None = None
    """How the bases are related, by a sample of their weights; None if they could not be read in parts."""
    gates: tuple[GateFacts, ...] = ()
    """What was looked at, as far as it could be seen."""
    cost: Cost | None = None
    probe: Probe | None = None

    @property
    def compatible(self) -> bool:
        """Whether nothing was found that rules out a port."""
        return not self.problems

    @property
    def download(self) -> int:
        """Bytes of weights that a port would download."""
        return sum(side.download for side in self.sides.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"format": CHECK_FORMAT, "compatible": self.compatible, "download": self.download, **asdict(self)}


class CheckArguments(RunArguments, total=False):
    """Options of a check besides models, data and recipe."""

    preset: str | None
    overrides: Mapping[str, Any] | None
    load_weights: bool


def check(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    **options: Unpack[CheckArguments],
) -> InputCheck:
    """Find out whether a port is possible and what it costs, from configurations, headers and samples of weights.

    The arguments are those of `port`; without `data`, only the models are checked. With `load_weights`, the weights
    are loaded after all, and cheap signs are measured of whether a port will pay. A model that cannot be found or read
    is an error; models that do not fit together are a result.
    """
    check_arguments("check", options, CheckArguments)
    run, models = Run(**pick(options, Run)), (src_base, src_ft, new_base)
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    given = chosen.data.reference not in ("", NO_DATA) or not isinstance(images, str)
    with doing_now(run.progress, "reading headers"):
        peeked = [peek_checkpoint(each, **run.loading) for each in models]
    source, tuned, target = (each.checkpoint for each in peeked)
    sides = dict(zip(("source", "tuned", "target"), map(_describe_side, peeked), strict=True))
    found = InputCheck(sides, (), (), list_differences(source, tuned, target))
    try:
        comparison = compare(source, tuned, target)
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
        found = _with_graph(found, tuned, target, chosen, run)
    if options.get("load_weights") and found.compatible:
        found = replace(found, probe=probe(models, images if given else None, chosen, run))
    return found


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
    why = "asked for"
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
            match_labels(facts.labels, tuned.labels)
        elif facts.classes is not None:
            sides = (tuned.reference, tuned.num_classes)
            check_classes(facts.name, facts.classes, facts.labels, *sides, advice=WRONG_CLASSES)
    except DataError as error:
        return replace(found, problems=(*found.problems, str(error)))
    return found


def _with_graph(found: InputCheck, tuned: Checkpoint, target: Checkpoint, recipe: Recipe, run: Run) -> InputCheck:
    try:
        size = choose_preprocess(tuned, recipe.data.image_size).input_size
        model: nn.Module = target.skeleton(tuned.num_classes)
        traced = trace_model(model, size, check=False)
    except RetargetError as error:
        return replace(found, problems=(*found.problems, str(error)))
    graph, data = traced.graph, found.data
    counts = [(data.divided.get(name) if data else None) or 0 for name in ("train", "validation", "test")]
    images = ImageCounts(train=counts[0], validation=counts[1], test=counts[2])
    unknown = tuple(map(str, graph.unknown_operators))
    facts = GraphFacts(len(graph.groups), graph.share(1), traced.held, unknown)
    return replace(found, graph=facts, cost=estimate_cost(model, size, recipe, run, images))


# ---- plan: everything loaded, one minibatch timed


@dataclass(frozen=True)
class Plan:
    """What a port would do."""

    architecture: str
    parameters: int
    classes: int
    head: str
    why: str
    groups: int
    held: tuple[str, ...]
    data: str
    images: Mapping[str, int]
    method: str
    steps: int
    gradients: int
    """Gradients of a minibatch, on both sides together; `auto` takes them only if it has to match."""
    forwards: float
    """Minibatches that only go forward."""
    control_steps: int
    finetune_steps: int
    relation: RelationFacts
    compressed: bool
    memory: int
    """Bytes that the process will need at most: what one minibatch needed, and what the steps add to that."""
    seconds: float
    """Estimated from the gradient of one minibatch, without the search for permutations."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
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
    """Load and check everything as a port would, time one minibatch, and stop; the arguments are those of `port`."""
    check_arguments("plan", options, PortArguments)
    run, given = Run(**pick(options, Run)), Given(**pick(options, Given))
    chosen, images = finish_recipe(data, recipe, options.get("preset"), options.get("overrides"))
    inputs = load_inputs((src_base, src_ft, new_base), images, given.complete(chosen), run, given)
    if not inputs.has_images:
        raise PortError("a port without images costs nothing but loading the models; leave out --dry-run")
    contest = Contest(inputs, run, Workplace(None))
    if given.permutation is not None:
        _ = contest.given_permutation  # an error if it does not fit
    chosen, problem, traced = contest.recipe, contest.problem, contest.traced
    with doing_now(run.progress, "timing one minibatch"):
        began = time.perf_counter()
        inputs.gradients(run, grad_batches=1)(problem.target, 1)
        each = time.perf_counter() - began
    steps, train = problem.trajectory.steps, len(inputs.data.train)
    price = price_port(chosen, count_images(inputs), steps=steps, asked=given.asked(chosen))
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
        notes=(*inputs.comparison.notes, *inputs.data.notes),
    )


def _estimate_memory(contest: Contest, price: Price) -> int:
    """The peak so far, with everything loaded and the gradient of a minibatch taken, and what comes on top of it."""
    inputs, problem, port = contest.inputs, contest.problem, contest.recipe.port
    searches = price.gradients > 0
    cache = BatchCache(inputs.preprocess.input_size, limit=STEP_IMAGES)
    images = cache.size(port.grad_batches * port.batch_size)
    others = images - cache.size(port.batch_size) if images <= cache.limit and searches else 0
    growth = estimate_growth(inputs.size, problem.trajectory.steps, problem.options.compression, searches=searches)
    return (peak_memory() or 0) + others + growth


# ---- probe: signs from the weights

_CAVEAT = "These are signs, not a forecast: no threshold has been validated, and only a port beside its control tells."


@dataclass(frozen=True)
class Probe:
    """Signs; cosines are between all parameters but those of the classifier, taken as one long vector."""

    delta: float
    """Norm of the fine-tuning, relative to that of the old base."""
    bases_before: float
    """Cosine between the two bases as they are."""
    bases_after: float
    """The same after the old base was permuted to match the new one by its weights."""
    gradients_before: float | None
    """Cosine between the gradients of both, on one minibatch, under the tuned model's classifier; None without data."""
    gradients_after: float | None

    @property
    def sentence(self) -> str:
        """What the signs show, plainly."""
        far = f"The fine-tuning moved the weights by {self.delta:.1%} of their norm"
        if self.bases_before > 0.9:
            bases = f"the bases are nearly the same weights (cosine {self.bases_before:.2f}), so a naive port may do"
        else:
            gain = self.bases_after - self.bases_before
            words = "brings them closer" if gain > 0.05 else "hardly brings them closer"
            bases = f"matching {words} (cosine of the bases {self.bases_before:.2f}, then {self.bases_after:.2f})"
        said = f"{far}; {bases}"
        if self.gradients_before is not None and self.gradients_after is not None:
            more = self.gradients_after > max(self.gradients_before, 0) + 0.02
            words = "agree more" if more else "do not agree more"
            said += f"; gradients {words} after it ({self.gradients_before:.2f}, then {self.gradients_after:.2f})"
        return f"{said}. {_CAVEAT}"


def probe(models: tuple[Reference, Reference, Reference], images: Any, recipe: Recipe, run: Run) -> Probe:
    """Load the weights and measure; gradients only if there are images."""
    inputs = None
    if images is None:
        source, tuned, target = (load_checkpoint(each, **run.loading) for each in models)
        head = set(compare(source, tuned, target).head)
        model, size = target.build(tuned.num_classes), choose_preprocess(tuned, recipe.data.image_size).input_size
        weights = [each.in_float32() for each in (source, tuned, target)]
    else:
        inputs = load_inputs(models, images, recipe, run)
        head, model, size = set(inputs.comparison.head), inputs.model, inputs.preprocess.input_size
        weights = [inputs.heads.source, inputs.tuned.in_float32(), inputs.heads.target]
    names = [name for name, _ in model.named_parameters() if name not in head]
    old, new, other = ({name: side[name] for name in names} for side in weights)
    with doing_now(run.progress, "matching the weights"):
        graph = trace_model(model, size, check=False).graph
        permutation = match(graph, other, old).permutation
    before = after = None
    if inputs is not None and inputs.data.labelled:
        with doing_now(run.progress, "comparing gradients"):
            before, after = _compare_gradients(inputs, names, graph, permutation, run)
    delta = {name: new[name] - old[name] for name in names}
    return Probe(
        delta=_norm(delta) / max(_norm(old), 1e-30),
        bases_before=_cosine(other, old),
        bases_after=_cosine(other, graph.apply(permutation, old)),
        gradients_before=before,
        gradients_after=after,
    )


def _compare_gradients(
    inputs: Inputs, names: list[str], graph: PermutationGraph, permutation: Permutation, run: Run
) -> tuple[float, float]:
    """Under the tuned model's classifier: with one of zeros, nothing would come through to the layers below."""
    gradient = inputs.gradients(run, grad_batches=1)
    tuned = inputs.tuned.in_float32()
    head = {name: tuned[name] for name in inputs.names if name in inputs.comparison.head}

    def at(base: Tensors, classifier: Tensors) -> dict[str, Tensor]:
        return gradient({**inputs.parameters(base), **classifier}, 1)

    def rest(tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensors[name] for name in names}

    source = at(inputs.heads.source, head)
    plain = at(inputs.heads.target, head)
    carried = at(inputs.heads.target, graph.apply(permutation, head))
    before = _cosine(rest(plain), rest(source))
    return before, _cosine(rest(carried), rest(graph.apply(permutation, source)))


def _norm(tensors: Tensors) -> float:
    return float(sum(float(each.double().square().sum()) for each in tensors.values()) ** 0.5)


def _cosine(one: Tensors, other: Tensors) -> float:
    product = sum(float(torch.sum(each.double() * other[name].double())) for name, each in one.items())
    return product / max(_norm(one) * _norm(other), 1e-30)
