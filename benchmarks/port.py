"""Where the time of a port goes: gradients, matching, BatchNorm, evaluation; and its peak memory.

    python benchmarks/port.py                              # FGMT, ResNet-18, 64 px, batches of 64, T = 10
    python benchmarks/port.py --model mobilenetv2_100 --size 96 --steps 6 --grad-batches 3
    python benchmarks/port.py --model quality.networks:MLP --size 28 --steps 5 --grad-batches 1   # 784-4096
    python benchmarks/port.py --method auto --onward 10 --control full        # the new base is the old one, trained on

Two freshly initialised networks are trained for a few steps on six kinds of the embedded images, the first is
fine-tuned on the other four, and that is ported to the second (or to the first, trained on), without controls. The head
policy is `zero`. The port runs in a process of its own, so that the peak memory is its own, too; beside it stands what
the plan said.

    python benchmarks/port.py --price --size 224 --model resnet18 --model mobilenetv2_100 --model vit_small_patch16_224

only times some images, in seconds of one core, and multiplies them with the price of ports by the default recipe, of
1,000 training and 500 test images: between bases of one lineage, and between independent ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import timm
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.contenders import find_contender
from hf_retarget.data import Preprocess, load_data
from hf_retarget.evaluation.batchnorm import has_batchnorm
from hf_retarget.models import random_model
from hf_retarget.porting.cost import ImageCounts, estimate_cost, price_port
from hf_retarget.recipe.options import DataOptions
from hf_retarget.run import Run

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
@click.option("--model", "models", default=["resnet18"], show_default=True, multiple=True)
@click.option("--size", default=64, show_default=True, help="Of the images, in pixels.")
@click.option("--batch", default=64, show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.option("--grad-batches", default=10, show_default=True, help="640 images behind a gradient, as in the paper.")
@click.option("--method", default="fgmt", show_default=True)
@click.option("--training", default=20, show_default=True, help="Steps of training for each of the three models.")
@click.option(
    "--onward", default=0, help="Steps by which the new base is ahead of the old one, instead of independent."
)
@click.option("--control", default="none", show_default=True)
@click.option("--price", is_flag=True, help="Time only some images.")
@click.option("--limit", default=None, type=int, help="Use at most this many images of each split.")
def main(models: tuple[str, ...], size: int, price: bool, **options: Any) -> None:
    """Port each model once, or only tell the price."""
    for model in models:
        if price:
            tell_price(model, size)
        else:
            port_once(model, size, **options)


def tell_price(name: str, size: int) -> None:
    """Print what ports by the default recipe take, by the time of some images."""
    model: nn.Module = timm.create_model(name, **({"img_size": size} if name.startswith("vit") else {}))
    images, pixels = torch.randn(8, 3, size, size), (3, size, size)

    def gradient() -> None:
        model.zero_grad()
        model(images).sum().backward()

    gradient()
    began = time.process_time()
    gradient()
    seconds = (time.process_time() - began) / len(images)
    counts = ImageCounts(900, 100, 500, has_batchnorm=has_batchnorm(model))
    cheap = [find_contender(each) for each in ("naive-line", "naive-head", "head")]
    related, independent = (price_port(rt.Recipe(), counts, entered=each) for each in (cheap, None))
    memory = estimate_cost(model, pixels, rt.Recipe(), Run(), counts).memory
    weights = sum(each.nbytes for each in model.state_dict().values())
    print(f"{name}, {size} px: download {3 * weights / 1e6:.0f} MB, memory {memory / 1e9:.1f} GB at most", end="; ")
    print(f"{1e3 * seconds:.0f} ms of a core for the gradient of an image", end="")
    for words, each in (("related bases", related), ("independent", independent)):
        whole = each.total * rt.Recipe().port.batch_size
        print(f"; {words}: the price of {whole:,.0f} such images, {whole * seconds / 60:.0f} minutes of a core", end="")
    print(flush=True)


def port_once(
    model: str, size: int, batch: int, steps: int, grad_batches: int, method: str, training: int, onward: int,
    control: str, limit: int | None,
) -> None:  # fmt: skip
    """Port once and print the seconds by stage."""
    preprocess = Preprocess((3, size, size), (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, "center")
    names = load_data(DATA, DataOptions(), preprocess).labels or ()
    factory = {"arch": model} if ":" in model else {}
    recipe = rt.load_recipe(DATA).override(
        **{"finetune.steps": training, "finetune.lr": 0.05, "finetune.batch_size": batch, "data.image_size": size},
        **{"data.limit": limit},
    )
    old_task, new_task = (recipe.override(**{"data.classes": some}) for some in (names[:6], names[6:]))
    with tempfile.TemporaryDirectory() as folder:
        old, new, tuned = (Path(folder) / side for side in ("old", "new", "tuned"))
        for seed, out in enumerate((old, new)):
            rt.finetune(make_base(model, size, seed), recipe=old_task, out=out, head="keep")
        rt.finetune(old, recipe=new_task, out=tuned, head="zero", **factory)
        if onward:
            task = old_task.override(**{"finetune.steps": onward, "finetune.seed": 1, "finetune.lr": 0.005})
            rt.finetune(old, recipe=task, out=new, head="keep", overwrite=True, **factory)
        new_task.override(
            **{
                "port.method": method,
                "port.steps": steps,
                "port.batch_size": batch,
                "port.grad_batches": grad_batches,
                "port.bn_batches": 4,
                "port.control": control,
                "finetune.steps": 0,
            }
        ).save(Path(folder) / "recipe.yaml")
        sides = ("--src-base", str(old), "--src-ft", str(tuned), "--new-base", str(new))
        sides += ("--arch", model) if factory else ()
        planned = run_port(*sides, "--recipe", f"{folder}/recipe.yaml", "--dry-run")
        before = processor_seconds()
        figures = run_port(*sides, "--recipe", f"{folder}/recipe.yaml", "--out", f"{folder}/ported")
        spent = processor_seconds() - before
        files = sum((side / "model.safetensors").stat().st_size for side in (old, tuned, new))
    seconds: dict[str, float] = figures["seconds"]
    print(f"{method}, {model}, {size} px, {grad_batches} batches of {batch} a gradient, T = {steps}, ", end="")
    print(f"{torch.get_num_threads()} threads")
    for stage, each in seconds.items():
        print(f"{stage:12} {each:8.1f} s  {each / sum(seconds.values()):6.1%}")
    if "matching" in seconds:
        print(f"matching : gradients = {seconds['matching'] / seconds['gradients']:.3f}")
    print(f"in all {sum(seconds.values()):.0f} s; {spent:.0f} s of the processor, with starting and saving")
    print(f"the three models are {files / 1e6:.0f} MB")
    print(
        f"peak memory {figures['peak_memory'] / 1e9:.2f} GB; the plan said {planned['memory'] / 1e9:.2f} GB, ", end=""
    )
    print(f"and {planned['seconds']:.0f} s without matching, tracing and loading")


def processor_seconds() -> float:
    """What the processes that have ended took of all cores: unlike the time of day, the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
