"""``hf-retarget demo``: a base, its fine-tuning, an update of the base, and a port, on embedded images, offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option
from hf_retarget.cli.show import echo, print_scores
from hf_retarget.progress import status, watch

if TYPE_CHECKING:
    from torch import nn

    from hf_retarget.recipe import Recipe

MODEL, SIZE = "test_resnet", 32
OLD = ("Trouser", "Dress", "Sandal", "Sneaker", "Bag", "Ankle boot")
NEW = ("T-shirt/top", "Pullover", "Coat", "Shirt")
"""Classes for training the bases, and for fine-tuning the old one: the four that are hardest to distinguish."""

BASE_STEPS, TUNING_STEPS, UPDATE_STEPS = 200, 150, 120
NOISE = 60
"""Standard deviation in gray levels."""


@click.command(epilog="Example: hf-retarget demo --out /tmp/demo")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder for models and reports; earlier ones are replaced.",
)
@click.option("--quick", is_flag=True, help="Train only briefly, to test that everything runs.")
@debug_option
def demo(out: Path, quick: bool) -> None:
    """Run a complete port, on images that come with the package.

    Needs no network. A small network learns to distinguish six kinds of clothes: the old base. It is fine-tuned on four
    other kinds. Then the base is updated to withstand noise. The fine-tuning is moved to the update, and compared with
    the alternatives, on clean and on noisy images; then to an independently trained base.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with status("starting"):
        from hf_retarget.porting.finetune import finetune
        from hf_retarget.porting.port import port
        from hf_retarget.recipe import load_recipe
    recipe = load_recipe("fashion-mnist").override(**{"data.image_size": SIZE})
    length = 0.05 if quick else 1.0
    with watch() as progress:
        common: dict[str, Any] = {"overwrite": True, "progress": progress}
        for seed, side in enumerate(("old", "independent")):
            task = training(recipe, OLD, BASE_STEPS * length, seed)
            base = finetune(make_base(seed), recipe=task, out=out / side, head="keep", **common)
            echo(f"{side + ' base':<17} {base.test.top1:6.1%} on {len(OLD)} kinds of clothes   {out / side}")
        task = training(recipe, NEW, TUNING_STEPS * length, 0)
        tuned = finetune(out / "old", recipe=task, out=out / "tuned", head="zero", **common)
        echo(f"{'tuned model':<17} {tuned.test.top1:6.1%} on {len(NEW)} other kinds    {out / 'tuned'}")
        task = training(recipe, OLD, UPDATE_STEPS * length, 2).override(**{"finetune.lr": 0.02})
        new = finetune(out / "old", mix_noise(OLD), recipe=task, out=out / "new", head="keep", **common)
        echo(f"{'new base':<17} {new.test.top1:6.1%} on the first six, noisy   {out / 'new'}")
        echo("\nNow the fine-tuning moves to the new base, without a gradient.\n")
        changes = {"port.steps": 3 if quick else 10, "port.grad_batches": 2, "port.bn_batches": 2}
        recipe = training(recipe, NEW, 0, 0).override(**changes)
        done = port(
            out / "old", out / "tuned", out / "new", recipe=recipe, out=out / "ported",
            also_data={"noisy": mix_noise(NEW)["test"]}, command="hf-retarget demo", **common,
        )  # fmt: skip
        print_scores(done.document)
        echo(f"\n{done.verdict}\n")
        echo("The harder case of the paper: an independently trained base, whose neurons have to be matched.\n")
        hard = recipe.override(**{"port.control": "naive"})
        paper = port(out / "old", out / "tuned", out / "independent", recipe=hard, out=out / "matched", **common)
    print_scores(paper.document)
    echo(f"\n{paper.verdict}")
    echo(f"\nThe ported models, their cards and all figures: {(out / 'ported').resolve()}")
    echo("To port your own fine-tuning: hf-retarget port --help")
    echo(f"\nOpen the report: {(out / 'ported' / 'report.html').resolve()}")


def mix_noise(classes: tuple[str, ...]) -> dict[str, Any]:
    """The embedded images of some classes, with noise on every second training image and all test images."""
    import numpy as np
    from PIL import Image

    from hf_retarget.data import EMBEDDED
    from hf_retarget.data.files import open_embedded
    from hf_retarget.recipe import DataOptions

    source, draw = open_embedded("fashion-mnist", EMBEDDED["fashion-mnist"], DataOptions()), np.random.default_rng(0)
    mixed = {}
    for split, every in (("train", 2), ("test", 1)):
        rows, items = source.splits[split](), list[Any]()
        for row, label in enumerate(rows.labels):
            name = rows.names[label] if rows.names else str(label)
            if name in classes:
                levels = np.asarray(rows.image(row), dtype=float)
                noise = draw.normal(0, NOISE, levels.shape) if len(items) % every == 0 else 0.0
                items.append((Image.fromarray(np.clip(levels + noise, 0, 255).astype(np.uint8)), name))
        mixed[split] = items
    return mixed


def make_base(seed: int) -> nn.Module:
    """A randomly initialised network for small grayscale images."""
    import timm
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        images = {"input_size": (1, SIZE, SIZE), "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
        model: nn.Module = timm.create_model(MODEL, in_chans=1, num_classes=len(OLD), pretrained_cfg_overlay=images)
    return model


def training(recipe: Recipe, classes: tuple[str, ...], steps: float, seed: int) -> Recipe:
    """A recipe for training on some of the classes."""
    return recipe.override(
        **{
            "data.classes": classes,
            "finetune.steps": max(2, round(steps)) if steps else 0,
            "finetune.lr": 0.05,
            "finetune.batch_size": 64,
            "finetune.seed": seed,
        }
    )
