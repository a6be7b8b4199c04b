"""Where the time of a port goes: gradients, matching, BatchNorm, evaluation; and its peak memory.

    python benchmarks/port.py                              # FGMT, ResNet-18, 64 px, batches of 64, T = 10
    python benchmarks/port.py --model mobilenetv2_100 --size 96 --steps 6 --grad-batches 3
    python benchmarks/port.py --model quality.networks:MLP --size 28 --steps 5 --grad-batches 1   # 784-4096

Two freshly initialised networks are trained for a few steps on six kinds of the embedded images, the first is
fine-tuned on the other four, and that is ported to the second, without controls. The head policy is `zero`. The port
runs in a process of its own, so that the peak memory is its own, too; beside it stands what the plan said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import timm
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.data import Preprocess, load_data
from hf_retarget.models import random_model
from hf_retarget.recipe.options import DataOptions

DATA = "fashion-mnist"


def make_base(name: str, size: int, seed: int) -> nn.Module:
    """A network with random weights; one of timm expects colour images of this size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if ":" in name:
            return random_model(name, num_classes=6)
        images = {"input_size": (3, size, size), "crop_pct": 1.0}
        options = {"img_size": size} if name.startswith("vit") else {}
        model: nn.Module = timm.create_model(name, num_classes=6, pretrained_cfg_overlay=images, **options)
    return model


@click.command(help=__doc__)
@click.option("--model", default="resnet18", show_default=True)
@click.option("--size", default=64, show_default=True, help="Of the images, in pixels.")
@click.option("--batch", default=64, show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.option("--grad-batches", default=10, show_default=True, help="640 images behind a gradient, as in the paper.")
@click.option("--method", default="fgmt", show_default=True)
@click.option("--training", default=20, show_default=True, help="Steps of training for each of the three models.")
def main(model: str, size: int, batch: int, steps: int, grad_batches: int, method: str, training: int) -> None:
    """Port once and print the seconds by stage."""
    preprocess = Preprocess((3, size, size), (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, "center")
    names = load_data(DATA, DataOptions(), preprocess).labels or ()
    factory = {"arch": model} if ":" in model else {}
    recipe = rt.load_recipe(DATA).override(
        **{"finetune.steps": training, "finetune.lr": 0.05, "finetune.batch_size": batch, "data.image_size": size}
    )
    old_task, new_task = (recipe.override(**{"data.classes": some}) for some in (names[:6], names[6:]))
    with tempfile.TemporaryDirectory() as folder:
        old, new, tuned = (Path(folder) / side for side in ("old", "new", "tuned"))
        for seed, out in enumerate((old, new)):
            rt.finetune(make_base(model, size, seed), recipe=old_task, out=out, head="keep")
        rt.finetune(old, recipe=new_task, out=tuned, head="zero", **factory)
        new_task.override(
            **{
                "port.method": method,
                "port.steps": steps,
                "port.batch_size": batch,
                "port.grad_batches": grad_batches,
                "port.bn_batches": 4,
                "port.control": "none",
                "finetune.steps": 0,
            }
        ).save(Path(folder) / "recipe.yaml")
        sides = ("--src-base", str(old), "--src-ft", str(tuned), "--new-base", str(new))
        sides += ("--arch", model) if factory else ()
        planned = run_port(*sides, "--recipe", f"{folder}/recipe.yaml", "--dry-run")
        figures = run_port(*sides, "--recipe", f"{folder}/recipe.yaml", "--out", f"{folder}/ported")
    seconds: dict[str, float] = figures["seconds"]
    print(f"{method}, {model}, {size} px, {grad_batches} batches of {batch} a gradient, T = {steps}, ", end="")
    print(f"{torch.get_num_threads()} threads")
    for stage, spent in seconds.items():
        print(f"{stage:12} {spent:8.1f} s  {spent / sum(seconds.values()):6.1%}")
    print(f"matching : gradients = {seconds['matching'] / seconds['gradients']:.3f}")
    print(
        f"peak memory {figures['peak_memory'] / 1e9:.2f} GB; the plan said {planned['memory'] / 1e9:.2f} GB, ", end=""
    )
    print(f"and {planned['seconds']:.0f} s without matching, tracing and loading")


def run_port(*arguments: str) -> dict[str, Any]:
    """`hf-retarget port --json` in a process of its own."""
    command = [sys.executable, "-m", "hf_retarget", "port", *arguments, "--json"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
