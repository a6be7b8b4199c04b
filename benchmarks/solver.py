"""Time, memory and objective of the matching solver, against a plain one, on real gradients in ResNet-18's shapes.

    python benchmarks/solver.py                    # T = 1, 5, 15, at 200 classes
    python benchmarks/solver.py --steps 15 --model resnet18 --csv solver.csv

The reference is a solver as in research code: for every group and sweep, it permutes each step of each tensor of the
source on all its other axes by full index tensors, multiplies and sums, and calls SciPy, until a sweep gains nothing.
Both get the same gradients, of two networks along a short fine-tuning of one of them on real images.

A port solves once per step, with one more pair of gradients each time. Our time for T steps is therefore that of adding
the last pair and solving; the time to add all pairs over the whole port is printed separately.
"""

from __future__ import annotations

import csv
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.data import Preprocess, Split, load_data
from hf_retarget.matching.descent import descend
from hf_retarget.matching.gradients import Gradients
from hf_retarget.matching.objective import Compression, Stacks
from hf_retarget.matching.trajectory import LinearTrajectory
from hf_retarget.models import random_model
from hf_retarget.recipe.options import DataOptions

BATCH = 64

Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


def real_gradients(
    models: list[nn.Module], steps: int, shape: tuple[int, int, int] = (3, 64, 64), training: int = 25
) -> tuple[rt.PermutationGraph, list[Pair]]:
    """Gradients of two networks along the fine-tuning of one of them, on the embedded images.

    Both are trained for some steps on six kinds of clothes, one of them then on the other four.
    """
    model, (source, target) = models[0], map(parameters, models)
    graph = rt.trace(model, torch.zeros(2, *shape))
    preprocess = Preprocess(shape, (0.3,) * shape[0], (0.3,) * shape[0], "bilinear", 1.0, "center")
    names = load_data("fashion-mnist", DataOptions(), preprocess).labels or ()
    old, new = (
        load_data("fashion-mnist", DataOptions(classes=some), preprocess).train for some in (names[:6], names[6:])
    )
    gradients = Gradients(model, nn.functional.cross_entropy)

    def train(weights: dict[str, Tensor], split: Split, seed: int) -> dict[str, Tensor]:
        for batch in split.batches(BATCH, seed=seed, count=training):
            gradient = gradients(weights, [batch])
            weights = {key: value - 0.05 * gradient[key] for key, value in weights.items()}
        return weights

    source, target = train(source, old, 0), train(target, old, 1)
    path = LinearTrajectory(source, train(source, new, 2), steps)
    pairs = []
    for step in range(steps):
        data, delta = list(new.batches(BATCH, seed=3, skip=2 * step, count=2)), path.delta(step)
        sides = ({key: value + delta[key] for key, value in base.items()} for base in (target, source))
        ours, theirs = (gradients(side, data) for side in sides)
        pairs.append((ours, theirs))
    return graph, pairs


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights; gammas of zero would leave half of the network without gradients."""
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    return {key: value if value.any() or key.endswith("bias") else value + 0.5 for key, value in weights.items()}


def plain_solver(graph: rt.PermutationGraph, pairs: list[Pair], seed: int = 0) -> tuple[dict[str, Tensor], float, int]:
    """The reference: no stacks, no record of changes, full index tensors."""
    permutation = dict(graph.identity().indices)
    axes = {(tensor, dim): group.name for group in graph for tensor, dim in group.axes}
    generator = np.random.default_rng(seed)
    best, sweeps = objective(graph, pairs, permutation), 0
    while True:
        for number in generator.permutation(len(graph.groups)):
            group = graph.groups[number]
            gains = np.zeros((group.size, group.size))
            for target, source in pairs:
                for tensor, dim in group.axes:
                    if tensor in target:
                        theirs = gather_all_but(source[tensor], tensor, dim, axes, permutation)
                        ours = target[tensor].movedim(dim, 0).reshape(group.size, -1)
                        gains += (ours @ theirs.movedim(dim, 0).reshape(group.size, -1).T).double().numpy()
            permutation[group.name] = torch.from_numpy(linear_sum_assignment(gains, maximize=True)[1])
        sweeps += 1
        value = objective(graph, pairs, permutation)
        if value <= best * (1 + 1e-7):
            return permutation, max(value, best), sweeps
        best = value


def gather_all_but(
    tensor: Tensor, name: str, skip: int, axes: Mapping[tuple[str, int], str], permutation: Mapping[str, Tensor]
) -> Tensor:
    """Permute all axes of a tensor except one, by index tensors as large as the tensor."""
    for dim in range(tensor.dim()):
        group = axes.get((name, dim))
        if group is not None and dim != skip:
            shape = [1] * tensor.dim()
            shape[dim] = -1
            tensor = tensor.gather(dim, permutation[group].view(shape).expand(tensor.shape).contiguous())
    return tensor


def objective(graph: rt.PermutationGraph, pairs: list[Pair], permutation: Mapping[str, Tensor]) -> float:
    """Σ ⟨target, π source⟩, in float64."""
    whole = rt.Permutation(graph.fingerprint, permutation)
    total = 0.0
    for target, source in pairs:
        moved = graph.apply(whole, source)
        total += sum(float((target[name].double() * moved[name].double()).sum()) for name in target)
    return total


def ours(graph: rt.PermutationGraph, pairs: list[Pair], compression: Compression | None) -> dict[str, object]:
    """Our solver; the time for stacking counts only the last step."""
    stacks, adding = Stacks(graph, compression), [0.0]
    for target, source in pairs:
        began = time.perf_counter()
        stacks.add(target, source)
        adding.append(time.perf_counter() - began)
    began = time.perf_counter()
    match = descend(stacks)
    solving = time.perf_counter() - began
    size = sum(tensor.numel() for tensor in pairs[0][0].values())
    return {
        "seconds": adding[-1] + solving,
        "all_adds_seconds": sum(adding),
        "sweeps": len(match.sweeps),
        "objective": objective(graph, pairs, match.permutation.indices),
        "model_sizes": stacks.elements / size,
    }


@click.command(help=__doc__)
@click.option("--model", default="resnet18", show_default=True)
@click.option("--classes", default=200, show_default=True)
@click.option("--steps", "all_steps", multiple=True, type=int, default=(1, 5, 15), show_default=True)
@click.option("--reference/--no-reference", default=True)
@click.option("--csv", "output", type=Path)
def main(model: str, classes: int, all_steps: tuple[int, ...], reference: bool, output: Path | None) -> None:
    """Run both solvers on the same gradients."""
    torch.manual_seed(0)
    models = [random_model(model, num_classes=classes) for _ in range(2)]
    graph, pairs = real_gradients(models, max(all_steps))
    rows: list[dict[str, object]] = []
    print(f"{model}, {classes} classes, {torch.get_num_threads()} threads")
    for steps in all_steps:
        some = pairs[:steps]
        results: dict[str, dict[str, object]] = {}
        if reference:
            began = time.perf_counter()
            _, value, sweeps = plain_solver(graph, some)
            results["reference"] = {
                "seconds": time.perf_counter() - began,
                "sweeps": sweeps,
                "objective": value,
                "model_sizes": 2.0 * steps,
            }
        results["exact"] = ours(graph, some, None)
        results["compressed"] = ours(graph, some, Compression())
        for name, result in results.items():
            ratio = results["reference"]["seconds"] / result["seconds"] if reference else float("nan")  # type: ignore[operator]
            gain = result["objective"] / results["reference"]["objective"] if reference else float("nan")  # type: ignore[operator]
            rows.append(
                {"model": model, "steps": steps, "solver": name, "speedup": ratio, "objective_ratio": gain} | result
            )
            print(
                f"T={steps:<3} {name:10} {result['seconds']:8.2f} s  ({ratio:5.1f}×)  {result['sweeps']:>3} sweeps  "
                f"all adds {result.get('all_adds_seconds', 0.0):5.2f} s  "
                f"objective {result['objective']:.6g} ({gain:.4f})  "
                f"stacks {result['model_sizes']:.1f} model sizes",
                flush=True,
            )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
    if output:
        with output.open("w", newline="") as file:
            fields = sorted({key for row in rows for key in row})
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
