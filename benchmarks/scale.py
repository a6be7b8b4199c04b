"""How time and memory of the matching grow with the number of steps and the width of the network.

    python benchmarks/scale.py                                # ViT-Tiny, -Small, -Base; 1, 5 and 10 steps
    python benchmarks/scale.py vit_base_patch16_224 --steps 10
    python benchmarks/scale.py --csv docs/scale.csv --plot docs/scale.svg

The gradients are made up: each step's is a common part and as much noise, and the target's is the source's under a
random permutation, with noise again. So it is known what is to be found, and time and memory do not depend on how long
a real gradient of such a network takes. Each row runs in a process of its own, so that the peak memory is its own too.
"""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import click

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
COLUMNS = [
    "model",
    "parameters",
    "steps",
    "add_seconds",
    "solve_seconds",
    "sweeps",
    "found",
    "model_sizes",
    "megabytes",
]


def measure(name: str, steps: int) -> dict[str, object]:
    """Stack the gradients of some steps, as a port would, and solve once."""
    import torch

    import hf_retarget as rt
    from hf_retarget.matching.descent import descend
    from hf_retarget.matching.objective import Compression, Stacks
    from hf_retarget.models import empty_model

    model = empty_model(name)
    graph = rt.trace(model)
    planted = graph.random(seed=1)
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}

    def draw(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}

    stacks, seconds = Stacks(graph, Compression()), 0.0
    for step in range(steps):
        source = draw(0)
        for key, noise in draw(2 + 2 * step).items():
            source[key] += noise
        target = graph.apply(planted, source)
        for key, noise in draw(3 + 2 * step).items():
            target[key] += noise
        began = time.perf_counter()
        stacks.add(target, source)
        seconds = time.perf_counter() - began  # the last one, when the stacks are full
        del source, target
    began = time.perf_counter()
    match = descend(stacks)
    solved = time.perf_counter() - began
    right = [index == match.permutation.indices[group] for group, index in planted.indices.items()]
    size = sum(shape.numel() for shape in shapes.values())
    return {
        "model": name,
        "parameters": size,
        "steps": steps,
        "add_seconds": round(seconds, 2),
        "solve_seconds": round(solved, 1),
        "sweeps": len(match.sweeps),
        "found": round(float(torch.cat([each.flatten().float() for each in right]).mean()), 4),
        "model_sizes": round(stacks.elements / size, 2),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Solving time and peak memory over the number of steps, a line for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, column, title in zip(
        axes, ("solve_seconds", "megabytes"), ("seconds to solve", "peak memory, MB"), strict=True
    ):
        for model in dict.fromkeys(row["model"] for row in rows):
            some = [row for row in rows if row["model"] == model]
            panel.plot([row["steps"] for row in some], [row[column] for row in some], marker="o", label=model)
        panel.set(title=title, xlabel="steps", ylim=(0, None))
        panel.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MODELS), frameon=False)
    figure.savefig(path, metadata={"Date": None})


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--steps", "all_steps", multiple=True, type=int, default=(1, 5, 10), show_default=True)
@click.option("--csv", "output", type=Path)
@click.option("--plot", "picture", type=Path, help="Needs matplotlib (pip install 'hf-retarget[report]').")
@click.option("--one", is_flag=True, hidden=True)
def main(
    models: tuple[str, ...], all_steps: tuple[int, ...], output: Path | None, picture: Path | None, one: bool
) -> None:
    """Measure every pair of model and number of steps."""
    if one:
        print(json.dumps(measure(models[0], all_steps[0])))
        return
    rows: list[dict[str, object]] = []
    for model in models or MODELS:
        for steps in all_steps:
            command = [sys.executable, __file__, model, "--steps", str(steps), "--one"]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(answer.stdout.splitlines()[-1])
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if output:
        with output.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    if picture:
        plot(rows, picture)


if __name__ == "__main__":
    main()
