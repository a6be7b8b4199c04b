"""``hf-retarget finetune``: train a model on images, and save it as a folder that timm loads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_options, num_classes_option, resumable, run_options
from hf_retarget.cli.progress import is_main_process, status, watch
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options

if TYPE_CHECKING:
    from hf_retarget.pipeline.train import TrainResult
    from hf_retarget.recipe import Recipe

HEADS = ("auto", "keep", "fresh", "zero")
"""As in `hf_retarget.pipeline.start`, which would import torch; a test compares them."""

_EXAMPLE = """\b
Examples:
  hf-retarget finetune resnet18.a1_in1k --data pets --epochs 5 --out tuned
  hf-retarget finetune old/ --data photos/ --steps 500 --lr 0.003 --record 50 --out tuned
  hf-retarget finetune ported/ --data cub --epochs 3 --evaluate-every 100 --out finished
"""

_MOST = 12  # scores of the validation curve that are printed


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.argument("model")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to make for the tuned model."
)
@click.option(
    "--head",
    type=click.Choice(HEADS),
    default="auto",
    show_default=True,
    help="Classifier to begin with: the model's own, a random one, or zeros; auto: its own if the classes agree.",
)
@click.option(
    "--record",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the weights of every N-th step in DIR/trajectory, for ports along it.",
)
@click.option("--resume", is_flag=True, help="Go on with the run for DIR that was interrupted.")
@click.option("--overwrite", is_flag=True, help="Replace the model in DIR, and forget a run that was interrupted.")
@num_classes_option
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@recipe_options("data", "finetune", plain="finetune")
@debug_option
def finetune(model: str, recipe: Recipe, quiet: bool, as_json: bool, **options: Any) -> None:
    """Fine-tune MODEL on images, and save it to a folder.

    MODEL is a name of timm (resnet18.a1_in1k), an id of the Hub (org/name@revision), a folder, or a file with --arch.
    A ported folder will do, too. The last weights are saved; DIR appears when all is done.
    """
    with status("starting"):
        from hf_retarget.pipeline.train import train
    with resumable(), watch(quiet) as progress:
        result = train(model, recipe=recipe, progress=progress, **options)
    if not is_main_process():
        return
    if as_json:
        click.echo(json.dumps({"folder": str(result.folder)} | result.document, indent=2, ensure_ascii=False))
        return
    for name, words in _describe(result):
        click.echo(f"{name:<10}  {words}")
    if not quiet:
        folder = shlex.quote(str(options["out"]))
        click.echo(f"Next: hf-retarget evaluate {folder} --data {folder}/recipe.yaml", err=True)


def _describe(result: TrainResult) -> list[tuple[str, str]]:
    model, data, figures = (result.document[part] for part in ("model", "data", "figures"))
    test, curve = figures["test"], figures["validation"]["curve"]
    images = ", ".join(f"{count:,} {split}" for split, count in data["images"].items())
    losses = result.history.losses
    rows = [
        ("model", f"{model['architecture']}, {data['classes']} classes, head: {result.head}"),
        ("data", f"{data['name']} ({images})"),
        ("steps", f"{len(losses):,} in {figures['seconds']:.0f} s; loss {losses[0]:.3f} → {losses[-1]:.3f}"),
    ]
    if curve:
        points = ", ".join(f"{value:.1%} (step {step:,})" for step, value in _thinned(curve))
        rows.append(("validation", points))
    top5 = f", top-5 {test['top5']:.1%}" if test["top5"] is not None else ""
    rows.append(("test", f"top-1 {test['top1']:.1%}{top5}, loss {test['loss']:.3f} ({test['images']:,} images)"))
    return [*rows, ("saved", str(result.folder))]


def _thinned(curve: list[Any]) -> list[Any]:
    """At most a dozen points, the first and the last among them."""
    if len(curve) <= _MOST:
        return curve
    return [curve[round(place * (len(curve) - 1) / (_MOST - 1))] for place in range(_MOST)]
