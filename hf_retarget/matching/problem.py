"""The problem of matching two models, and its state, which can be saved after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from hf_retarget.errors import MatchError
from hf_retarget.files import load_tensors, save_tensors
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.matching.descent import Match, descend
from hf_retarget.matching.fit import Cosines
from hf_retarget.matching.gradients import GradientCache
from hf_retarget.matching.objective import Compression, Piece, Stacks, Tensors
from hf_retarget.matching.trajectory import Trajectory, same_tensors
from hf_retarget.progress import SILENT, Progress

GradientAt = Callable[[Tensors, int], dict[str, Tensor]]
"""The gradient at some weights on the minibatches of a step, which are the same for both bases."""

_FORMAT = "hf-retarget/matching-state/3"


@dataclass(frozen=True)
class MatchOptions:
    """Options of the search for a permutation."""

    seed: int = 0
    restarts: int = 1
    start: str = "warm"
    """`restart` starts every step from a guess, `warm` only the first, and the others from the previous permutation."""
    normalise: bool = False
    """Weight all tensors equally, instead of by their norm."""
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.start not in ("restart", "warm"):
            raise MatchError(f"unknown start '{self.start}'; choose 'restart' or 'warm'")


@dataclass(frozen=True)
class Problem:
    """Two bases, a fine-tuning of the first, and a function that computes gradients.

    Weights are parameters only; `tuned_target` is the actual fine-tuning of the target, for the oracle.
    """

    graph: PermutationGraph
    source: Tensors
    target: Tensors
    trajectory: Trajectory
    gradient: GradientAt | None = None
    options: MatchOptions = field(default_factory=MatchOptions)
    cache: GradientCache | None = None
    tuned_target: Tensors | None = None
    progress: Progress = SILENT

    def __post_init__(self) -> None:
        same_tensors(self.source, self.target, "source", "target")

    def source_gradient(self, step: int) -> dict[str, Tensor]:
        """∇L(θ₁^{s-1}), from the cache if there is one."""

        def compute() -> dict[str, Tensor]:
            moved = dict(self.trajectory.delta(step - 1))
            return self.gradient_at({name: start + moved.pop(name) for name, start in self.source.items()}, step)

        return self.cache.get(step, compute) if self.cache else compute()

    def gradient_at(self, weights: Tensors, step: int) -> dict[str, Tensor]:
        """∇L at `weights` on the minibatches of `step`."""
        if self.gradient is None:
            raise MatchError("this method needs gradients; pass a function that computes them (gradient=)")
        return self.gradient(weights, step)

    def solve(self, stacks: Stacks, current: Permutation) -> Match:
        """The best permutation for the stacks."""
        options = self.options
        for _ in self.progress.track([stacks], "searching the permutation"):
            start = current if options.start == "warm" and stacks.steps > 1 else None
            found = descend(stacks, start, seed=options.seed, restarts=options.restarts)
        return found

    def new_stacks(self) -> Stacks:
        """Empty stacks."""
        return Stacks(self.graph, self.options.compression, self.options.normalise)


@dataclass
class State:
    """The state of a matching after some steps, from which it can continue.

    The next step invalidates it, since stacks grow in place: two copies of them might not fit into memory.
    """

    step: int
    permutation: Permutation
    weights: Tensors
    """θ₂ˢ, the ported parameters."""
    stacks: Stacks
    objective: float = 0.0
    sweeps: int = 0
    objectives: tuple[float, ...] = ()
    """The objective after each sweep of this step."""
    cosines: Cosines | None = None
    """The cosines of what this step added, such as the newest gradients."""

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically."""
        pieces = list(self.stacks.pieces.items())
        tensors = {f"permutation/{name}": index for name, index in self.permutation.indices.items()}
        tensors |= {f"weights/{name}": weight for name, weight in self.weights.items()}
        for number, (_, piece) in enumerate(pieces):
            tensors |= {f"target/{number}": piece.target, f"source/{number}": piece.source}
            if piece.products is not None:
                tensors[f"products/{number}"] = piece.products
        facts = {
            "format": _FORMAT,
            "fingerprint": self.permutation.fingerprint,
            "step": self.step,
            "objective": self.objective,
            "sweeps": self.sweeps,
            "objectives": self.objectives,
            "cosines": self.cosines,
            "steps": self.stacks.steps,
            "constant": self.stacks.constant,
            "normalise": self.stacks.normalise,
            "compression": asdict(self.stacks.compression) if self.stacks.compression else None,
            "pieces": [[*key, piece.each, piece.squares] for key, piece in pieces],
        }
        save_tensors(path, tensors, facts)

    @classmethod
    def load(cls, path: str | Path, graph: PermutationGraph) -> State:
        """Read what `save` wrote, for the same graph."""
        try:
            tensors, facts = load_tensors(path)
        except OSError as error:
            raise MatchError(f"cannot read a matching state from '{path}': {error}") from error
        if facts.get("format") != _FORMAT or facts.get("fingerprint") != graph.fingerprint:
            raise MatchError(f"'{path}' is not a matching state of this graph; remove it to start again")
        compression = Compression(**facts["compression"]) if facts["compression"] else None
        stacks = Stacks(graph, compression, facts["normalise"], facts["steps"], facts["constant"])
        for number, (name, block, each, squares) in enumerate(facts["pieces"]):
            factors, products = stacks.factors(name, block), tensors.get(f"products/{number}")
            sides = [tensors[f"target/{number}"]], [tensors[f"source/{number}"]]
            stacks.pieces[name, block] = Piece(name, factors, each, *sides, products, tuple(squares))
        indices = {group.name: tensors[f"permutation/{group.name}"] for group in graph.groups}
        weights = {name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")}
        permutation = Permutation(graph.fingerprint, indices)
        found = facts["objective"], facts["sweeps"], tuple(facts.get("objectives", ()))
        cosines = Cosines(*facts["cosines"]) if facts.get("cosines") else None
        return cls(facts["step"], permutation, weights, stacks, *found, cosines)
