"""``hf-retarget demo``: two bases, a fine-tuning and its port, on embedded images and without a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hf_retarget.cli.options import debug_option
from hf_retarget.cli.progress import status, watch
from hf_retarget.cli.show import echo, print_curves, print_scores

if TYPE_CHECKING:
    from torch import nn

    from hf_retarget.recipe import Recipe

MODEL, SIZE = "test_resnet", 32
OLD = ("Trouser", "Dress", "Sandal", "Sneaker", "Bag", "Ankle boot")
NEW = ("T-shirt/top", "Pullover", "Coat", "Shirt")
"""What the bases are trained on, and what the old one is fine-tuned on: the four that are hardest to tell apart."""

BASE_STEPS, TUNING_STEPS, STEPS_AFTER = 200, 150, 40


@click.command(epilog="Example: hf-retarget demo --out /tmp/demo")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Where to put models and pages; earlier ones are replaced.",
)
@click.option("--quick", is_flag=True, help="Train only briefly: to see that everything runs, not what it is good for.")
@debug_option
def demo(out: Path, quick: bool) -> None:
    """Port a fine-tuning from an old base to a new one, on images that come with the package. Needs no network.

    Two small networks learn to tell six kinds of clothes apart, with different random numbers: the old and the new
    base. The old one is fine-tuned on four other kinds. That fine-tuning is moved to the new base, and compared with
    what else one could have done.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with status("starting"):
        from hf_retarget.porting.finetune import finetune
        from hf_retarget.porting.port import port
        from hf_retarget.recipe import load_recipe
    recipe = load_recipe("fashion-mnist").override(**{"data.image_size": SIZE})
    length = 0.05 if quick else 1.0
    with watch() as progress:
        for seed, side in enumerate(("old", "new")):
            task = training(recipe, OLD, BASE_STEPS * length, seed)
            base = finetune(
                make_base(seed), recipe=task, out=out / side, head="keep", overwrite=True, progress=progress
            )
            echo(f"{side + ' base':<12} {base.test.top1:6.1%} on {len(OLD)} kinds of clothes   {out / side}")
        task = training(recipe, NEW, TUNING_STEPS * length, 0)
        tuned = finetune(out / "old", recipe=task, out=out / "tuned", head="zero", overwrite=True, progress=progress)
        echo(f"{'fine-tuning':<12} {tuned.test.top1:6.1%} on {len(NEW)} other kinds    {out / 'tuned'}")
        echo("\nNow the fine-tuning moves from the old base to the new one.\n")
        after = training(recipe, NEW, STEPS_AFTER * length, 0)
        changes = {"port.steps": 3 if quick else 10, "port.grad_batches": 2, "port.bn_batches": 2}
        result = port(
            out / "old",
            out / "tuned",
            out / "new",
            recipe=after.override(**{"port.method": "fgmt-sign"} | changes),
            out=out / "ported",
            overwrite=True,
            command="hf-retarget demo",
            progress=progress,
        )
    print_curves(result.document)
    echo()
    print_scores(result.document)
    echo(f"\n{result.verdict}\n")
    echo(f"The ported model, its card and all figures: {(out / 'ported').resolve()}")
    echo("To port a fine-tuning of your own: hf-retarget port --help")
    echo(f"\nNow look at the report: {(out / 'ported' / 'report.html').resolve()}")


def make_base(seed: int) -> nn.Module:
    """A network with random weights that expects small gray images."""
    import timm
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        images = {"input_size": (1, SIZE, SIZE), "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
        model: nn.Module = timm.create_model(MODEL, in_chans=1, num_classes=len(OLD), pretrained_cfg_overlay=images)
    return model


def training(recipe: Recipe, classes: tuple[str, ...], steps: float, seed: int) -> Recipe:
    """The recipe of a training on some kinds of clothes."""
    return recipe.override(
        **{
            "data.classes": classes,
            "finetune.steps": max(2, round(steps)),
            "finetune.lr": 0.05,
            "finetune.batch_size": 64,
            "finetune.seed": seed,
        }
    )
