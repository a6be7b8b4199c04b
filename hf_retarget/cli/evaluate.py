"""``hf-retarget evaluate``: how good a model is, class by class, and what it confuses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_options, num_classes_option, run_options
from hf_retarget.cli.progress import is_main_process, status, watch
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import echo, echo_json

if TYPE_CHECKING:
    from hf_retarget.pipeline.score import Scored
    from hf_retarget.recipe import Recipe

SPLITS = ("test", "validation", "train")
"""As in `hf_retarget.pipeline.score`, which would import torch; a test compares them."""

FORMAT = "hf-retarget/evaluate/1"

_EXAMPLE = """\b
Examples:
  hf-retarget evaluate tuned/ --data pets
  hf-retarget evaluate org/name@main --data photos/ --split validation --json
  hf-retarget evaluate weights.safetensors --arch resnet18 --data cub
"""

_MOST_CLASSES = 20
_MOST_CONFUSIONS = 10

Row = tuple[str, ...]


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.argument("model")
@click.option("--split", type=click.Choice(SPLITS), default="test", show_default=True, help="Images to score on.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Images that go through the model at once.")
@click.option("--all", "everything", is_flag=True, help="List all classes and confusions, however many.")
@num_classes_option
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@recipe_options("data")
@debug_option
def evaluate(
    model: str, recipe: Recipe, batch_size: int | None, everything: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Score MODEL on images: accuracy, loss, the accuracy of every class, and the confusions.

    MODEL is a name of timm (resnet18.a1_in1k), an id of the Hub (org/name@revision), a folder, or a file with --arch.
    """
    if batch_size is not None:
        recipe = recipe.override(**{"port.eval_batch": batch_size})
    with status("starting"):
        from hf_retarget.pipeline.score import score
    with watch(quiet) as progress:
        scored = score(model, recipe=recipe, progress=progress, **options)
        for note in scored.notes:
            progress.say(note)
    if not is_main_process():
        return
    if as_json:
        echo_json(_document(scored))
    else:
        _print(scored, everything)


def _document(scored: Scored) -> dict[str, Any]:
    found = scored.score
    return {
        "format": FORMAT,
        "model": scored.model,
        "architecture": scored.architecture,
        "data": scored.data,
        "split": scored.split,
        "images": found.count,
        "top1": found.top1,
        "top5": found.top5,
        "loss": found.loss,
        "classes": [
            {"name": scored.name(number), "images": sum(row), "accuracy": accuracy}
            for number, (row, accuracy) in enumerate(zip(found.confusion, found.per_class, strict=True))
        ],
        "confusion": [list(row) for row in found.confusion],
        "notes": list(scored.notes),
    }


def _print(scored: Scored, everything: bool) -> None:
    found = scored.score
    echo(f"model   {scored.model} ({scored.architecture})")
    echo(f"data    {scored.data}, {scored.split} ({found.count:,} images)")
    echo(f"top-1   {found.top1:.2%}")
    if found.top5 is not None:
        echo(f"top-5   {found.top5:.2%}")
    echo(f"loss    {found.loss:.4f}")
    classes, confusions = rank_classes(scored), rank_confusions(scored)
    shown = len(classes) if everything else _MOST_CLASSES
    _print_table(("class", "images", "accuracy"), classes[:shown], len(classes) - shown)
    shown = len(confusions) if everything else _MOST_CONFUSIONS
    _print_table(("is", "taken for", "images", "share"), confusions[:shown], len(confusions) - shown)


def rank_classes(scored: Scored) -> list[Row]:
    """Name, images and accuracy of every class that has images, the worst first."""
    found = scored.score
    ranked = sorted((accuracy, number) for number, accuracy in enumerate(found.per_class) if accuracy is not None)
    return [(scored.name(number), f"{sum(found.confusion[number]):,}", f"{value:.1%}") for value, number in ranked]


def rank_confusions(scored: Scored) -> list[Row]:
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


def _print_table(columns: Row, rows: list[Row], hidden: int) -> None:
    if not rows:
        return
    echo()
    words = columns.index("images")  # names before, figures from here on
    if sys.stdout.isatty():
        _print_rich(columns, rows, words)
    else:
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for row in (tuple(column.upper() for column in columns), *rows):
            cells = (
                cell.ljust(width) if place < words else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            echo("  ".join(cells))
    if hidden > 0:
        echo(f"… and {hidden:,} more; --all lists them")


def _print_rich(columns: Row, rows: list[Row], words: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column.upper(), justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
