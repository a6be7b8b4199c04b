"""How one step of matching grows with the number of steps, and with the width and depth of the network.

    python benchmarks/scale.py                                       # three sizes of ViT, T = 1, 2, 5, 10
    python benchmarks/scale.py resnet50 vit_base_patch16_224 --steps 10
    python benchmarks/scale.py vit-384x2 vit-384x4 vit-384x8         # a ViT of this width and depth
    python benchmarks/scale.py --write docs/scale.png                # a picture of all that was recorded

Real gradients: two networks are trained for a few minibatches on six kinds of clothes, one of them then on the other
four, and along that fine-tuning pairs of gradients are taken, at 64 pixels, and stored in runs/scale. A row then reads
them, adds the last pair to the stacks of those before it, and searches the permutation, in a process of its own, so
that the peak memory is its own, too. Each row leaves a record in benchmarks/results/scale.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import timm
import torch
from safetensors.torch import load_file, save_file
from solver import parameters
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.data import Preprocess, Split, load_data
from hf_retarget.matching.descent import descend
from hf_retarget.matching.gradients import Gradients
from hf_retarget.matching.objective import Compression, Stacks
from hf_retarget.recipe.options import DataOptions

ROOT = Path(__file__).resolve().parents[1]
RESULTS, STORE = ROOT / "benchmarks" / "results" / "scale", ROOT / "runs" / "scale"
MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
SIZE, BATCH, TRAINING, MOST = 64, 32, 4, 10

Weights = dict[str, Tensor]


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A timm model with random weights, or `vit-WIDTHxDEPTH`."""
    torch.manual_seed(seed)
    if name.startswith("vit-"):
        width, depth = map(int, name.removeprefix("vit-").split("x"))
        shape = {"embed_dim": width, "depth": depth, "num_heads": width // 64, "img_size": SIZE}
        return timm.create_model("vit_small_patch16_224", num_classes=10, **shape).eval()
    size = {"img_size": SIZE} if name.startswith("vit") else {}
    return timm.create_model(name, num_classes=10, **size).eval()


def store_gradients(name: str, steps: int) -> None:
    """Take the pairs of gradients that are not there yet, and write each to a file."""
    folder = STORE / name
    if all((folder / f"{step}.safetensors").exists() for step in range(steps)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    preprocess = Preprocess((3, SIZE, SIZE), (0.3,) * 3, (0.3,) * 3, "bilinear", 1.0, "center")
    names = load_data("fashion-mnist", DataOptions(), preprocess).labels or ()
    old, new = (
        load_data("fashion-mnist", DataOptions(classes=some), preprocess).train for some in (names[:6], names[6:])
    )
    model = make_model(name)
    gradients = Gradients(model, nn.functional.cross_entropy)

    def train(weights: Weights, split: Split, seed: int) -> Weights:
        for batch in split.batches(BATCH, seed=seed, count=TRAINING):
            gradient = gradients(weights, [batch])
            for key, value in gradient.items():
                weights[key] = weights[key] - 0.05 * value
        return weights

    source, target = train(parameters(model), old, 0), train(parameters(make_model(name, 1)), old, 1)
    delta = {key: value - source[key] for key, value in train(dict(source), new, 2).items()}
    for step in range(steps):
        data, pair, seconds = list(new.batches(BATCH, seed=3, skip=step, count=1)), {}, 0.0
        for side, base in (("target", target), ("source", source)):
            began = time.process_time()
            moved = {key: value + step / MOST * delta[key] for key, value in base.items()}
            pair |= {f"{side}/{key}": value for key, value in gradients(moved, data).items()}
            seconds += time.process_time() - began
        save_file(pair, folder / f"{step}.safetensors", {"seconds": f"{seconds:.3f}"})
        print(f"{name}: pair {step + 1} of {steps}, {seconds:.1f} s", flush=True)


def measure(name: str, steps: int) -> dict[str, Any]:
    """Stack the stored gradients, as a port would, and solve after the last but one and the last.

    Seconds are those of the processor, so that other programs do not count; with several threads, the processes that
    solve assignments are not among them, but `clock` is what the clock says of the search from the step before.
    """
    model = make_model(name)
    began = time.process_time()
    graph = rt.trace(model, torch.zeros(2, 3, SIZE, SIZE))
    traced = time.process_time() - began
    size = sum(each.numel() for each in model.parameters())
    del model
    stacks, before, added = Stacks(graph, Compression() if steps > 2 else None), None, 0.0
    for step in range(steps):
        pair = load_file(STORE / name / f"{step}.safetensors")
        ours, theirs = (
            {key.removeprefix(side): value for key, value in pair.items() if key.startswith(side)}
            for side in ("target/", "source/")
        )
        began = time.process_time()
        stacks.add(ours, theirs)
        added = time.process_time() - began
        del pair, ours, theirs
        if step == steps - 2:
            before = descend(stacks).permutation
    began = time.process_time()
    match = descend(stacks)
    solved = time.process_time() - began
    began, clock = time.process_time(), time.perf_counter()
    warm = descend(stacks, before) if before else match
    clock = time.perf_counter() - clock
    return {
        "model": name,
        "parameters": size,
        "steps": steps,
        "trace": round(traced, 2),
        "add": round(added, 2),
        "solve": round(solved, 2),
        "sweeps": len(match.sweeps),
        "warm": round(time.process_time() - began, 2) if before else None,
        "clock": round(clock, 2) if before else None,
        "warm_objective": round(warm.objective / match.objective, 4),
        "model_sizes": round(stacks.elements / size, 2),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(),
    }


def draw(path: Path) -> None:
    """Seconds of a step over the number of steps, and over the size of the network, from the records."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(
        (json.loads(each.read_text("utf-8")) for each in RESULTS.glob("*.json")), key=lambda row: row["steps"]
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for model in dict.fromkeys(row["model"] for row in rows):
        some = [row for row in rows if row["model"] == model and row["steps"] > 1]
        if len(some) > 2:
            left.plot([row["steps"] for row in some], [row["add"] + row["warm"] for row in some], "o-", label=model)
    left.set(xlabel="steps so far", ylabel="seconds of one core", title="a step of matching", ylim=(0, None))
    left.legend(fontsize=7, frameon=False)
    last = sorted((row for row in rows if row["steps"] == MOST), key=lambda row: row["parameters"])
    for key, label in (("warm", "from the step before"), ("solve", "anew"), ("add", "adding the gradients")):
        right.plot([row["parameters"] / 1e6 for row in last], [row[key] for row in last], "o-", label=label)
    right.set(xscale="log", yscale="log", xlabel="million parameters", title=f"after {MOST} steps")
    right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110, metadata={"Software": None})


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("models", nargs=-1)
@click.option("--steps", "all_steps", multiple=True, type=int, default=(1, 2, 5, 10), show_default=True)
@click.option("--write", "picture", type=Path, help="Draw all that was recorded.")
@click.option("--one", type=click.Choice(["store", "row"]), hidden=True)
def main(models: tuple[str, ...], all_steps: tuple[int, ...], picture: Path | None, one: str | None) -> None:
    """Measure every pair of model and number of steps."""
    if picture:
        draw(picture)
        return
    if one == "store":
        store_gradients(models[0], all_steps[0])
    if one == "row":
        print(json.dumps(measure(models[0], all_steps[0])))
    if one:
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for model in models or MODELS:
        command = [sys.executable, __file__, model, "--one"]
        subprocess.run([*command, "store", "--steps", str(max(all_steps))], check=True)
        for steps in all_steps:
            answer = subprocess.run(
                [*command, "row", "--steps", str(steps)], check=True, capture_output=True, text=True
            )
            row = json.loads(answer.stdout.splitlines()[-1])
            (RESULTS / f"{model}.{steps}.json").write_text(json.dumps(row, indent=1) + "\n", "utf-8")
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
