"""``hf-retarget evaluate``: how good a model is, class by class, and what it confuses."""

from __future__ import annotations

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
    help="Images to score on (if not given: those to test on, or all if the data has a single split).",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Images that go through the model at once.")
@click.option("--all", "everything", is_flag=True, help="List all classes and confusions, however many.")
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

    MODEL is a name of timm (resnet18.a1_in1k), an id of the Hub (org/name@revision), a folder, or a file with --arch.
    Several are scored one by one, and as an ensemble: the mean of their probabilities.
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
    classes, confusions = rank_classes(scored), rank_confusions(scored)
    for columns, rows, most, names in (
        (("class", "images", "accuracy"), classes, _MOST_CLASSES, 1),
        (("is", "taken for", "images", "share"), confusions, _MOST_CONFUSIONS, 2),
    ):
        if rows:
            echo()
            print_table(columns, rows if everything else rows[:most], names)
        if len(rows) > most and not everything:
            echo(f"… and {len(rows) - most:,} more; --all lists them")


def rank_classes(scored: Evaluation) -> list[Row]:
    """Name, images and accuracy of every class that has images, the worst first."""
    found = scored.score
    ranked = sorted((accuracy, number) for number, accuracy in enumerate(found.per_class) if accuracy is not None)
    return [(scored.name(number), f"{sum(found.confusion[number]):,}", f"{value:.1%}") for value, number in ranked]


def rank_confusions(scored: Evaluation) -> list[Row]:
    """The true class, the predicted one, how often, and which share of the true class, the most frequent first."""
    ranked = sorted(
        (-count, true, predicted)
        for true, row in enumerate(scored.score.confusion)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    return [
        (scored.name(true), scored.name(predicted), f"{-count:,}", f"{-count / sum(scored.score.confusion[true]):.1%}")
        for count, true, predicted in ranked
    ]
