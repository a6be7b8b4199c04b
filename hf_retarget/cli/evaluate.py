"""``hf-retarget evaluate``: score models, by class and with their confusions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_argument, model_options, num_classes_option, run_options
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import Row, echo, echo_json, print_table
from hf_retarget.names import SPLITS
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.words import number, percent

if TYPE_CHECKING:
    from hf_retarget.evaluation.evaluate import Evaluation
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget evaluate tuned/ --data pets
  hf-retarget evaluate tuned/ ported/ plain/ --data pets
  hf-retarget evaluate org/name@main --data photos/ --split validation --json
  hf-retarget evaluate weights.safetensors --arch resnet18 --data cub
"""

_MOST_CLASSES = 20
_MOST_CONFUSIONS = 10


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@model_argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--split",
    type=click.Choice(SPLITS),
    help="Images to score on (default: the test split, or all images of data with a single split).",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Images per forward pass.")
@click.option("--all", "everything", is_flag=True, help="List all classes and confusions.")
@num_classes_option
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@recipe_options("data")
@debug_option
def evaluate(
    models: tuple[str, ...],
    recipe: Recipe,
    batch_size: int | None,
    everything: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score MODEL on images: accuracy, loss, classes, confusions.

    MODEL is a timm name (resnet18.a1_in1k), a Hub id (org/name@revision), a folder, or a file with --arch. Several
    models are scored one by one and as an ensemble, by the mean of their probabilities.
    """
    if batch_size is not None:
        recipe = recipe.override(**{"port.eval_batch": batch_size})
    with status("starting"):
        from hf_retarget.evaluation.evaluate import evaluate
    with watch(quiet) as progress:
        scored = evaluate(models if len(models) > 1 else models[0], recipe=recipe, progress=progress, **options)
        for note in scored.notes:
            progress.say(note)
    if not is_main_process():
        return
    if as_json:
        echo_json(scored.to_json())
    else:
        _print(scored, everything)


def _print(scored: Evaluation, everything: bool) -> None:
    from hf_retarget.report.classes import list_confusions

    found = scored.score
    if scored.members:
        together = [(each, each.score) for each in (*scored.members, scored)]
        scores = [
            (each.model, each.architecture, percent(its.top1), percent(its.top5), number(its.loss))
            for each, its in together
        ]
        print_table(("model", "architecture", "top-1", "top-5", "loss"), scores, 2)
        echo()
    echo(f"model   {scored.model} ({scored.architecture})")
    echo(f"data    {scored.data}, {scored.split} ({found.count:,} images)")
    echo(f"top-1   {found.top1:.2%}")
    if found.top5 is not None:
        echo(f"top-5   {found.top5:.2%}")
    echo(f"loss    {found.loss:.4f}")
    names = [scored.name(number) for number in range(len(found.confusion))]
    for columns, rows, most, texts in (
        (("class", "images", "accuracy"), rank_classes(scored), _MOST_CLASSES, 1),
        (("is", "taken for", "images", "share"), list_confusions(found.confusion, names), _MOST_CONFUSIONS, 2),
    ):
        if rows:
            echo()
            print_table(columns, rows if everything else rows[:most], texts)
        if len(rows) > most and not everything:
            echo(f"… and {len(rows) - most:,} more; --all lists them")


def rank_classes(scored: Evaluation) -> list[Row]:
    """Name, number of images and accuracy of each class with images, worst first."""
    found, sizes = scored.score, Counter(scored.score.labels)
    ranked = sorted((accuracy, number) for number, accuracy in enumerate(found.per_class) if accuracy is not None)
    return [(scored.name(number), f"{sizes[number]:,}", f"{value:.1%}") for value, number in ranked]
