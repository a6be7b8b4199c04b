"""The inputs of a port: three matching checkpoints, images, heads, and the permutation graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.adapters.reading import load_tuned
from hf_retarget.adapters.writing import check_adapter
from hf_retarget.contenders import Asked
from hf_retarget.data import (
    Batch,
    BatchCache,
    ImageData,
    Preprocess,
    Split,
    check_classes,
    choose_preprocess,
    load_data,
)
from hf_retarget.data.load import NO_DATA
from hf_retarget.document import RelationFacts
from hf_retarget.errors import DataError, ModelError, PortError
from hf_retarget.files import hash_file, hash_tensors, load_tensors
from hf_retarget.graph import PermutationGraph, pin_tables
from hf_retarget.graph.trace import trace
from hf_retarget.graph.verify import Verification, keep_graph, recall_graph, verify
from hf_retarget.matching.gradients import GradientCache, StepGradients
from hf_retarget.matching.objective import Compression
from hf_retarget.matching.problem import MatchOptions, Problem
from hf_retarget.matching.trajectory import CheckpointTrajectory, LinearTrajectory, Trajectory
from hf_retarget.models import Checkpoint, Comparison, Reference, compare_checkpoints, load_checkpoint
from hf_retarget.models.classifier import check_shapes
from hf_retarget.models.heads import Heads, fit_heads, make_model
from hf_retarget.models.relation import INDEPENDENT, list_backbone, measure_relation
from hf_retarget.models.timm_models import is_timm
from hf_retarget.models.weights import find_not_finite
from hf_retarget.porting.resume import ENVIRONMENT
from hf_retarget.recipe import DataOptions, PortOptions, Recipe
from hf_retarget.run import Run, describe_environment, list_versions
from hf_retarget.training import TrajectoryRecorder

Tensors = Mapping[str, Tensor]
Checkpoints = str | Path | Sequence[str | Path]
"""A folder written by a TrajectoryRecorder, or files in order."""

WRONG_CLASSES = "a port needs the data of the fine-tuning (--data-classes chooses among them)"
"""Advice for data whose classes differ from those of the tuned model."""

EXACT = 1 << 28
"""Bytes of gradients that are kept exactly; above, only their leading directions are."""

STEP_IMAGES = 1 << 30
"""Bytes of images in a step that are cached, so that they are decoded once for both sides."""

_ANOTHER = 0.5  # distance of the last checkpoint from the tuned model, in lengths of the fine-tuning
_CONTROLS = 4  # negative controls of a verification


@dataclass(frozen=True, eq=False)
class Given:
    """Optional inputs of a port."""

    permutation: Any = None
    """An earlier permutation, its file, or the folder of its port."""
    tuned_target: Reference | None = None
    """The real fine-tuning of the new base, to compare with."""
    initial_head: str | Path | Tensors | None = None
    """The initial head of the fine-tuning."""
    checkpoints: Checkpoints | None = None
    """Checkpoints of the fine-tuning, to port along."""
    gradient_cache: str | Path | None = None
    """A folder for the gradients of the old side, reused by ports of the same fine-tuning to other bases."""
    also_data: Any = None
    """A second set of images to score on, for example of what the new base is better at."""
    also_data_fit: bool = False
    """Whether to fit closed-form heads on its training images as well."""
    force_base: bool = False
    """Whether to accept an adapter that names a different base."""
    text: str | Path | None = None
    """Texts on which to score language models."""
    force_relation: bool = False
    """Whether to add a fine-tuning without images even between independent bases."""

    def complete(self, recipe: Recipe) -> Recipe:
        """Adapt a recipe to these inputs; PortError if it needs an input that is missing.

        Example:
            >>> Given(initial_head="head.safetensors").complete(Recipe()).port.head
            'given'
        """
        changes = {}
        if recipe.data.reference != NO_DATA and (self.text is not None or self.force_relation):
            raise PortError("--text and --force-relation apply only to ports without images; add --data none")
        if self.initial_head is not None and recipe.port.head == "auto":
            changes["port.head"] = "given"
        if self.checkpoints is not None:
            find_checkpoints(self.checkpoints)
            changes["port.trajectory"] = "actual"
        elif recipe.port.trajectory == "actual":
            raise PortError(
                "an actual trajectory needs the checkpoints of the fine-tuning; name their folder with --checkpoints "
                "(hf-retarget finetune --record makes one), or use a linear trajectory"
            )
        if recipe.port.method == "oracle" and self.tuned_target is None:
            raise PortError(
                "the method 'oracle' needs the real fine-tuning of the new base; name it with --tuned-target"
            )
        return recipe.override(**changes)

    def asked(self, recipe: Recipe) -> Asked:
        """The request that decides which contenders enter."""
        return Asked(
            "given" if self.permutation is not None else recipe.port.method,
            recipe.port.control,
            self.tuned_target is not None,
            bool(recipe.finetune.steps or recipe.finetune.epochs),
        )


@dataclass(frozen=True, eq=False)
class Inputs:
    """Everything a port starts from; weights are float32."""

    source: Checkpoint
    tuned: Checkpoint
    target: Checkpoint
    comparison: Comparison
    heads: Heads
    data: ImageData
    preprocess: Preprocess
    model: nn.Module = field(repr=False)
    """A model of this architecture with the tuned model's classes, for computing."""
    recipe: Recipe
    relation: RelationFacts
    """How the bases are related."""
    given: Given = field(default_factory=Given)
    tuned_target: Checkpoint | None = None
    also: ImageData | None = None
    """The second set of images."""

    @property
    def classes(self) -> int:
        """Number of classes of the ported model."""
        return self.tuned.num_classes

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Class names, if the tuned model or the data provide them."""
        return self.tuned.labels or self.data.labels

    @property
    def head_tuned(self) -> bool:
        """Whether the head of the tuned model differs from that of the old base."""
        old, new = self.source.weights, self.tuned.weights
        pairs = ((old.get(name), new.get(name)) for name in self.comparison.head)
        return any(one is None or two is None or not torch.equal(one, two) for one, two in pairs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, tied ones once."""
        return tuple(name for name, _ in self.model.named_parameters())

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(self.heads.target[name].numel() for name in self.names)

    def parameters(self, weights: Tensors) -> dict[str, Tensor]:
        """Select the parameters from a state dict."""
        return {name: weights[name] for name in self.names}

    @property
    def structure(self) -> dict[str, Any] | None:
        """What the permutation graph depends on; None for the user's own code, which cannot be identified."""
        target = self.target
        if target.module is not None or (target.library == "timm" and not is_timm(target.architecture)):
            return None
        shapes = {name: list(tensor.shape) for name, tensor in self.model.state_dict().items()}
        return {"library": target.library, "architecture": target.architecture, "shapes": shapes} | {
            "options": {name: repr(value) for name, value in target.options.items()}
        }

    @cached_property
    def trajectory(self) -> Trajectory:
        """The fine-tuning as steps, along a straight line or its checkpoints."""
        source, options = self.parameters(self.heads.source), self.recipe.port
        if self.given.checkpoints is not None:
            found = CheckpointTrajectory(source, find_checkpoints(self.given.checkpoints))
            _check_end(found, source, self.parameters(self.tuned.in_float32()))
            return found
        return LinearTrajectory(source, self.parameters(self.tuned.in_float32()), options.steps, options.schedule)

    def gradients(self, run: Run, train: Split | None = None, grad_batches: int | None = None) -> StepGradients:
        """Gradients on the minibatches of each step, drawn from `train` if given; both sides see the same images."""
        options, train = self.recipe.port, train or self.data.train
        count = grad_batches or options.grad_batches
        cache = BatchCache(self.preprocess.input_size, limit=STEP_IMAGES)
        how: dict[str, Any] = {"seed": options.seed, "augment": options.augment, "workers": run.workers}

        def batches(step: int) -> Iterable[Batch]:
            draw = partial(train.batches, options.batch_size, skip=(step - 1) * count, count=count, **how)
            cache.forget(but=f"step {step}")
            return cache.get(f"step {step}", count * options.batch_size, draw)

        return StepGradients(self.model, batches, count, options.micro_batch, run)

    def problem(
        self, graph: PermutationGraph, run: Run, train: Split | None = None, targets: str = "labels"
    ) -> Problem:
        """The matching problem, with gradients on the images of `train` and these targets."""
        options, real = self.recipe.port, self.tuned_target
        search = MatchOptions(
            seed=options.seed,
            restarts=options.restarts,
            start=options.start,
            normalise=options.normalise,
            compression=choose_compression(options, self.trajectory.steps, self.size),
        )
        return Problem(
            graph,
            self.parameters(self.heads.source),
            self.parameters(self.heads.target),
            self.trajectory,
            self.gradients(run, train),
            search,
            self._gradient_cache(run, targets),
            self.parameters(real.in_float32()) if real else None,
            run.progress,
        )

    def _gradient_cache(self, run: Run, targets: str) -> GradientCache | None:
        if self.given.gradient_cache is None:
            return None
        source, tuned = self.parameters(self.heads.source), self.parameters(self.tuned.in_float32())
        deciding = ("trajectory", "steps", "schedule", "batch_size", "grad_batches", "micro_batch", "seed", "augment")
        key = {
            "source": hash_tensors(source),
            "tuned": hash_tensors(tuned),
            "checkpoints": self.checkpoint_hashes,
            **{name: getattr(self.recipe.port, name) for name in deciding},
            "architecture": self.tuned.architecture,
            "data": self.data.fingerprint,
            "targets": targets,
            "precision": run.precision,
            ENVIRONMENT: describe_environment(),
        }
        return GradientCache(self.given.gradient_cache, key, run.progress)

    @property
    def checkpoint_hashes(self) -> list[str] | None:
        """Hashes of the checkpoints of an actual trajectory."""
        paths = self.given.checkpoints
        return None if paths is None else [hash_file(path) for path in find_checkpoints(paths)]


def load_inputs(
    models: tuple[Reference, Reference, Reference], images: Any, recipe: Recipe, run: Run, given: Given | None = None
) -> Inputs:
    """Load the old base, the tuned model, the new base and the images, and check that they fit together."""
    given = given or Given()
    with run.stage("loading", "loading the models"):
        source, target = (load_checkpoint(each, **run.loading) for each in (models[0], models[2]))
        tuned = load_tuned(models[1], source, force_base=given.force_base, **run.loading)
        comparison = compare_checkpoints(source, tuned, target)
        real = None if given.tuned_target is None else load_checkpoint(given.tuned_target, **run.loading)
        _check_real(source, tuned, real)
    with run.stage("loading", "loading the data"):
        preprocess = choose_preprocess(tuned, recipe.data.image_size, run.preprocess)
        data = load_data(
            images,
            recipe.data,
            preprocess,
            model_labels=tuned.labels,
            model=f"the tuned model '{tuned.reference}'",
            token=run.token,
            need_labels=False,
        )
        preprocess = data.train.preprocess
        check_classes(data.name, data.classes, data.labels, tuned.reference, tuned.num_classes, WRONG_CLASSES)
        if (count := len(data.validation)) < 2:
            raise DataError(
                f"a port chooses its best step on validation images, and there are {count or 'none'}; "
                "set a larger share, such as data.validation=0.2 (--data-validation 0.2)"
            )
        if given.also_data_fit and given.also_data is None:
            raise DataError("also_data_fit needs a second set of images; name it with also_data (--also-data)")
        if recipe.port.targets == "labels" and not data.labelled:
            raise DataError(f"'{data.name}' has no labels to aim at; leave out --targets, or say --targets teacher")
        also = _load_also(given, data, recipe, tuned, preprocess, run) if given.also_data is not None else None
        heads = _fit_heads((source, tuned, target), comparison, recipe, given.initial_head)
        model = target.build(tuned.num_classes)
        relation = measure_relation(
            heads.source, tuned.in_float32(), heads.target, list_backbone(model, comparison.head)
        )
        if recipe.port.update < 1:
            heads = _update_in_part(heads, relation, recipe.port)
        model.load_state_dict(heads.target)
        check_shapes(model, preprocess.input_size, tuned.num_classes)
        check_adapter(model, recipe.port, comparison.head, preprocess.input_size)
    return Inputs(
        source, tuned, target, comparison, heads, data, preprocess, model, recipe, relation, given, real, also
    )


def _check_end(trajectory: CheckpointTrajectory, source: Tensors, tuned: Tensors) -> None:
    """Refuse checkpoints of another fine-tuning: the last one must be close to the tuned model."""
    last = trajectory.delta(trajectory.steps)
    apart = sum(float((source[name] + last[name] - weight).square().sum()) for name, weight in tuned.items())
    length = sum(float((weight - source[name]).square().sum()) for name, weight in tuned.items())
    if apart > _ANOTHER**2 * length:
        raise PortError(
            f"the last checkpoint is not the tuned model: they differ by more than {_ANOTHER:.0%} of the fine-tuning; "
            "name the checkpoints of this fine-tuning, in order"
        )


def _load_also(
    given: Given, data: ImageData, recipe: Recipe, tuned: Checkpoint, preprocess: Preprocess, run: Run
) -> ImageData:
    """Load a second set of images with the same classes; without a test split, all of them are test images."""
    reference, fits = given.also_data, given.also_data_fit
    place = str(reference) if isinstance(reference, (str, Path)) else ""
    own = recipe.data
    options = DataOptions(
        reference=place,
        classes=own.classes,
        seed=own.seed,
        image_column=own.image_column,
        label_column=own.label_column,
    )
    found = load_data(
        "" if place else reference,
        options,
        preprocess,
        model_labels=tuned.labels or data.labels,
        token=run.token,
        need_labels=False,
    )
    check_classes(found.name, found.classes, found.labels, tuned.reference, tuned.num_classes, WRONG_CLASSES)
    if found.test.rows is found.train.rows and not fits:
        test = found.test.join(found.train, found.test.name).join(found.validation, found.test.name)
        found = replace(found, test=test)
    if isinstance(reference, Mapping) and len(reference) == 1 and not {"train", "test"} & set(reference):
        found = replace(found, name=str(*reference))  # {"noisy": items}
    return replace(found, test=replace(found.test, name=f"{found.test.name} (also)"))


def _update_in_part(heads: Heads, relation: RelationFacts, options: PortOptions) -> Heads:
    """Replace the new base by a point between the old base and the new one."""
    check_update(options, relation)
    moved = {
        name: torch.lerp(old, new, options.update) if (new := heads.target[name]).is_floating_point() else new
        for name, old in heads.source.items()
    }
    return replace(heads, target=moved)


def check_update(options: PortOptions, relation: RelationFacts) -> None:
    """Refuse a partial update (`--update`) that has no meaning."""
    if options.update < 1 and options.alpha is not None:
        raise PortError("--update and --alpha scale the same line; give only one of them")
    if options.update < 1 and relation.word == INDEPENDENT:
        raise PortError(
            f"there is nothing between independent bases, so --update {options.update:g} has no meaning "
            f"({relation.sentence}); leave it out"
        )


@dataclass(frozen=True)
class Traced:
    """A permutation graph, its verification, and the groups that are not permuted because of fixed tables."""

    graph: PermutationGraph
    verification: Verification | None
    held: tuple[str, ...]


def trace_model(
    model: nn.Module, input_size: tuple[int, ...], *, check: bool = True, key: Mapping[str, Any] | None = None
) -> Traced:
    """Trace a model for images of this size and verify the graph; PortError if it does not hold.

    With `key`, which must contain everything the structure depends on, the graph is cached.
    """
    key = None if key is None or not check else {**key, "input_size": input_size, **list_versions()}
    if key is not None and (kept := recall_graph(key)):
        return _pin(kept[0], model, kept[1])
    example = torch.zeros(2, *input_size)  # a batch of two, which cannot be mistaken for an axis of size 1
    graph = trace(model, example)
    result = verify(model, graph, example[:1], draws=1, controls=_CONTROLS) if check else None
    if result is not None and not result.passed:
        raise PortError(
            f"the permutation graph of {type(model).__name__} cannot be trusted: {result.verdict} "
            "Please report the model; --no-verify continues at your own risk"
        )
    if key is not None and result is not None:
        keep_graph(key, graph, result)
    return _pin(graph, model, result)


def _pin(graph: PermutationGraph, model: nn.Module, result: Verification | None) -> Traced:
    graph, held = pin_tables(graph, model)
    return Traced(graph, result, held)


def choose_compression(options: PortOptions, steps: int, parameters: int) -> Compression | None:
    """The compression of gradients: as in the recipe, else none for small stacks.

    Example:
        >>> choose_compression(PortOptions(), 10, 1_000_000) is None, choose_compression(PortOptions(), 15, 10**9)
        (True, Compression(energy=0.999, sizes=1.0))
    """
    if options.compress is not None:
        return None if options.compress >= 1 else Compression(energy=options.compress)
    return None if 2 * steps * parameters * 4 <= EXACT else Compression()


def find_checkpoints(checkpoints: Checkpoints) -> list[Path]:
    """List the checkpoint files of an actual trajectory in order."""
    if isinstance(checkpoints, (str, Path)):
        path = Path(checkpoints).expanduser()
        return [path] if path.is_file() else TrajectoryRecorder.load(path)
    paths = [Path(each).expanduser() for each in checkpoints]
    if len(paths) == 1 and paths[0].is_dir():
        return TrajectoryRecorder.load(paths[0])
    if absent := next((path for path in paths if not path.is_file()), None):
        raise PortError(f"there is no checkpoint '{absent}'; name safetensors files in the order of the training")
    return paths


def _check_real(source: Checkpoint, tuned: Checkpoint, real: Checkpoint | None) -> None:
    if real is None:
        return
    compare_checkpoints(source, tuned, real)
    if real.num_classes != tuned.num_classes:
        raise ModelError(
            f"'{real.reference}' has {real.num_classes} classes, but '{tuned.reference}' has {tuned.num_classes}; "
            "the real fine-tuning of the new base must use the same data"
        )


def _fit_heads(
    sides: tuple[Checkpoint, Checkpoint, Checkpoint], comparison: Comparison, recipe: Recipe, initial_head: Any
) -> Heads:
    source, tuned, target = sides
    policy, names = recipe.port.head, comparison.head
    head = None
    if policy == "shared":
        state = make_model(target, tuned.num_classes, "fresh", recipe.port.seed).state_dict()
        head = {name: state[name] for name in names if name in state}
    elif initial_head is not None:
        head = {name: tensor.float() for name, tensor in _read_head(initial_head).items() if name in names}
    weights = (source.in_float32(), tuned.in_float32(), target.in_float32())
    return fit_heads(*weights, names, policy, head=head, labels_agree=comparison.labels_agree)


def _read_head(head: str | Path | Tensors) -> Tensors:
    if isinstance(head, Mapping):
        return head
    try:
        found, _ = load_tensors(head)
    except OSError as error:
        raise ModelError(f"cannot read the initial head '{head}': {error}; it must be a safetensors file") from error
    if broken := find_not_finite(found):
        raise ModelError(f"'{broken}' in the initial head '{head}' holds numbers that are not finite")
    return found
