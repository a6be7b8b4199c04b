"""From inputs and a recipe to the problem that is matched: trajectory, gradients, options of the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_retarget.errors import PortError
from hf_retarget.files import hash_file, hash_tensors
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.matching.gradients import Batch, GradientCache, Gradients
from hf_retarget.matching.methods import begin, run
from hf_retarget.matching.objective import Compression
from hf_retarget.matching.problem import MatchOptions, Problem, State
from hf_retarget.matching.trajectory import CheckpointTrajectory, LinearTrajectory, Trajectory, transplant
from hf_retarget.pipeline.clock import Clock
from hf_retarget.pipeline.drawn import Drawn
from hf_retarget.pipeline.inputs import Inputs
from hf_retarget.pipeline.price import MASKED
from hf_retarget.pipeline.reuse import load_permutation
from hf_retarget.pipeline.versions import describe_environment
from hf_retarget.pipeline.workplace import ENVIRONMENT
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import PortOptions, Recipe
from hf_retarget.training.recorder import TrajectoryRecorder

EXACT = 1 << 28
"""Bytes up to which gradients are kept as they are; beyond, their leading directions."""

IMAGES = 1 << 30
"""Bytes of a step's images up to which they are decoded only once, for both sides."""

Tensors = Mapping[str, Tensor]
Checkpoints = str | Path | Sequence[str | Path]
"""A folder that a TrajectoryRecorder wrote, or files in order."""


def complete_recipe(
    recipe: Recipe,
    *,
    initial_head: object | None = None,
    checkpoints: Checkpoints | None = None,
    tuned_target: object | None = None,
) -> Recipe:
    """The recipe of somebody who gives a head or checkpoints, and so wants them used; what is lacking is an error.

    Example:
        >>> complete_recipe(Recipe(), initial_head="head.safetensors").port.head
        'given'
    """
    changes = {}
    if initial_head is not None and recipe.port.head == "auto":
        changes["port.head"] = "given"
    if checkpoints is not None:
        find_checkpoints(checkpoints)
        changes["port.trajectory"] = "actual"
    elif recipe.port.trajectory == "actual":
        raise PortError(
            "an actual trajectory needs the checkpoints of the fine-tuning; name their folder with --checkpoints "
            "(hf-retarget finetune --record makes one), or use a linear trajectory"
        )
    if recipe.port.method == "oracle" and tuned_target is None:
        raise PortError("the method 'oracle' needs the real fine-tuning of the new base; name it with --tuned-target")
    return recipe.override(**changes)


def choose_compression(options: PortOptions, steps: int, parameters: int) -> Compression | None:
    """As the recipe says; without a word, small stacks are kept exactly.

    Example:
        >>> choose_compression(PortOptions(), 10, 1_000_000) is None, choose_compression(PortOptions(), 15, 10**9)
        (True, Compression(energy=0.999, sizes=1.0))
    """
    if options.compress is not None:
        return None if options.compress >= 1 else Compression(energy=options.compress)
    return None if 2 * steps * parameters * 4 <= EXACT else Compression()


def find_checkpoints(checkpoints: Checkpoints) -> list[Path]:
    """The files of an actual trajectory, in order."""
    if isinstance(checkpoints, (str, Path)):
        path = Path(checkpoints).expanduser()
        return [path] if path.is_file() else TrajectoryRecorder.load(path)
    paths = [Path(each).expanduser() for each in checkpoints]
    if len(paths) == 1 and paths[0].is_dir():
        return TrajectoryRecorder.load(paths[0])
    if absent := next((path for path in paths if not path.is_file()), None):
        raise PortError(f"there is no checkpoint '{absent}'; name safetensors files in the order of the training")
    return paths


@dataclass(frozen=True)
class StepGradients:
    """Gradients on the minibatches of a step: the same images, whichever side asks, decoded once."""

    inputs: Inputs
    options: PortOptions
    accelerator: Accelerator
    workers: int = 0
    clock: Clock = field(default_factory=Clock)
    progress: Progress = SILENT

    @cached_property
    def drawn(self) -> Drawn:
        """Images of the current step, for both sides."""
        return Drawn(self.inputs.preprocess.input_size, room=IMAGES)

    def __call__(self, weights: Tensors, step: int) -> dict[str, Tensor]:
        """The gradient of the loss at some weights."""
        with self.clock.stage("images"):
            batches = self.batches(step)
        model = self.inputs.model.to(self.accelerator.device)
        with self.clock.stage("gradients"):
            compute = Gradients(model, cross_entropy, self.options.micro_batch, self.accelerator, self.progress)
            return compute(weights, batches, self.options.grad_batches)

    def batches(self, step: int) -> Iterable[Batch]:
        """The minibatches of a step, counted from 1."""
        options, train = self.options, self.inputs.data.train

        def draw() -> Iterable[Batch]:
            return train.batches(
                options.batch_size,
                seed=options.seed,
                skip=(step - 1) * options.grad_batches,
                count=options.grad_batches,
                augment=options.augment,
                workers=self.workers,
            )

        what = f"step {step}"
        self.drawn.forget(but=what)
        return self.drawn.get(what, options.grad_batches * options.batch_size, draw)


@dataclass(frozen=True)
class Task:
    """A problem, and how its steps are made: by a method, or with a permutation that was found before."""

    problem: Problem
    method: str
    permutation: Permutation | None = None
    origin: str | None = None
    """The folder that the permutation was read from."""

    @property
    def steps(self) -> int:
        """T."""
        return self.problem.trajectory.steps

    @property
    def masked(self) -> bool:
        """Whether steps are masked by signs, so that the mask alone must be compared with, too."""
        return self.permutation is None and self.method in MASKED

    def advance(self, state: State | None) -> Iterator[State]:
        """The states after each step, from the beginning or from where another run stopped."""
        if self.permutation is None:
            return run(self.method, self.problem, state)
        return self._carry(self.permutation, begin(self.problem) if state is None else state)

    def _carry(self, permutation: Permutation, state: State) -> Iterator[State]:
        problem = self.problem
        for step in range(state.step + 1, self.steps + 1):
            weights = transplant(problem.target, problem.trajectory.delta(step), problem.graph, permutation)
            yield State(step, permutation, weights, state.stacks)


def pose_task(
    inputs: Inputs,
    graph: PermutationGraph,
    options: PortOptions,
    gradient: StepGradients,
    *,
    checkpoints: Checkpoints | None = None,
    permutation: Permutation | str | Path | None = None,
    gradient_cache: str | Path | None = None,
) -> Task:
    """Put together what is to be matched."""
    source, target = inputs.parameters(inputs.heads.source), inputs.parameters(inputs.heads.target)
    tuned = inputs.parameters(inputs.tuned.in_float32())
    trajectory, facts = _make_trajectory(source, tuned, options, checkpoints)
    size = sum(tensor.numel() for tensor in target.values())
    search = MatchOptions(
        seed=options.seed,
        restarts=options.restarts,
        start=options.start,
        normalise=options.normalise,
        compression=choose_compression(options, trajectory.steps, size),
    )
    cache = None
    if gradient_cache is not None:
        cache = GradientCache(
            gradient_cache, _cache_key(inputs, options, facts, gradient.accelerator), gradient.progress
        )
    real = inputs.parameters(inputs.tuned_target.in_float32()) if inputs.tuned_target else None
    problem = Problem(graph, source, target, trajectory, gradient, search, cache, real, gradient.progress)
    origin = None
    if isinstance(permutation, (str, Path)):
        path = Path(permutation).expanduser().resolve()
        origin = path.name if path.is_dir() else path.parent.name
        permutation = load_permutation(path, graph)
    if permutation is not None:
        graph.apply(permutation, {})  # says at once if it belongs to another graph
    return Task(problem, options.method, permutation, origin)


def _make_trajectory(
    source: Tensors, tuned: Tensors, options: PortOptions, checkpoints: Checkpoints | None
) -> tuple[Trajectory, dict[str, Any]]:
    """The trajectory, and all that it depends on besides the options."""
    if checkpoints is None:
        line = LinearTrajectory(source, tuned, options.steps, options.schedule)
        return line, {"source": hash_tensors(source), "tuned": hash_tensors(tuned)}
    paths = find_checkpoints(checkpoints)
    facts = {"source": hash_tensors(source), "checkpoints": [hash_file(path) for path in paths]}
    return CheckpointTrajectory(source, paths), facts


def _cache_key(
    inputs: Inputs, options: PortOptions, trajectory: dict[str, Any], accelerator: Accelerator
) -> dict[str, Any]:
    deciding = ("trajectory", "steps", "schedule", "batch_size", "grad_batches", "micro_batch", "seed", "augment")
    return {
        **trajectory,
        **{name: getattr(options, name) for name in deciding},
        "architecture": inputs.tuned.architecture,
        "data": inputs.data.fingerprint,
        "precision": str(accelerator.mixed_precision),
        ENVIRONMENT: describe_environment(),
    }
