"""What is to be matched, and how far a matching has come: a problem, and a state that can be saved after any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_retarget.errors import MatchError
from hf_retarget.files import atomic_path
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.matching.descent import Match, descend
from hf_retarget.matching.gradients import GradientCache
from hf_retarget.matching.objective import Compression, Piece, Stacks
from hf_retarget.matching.trajectory import Trajectory, same_tensors

Tensors = Mapping[str, Tensor]

GradientAt = Callable[[Tensors, int], dict[str, Tensor]]
"""The gradient at some weights, on the minibatches of a step: the same samples, whichever side asks."""

_FORMAT = "hf-retarget/matching-state/1"


@dataclass(frozen=True)
class MatchOptions:
    """How the assignment is searched."""

    seed: int = 0
    restarts: int = 1
    start: str = "restart"
    """`restart` begins every step at the identity, `warm` at the permutation of the step before."""
    max_sweeps: int = 100
    tolerance: float = 1e-7
    normalise: bool = False
    """Let all tensors count alike, instead of by their norm."""
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.start not in ("restart", "warm"):
            raise MatchError(f"unknown start '{self.start}'; choose 'restart' or 'warm'")


@dataclass(frozen=True)
class Problem:
    """Two bases, a fine-tuning of the first, and a way to get gradients.

    Weights are the parameters only; `tuned_target` is the real fine-tuning of the target, for the oracle.
    """

    graph: PermutationGraph
    source: Tensors
    target: Tensors
    trajectory: Trajectory
    gradient: GradientAt | None = None
    options: MatchOptions = field(default_factory=MatchOptions)
    cache: GradientCache | None = None
    tuned_target: Tensors | None = None

    def __post_init__(self) -> None:
        same_tensors(self.source, self.target, "source", "target")

    def source_gradient(self, step: int) -> dict[str, Tensor]:
        """∇L(θ₁^{s-1}), from the cache if there is one."""

        def compute() -> dict[str, Tensor]:
            moved = self.trajectory.delta(step - 1)
            return self.gradient_at({name: start + moved[name] for name, start in self.source.items()}, step)

        return self.cache.get(step, compute) if self.cache else compute()

    def gradient_at(self, weights: Tensors, step: int) -> dict[str, Tensor]:
        """∇L at `weights` on the minibatches of `step`."""
        if self.gradient is None:
            raise MatchError("this method needs gradients, and no way to compute them was given (gradient=)")
        return self.gradient(weights, step)

    def solve(self, stacks: Stacks, current: Permutation) -> Match:
        """The best permutation for the stacks."""
        options = self.options
        return descend(
            stacks,
            current if options.start == "warm" else None,
            seed=options.seed,
            restarts=options.restarts,
            max_sweeps=options.max_sweeps,
            tolerance=options.tolerance,
        )

    def new_stacks(self) -> Stacks:
        """Empty stacks."""
        return Stacks(self.graph, self.options.compression, self.options.normalise)


@dataclass(frozen=True)
class State:
    """What is known after some steps: enough to go on as if nothing had happened."""

    step: int
    permutation: Permutation
    weights: Tensors
    """θ₂ˢ, the ported parameters."""
    stacks: Stacks
    objective: float = 0.0
    sweeps: int = 0

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, wholly or not at all."""
        pieces = list(self.stacks.pieces.items())
        tensors = {f"permutation/{name}": index for name, index in self.permutation.indices.items()}
        tensors |= {f"weights/{name}": weight.contiguous() for name, weight in self.weights.items()}
        for number, (_, piece) in enumerate(pieces):
            tensors |= {f"target/{number}": piece.target.contiguous(), f"source/{number}": piece.source.contiguous()}
        facts = {
            "step": self.step,
            "objective": self.objective,
            "sweeps": self.sweeps,
            "steps": self.stacks.steps,
            "constant": self.stacks.constant,
            "normalise": self.stacks.normalise,
            "compression": asdict(self.stacks.compression) if self.stacks.compression else None,
            "pieces": [[*key, piece.each, piece.bound] for key, piece in pieces],
        }
        metadata = {"format": _FORMAT, "fingerprint": self.permutation.fingerprint, "facts": json.dumps(facts)}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata)

    @classmethod
    def load(cls, path: str | Path, graph: PermutationGraph) -> State:
        """Read what `save` wrote, for the same graph."""
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as error:
            raise MatchError(f"cannot read a matching state from '{path}': {error}") from error
        if metadata.get("format") != _FORMAT or metadata.get("fingerprint") != graph.fingerprint:
            raise MatchError(f"'{path}' is not a matching state of this graph; remove it to start anew")
        facts: dict[str, Any] = json.loads(metadata["facts"])
        compression = Compression(**facts["compression"]) if facts["compression"] else None
        stacks = Stacks(graph, compression, facts["normalise"], facts["steps"], facts["constant"])
        for number, (name, block, each, bound) in enumerate(facts["pieces"]):
            factors = stacks.factors(name, block)
            sides = tensors[f"target/{number}"], tensors[f"source/{number}"]
            stacks.pieces[name, block] = Piece(name, factors, *sides, each, bound)
        indices = {group.name: tensors[f"permutation/{group.name}"] for group in graph.groups}
        weights = {name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")}
        permutation = Permutation(graph.fingerprint, indices)
        return cls(facts["step"], permutation, weights, stacks, facts["objective"], facts["sweeps"])
