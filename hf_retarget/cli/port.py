"""``hf-retarget port``: move a fine-tuning to a new base, and say whether that was worth it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_options, output_options, push_options, resumable, run_options
from hf_retarget.cli.progress import is_main_process, status, watch
from hf_retarget.cli.push import check_push, print_pushed, push_result
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import echo, echo_json
from hf_retarget.errors import FinishedError
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

if TYPE_CHECKING:
    from hf_retarget.pipeline.plan import Plan
    from hf_retarget.recipe import Recipe

DTYPES = ("float32", "float16", "bfloat16")
"""As in `hf_retarget.pipeline.port`, which would import torch; a test compares them."""

_EXAMPLE = """\b
Examples:
  hf-retarget port --src-base old/ --src-ft tuned/ --new-base new/ --data cub
  hf-retarget port --src-base timm/a --src-ft me/a-pets --new-base timm/b --data pets --dry-run
  hf-retarget port … --data photos/ --steps 15 --early-stop 3 --finetune-steps 100 --out ported
  hf-retarget port … --data pets --permutation ported/ --out another
"""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT_ONLY = ("gradient_cache", "dtype", "resume", "overwrite", "lock")  # what a plan does not need

_BARS = "▁▂▃▄▅▆▇█"

Row = tuple[str, ...]


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.option("--src-base", required=True, metavar="MODEL", help="Old base, from which the fine-tuning started.")
@click.option("--src-ft", required=True, metavar="MODEL", help="The old base after the fine-tuning.")
@click.option("--new-base", required=True, metavar="MODEL", help="New base, to which the fine-tuning is to move.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder to make for the ported model (TUNED-on-BASE if not given).",
)
@click.option(
    "--permutation",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Permutation of an earlier port (its folder, or the file): no gradients.",
)
@click.option("--tuned-target", metavar="MODEL", help="Real fine-tuning of the new base, to compare with.")
@click.option("--initial-head", type=_FILE, metavar="FILE", help="Head with which the fine-tuning began.")
@click.option(
    "--checkpoints",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Folder of a recorded trajectory, or, repeated, the checkpoints of the fine-tuning in order: port along them.",
)
@click.option(
    "--gradient-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the gradients of the old side there, for ports of the same fine-tuning to other bases.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Store the weights so (as the new base does if not given).")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and what it would cost.")
@click.option("--resume", is_flag=True, help="Go on with the port for DIR that was interrupted.")
@click.option("--overwrite", is_flag=True, help="Replace the model in DIR, and forget a port that was interrupted.")
@output_options
@push_options
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@recipe_options()
@debug_option
def port(
    recipe: Recipe,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
    out: Path | None,
    destination: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Move a fine-tuning to a new base of the same architecture, without repeating it.

    A MODEL is a name of timm (resnet18.a1_in1k), an id of the Hub (org/name@revision), a folder, or a file with
    --arch. The closing table compares the port with plain fine-tuning at the same price; DIR appears when all is done.
    """
    options["checkpoints"] = options["checkpoints"] or None
    if out is None:
        out = Path(name_result(options["src_ft"], options["new_base"]))
    place = check_push(destination, options["token"])
    if dry_run:
        _plan(recipe, quiet, as_json, {name: value for name, value in options.items() if name not in _PORT_ONLY})
        return
    with status("starting"):
        from hf_retarget.pipeline.port import port
    with resumable(), watch(quiet) as progress:
        progress.say(f"the result goes to {out}")
        try:
            command = describe_command(sys.argv)
            figures = port(recipe=recipe, out=out, command=command, progress=progress, **options).figures
        except FinishedError as finished:
            progress.say(str(finished))
            figures = read_json(Path(str(out)).expanduser() / "port.json", MAX_DOCUMENT_BYTES)
    if not is_main_process():
        return
    if not as_json:
        if not quiet:
            print_curves(figures)
        print_scores(figures)
        echo(f"\n{figures['verdict']}")
        echo(f"Saved to {out}")
    pushed = push_result(Path(str(out)), place, quiet)
    if as_json:
        echo_json({"folder": str(out), **pushed} | figures)
        return
    if pushed:
        print_pushed(pushed["pushed"])
    if not quiet:
        echo(f"Look: {out}/report.html", err=True)
        echo(f"Next: hf-retarget finetune {describe_data(out, recipe)} --steps 200 --out …", err=True)


def name_result(tuned: str, new_base: str) -> str:
    """The folder of a port that was given none: after the tuned model and the new base, in the current folder.

    Example:
        >>> name_result("me/birds@v2", "timm/resnet18.a1_in1k"), name_result("runs/tuned/", "new/model.safetensors")
        ('birds-on-resnet18.a1_in1k', 'tuned-on-model')
    """

    def last(reference: str) -> str:
        name = reference.rpartition(":")[2].partition("@")[0].rstrip("/").rpartition("/")[2]
        return name.removesuffix(".safetensors").lstrip(".~") or "model"

    return f"{last(tuned)}-on-{last(new_base)}"


def describe_data(folder: Path | None, recipe: Recipe) -> str:
    """A finished folder and the data it was made with, as arguments of the next command.

    The recipe in the folder has only the last part of a path, so that it can be given to others.
    """
    from hf_retarget.publish.paths import shorten_path

    place, reference = shlex.quote(str(folder)), recipe.data.reference
    here = f" --data-reference {shlex.quote(reference)}" if shorten_path(reference) != reference else ""
    return f"{place} --data {place}/recipe.yaml{here}"


def describe_command(arguments: list[str]) -> str:
    """The command line that was given, to be repeated and shown to others: without the token.

    Example:
        >>> describe_command(["/usr/bin/hf-retarget", "port", "--token", "hf_secret", "--token=hf_secret", "--steps=3"])
        'hf-retarget port --steps=3'
    """
    kept: list[str] = []
    skip = False
    for each in arguments[1:]:
        if not (skip or each == "--token" or each.startswith("--token=")):
            kept.append(each)
        skip = each == "--token"
    return shlex.join(["hf-retarget", *kept])


def print_curves(figures: dict[str, Any]) -> None:
    """Show, to a person who watches, the validation accuracy of each method step by step."""
    names = {"port": "steps", "naive": "naive_steps", "masked": "masked_steps", "oracle": "oracle_steps"}
    shown = {name: figures[key] for name, key in names.items()}
    for name, steps in shown.items():
        if steps and (name == "port" or steps != shown["port"]):  # a naive port is the naive one
            best = max(step["top1"] for step in steps)
            echo(f"{name:<6}  {sparkline(steps)}  best {best:.1%} on validation, {len(steps)} steps", err=True)


def sparkline(steps: list[dict[str, Any]]) -> str:
    """Accuracies from 0 to 1 as bars, one for each step.

    Example:
        >>> sparkline([{"top1": 0.0}, {"top1": 0.5}, {"top1": 1.0}])
        '▁▅█'
    """
    return "".join(_BARS[round(step["top1"] * (len(_BARS) - 1))] for step in steps)


def print_scores(figures: dict[str, Any]) -> None:
    """Print the test scores of a port as a table."""
    from hf_retarget.pipeline.card import describe_rows

    five = any(each["top5"] is not None for each in figures["test"].values())
    columns = ("on the test images", "top-1", *(("top-5",) if five else ()), "loss")
    rows = [
        (words, _percent(each["top1"]), *((_percent(each["top5"]),) if five else ()), _number(each["loss"]))
        for words, each in describe_rows(figures)
    ]
    print_table(columns, rows)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_table(columns: Row, rows: list[Row]) -> None:
    """Print rows of a name and figures: with lines on a terminal, plainly elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for place, column in enumerate(columns):
            table.add_column(column.upper(), justify="right" if place else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console(highlight=False).print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (tuple(column.upper() for column in columns), *rows):
        first, *rest = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        echo("  ".join([first, *rest]))


def _plan(recipe: Recipe, quiet: bool, as_json: bool, options: dict[str, Any]) -> None:
    with status("starting"):
        from hf_retarget.pipeline.plan import plan
    with watch(quiet) as progress:
        found = plan(recipe=recipe, progress=progress, **options)
    if not is_main_process():
        return
    if as_json:
        echo_json(found.to_json())
        return
    for name, words in _describe(found):
        echo(f"{name:<9}  {words}")


def _describe(plan: Plan) -> list[Row]:
    images = ", ".join(f"{count:,} {split}" for split, count in plan.images.items())
    held = f", {len(plan.held)} held still by tables" if plan.held else ""
    stacks = "leading directions of the gradients" if plan.compressed else "all gradients"
    rows = [
        ("model", f"{plan.architecture}, {plan.parameters:,} parameters, {plan.classes} classes"),
        ("head", f"{plan.head} ({plan.why})"),
        ("graph", f"{plan.groups} groups of neurons to match{held}"),
        ("data", f"{plan.data} ({images})"),
        ("port", f"{plan.method}, {plan.steps} steps, {plan.gradients:,} gradients of a minibatch"),
    ]
    if plan.finetune_steps:
        rows.append(("then", f"fine-tuning, {plan.finetune_steps:,} steps"))
    if plan.control_steps:
        rows.append(("control", f"plain fine-tuning, {plan.control_steps:,} steps"))
    rows += [
        ("memory", f"about {plan.memory / 1e9:.1f} GB, with {stacks} kept"),
        ("time", f"{describe_seconds(plan.seconds)}, and the search for permutations"),
    ]
    return [*rows, *(("note", note) for note in plan.notes)]


def describe_seconds(seconds: float) -> str:
    """About how long something takes.

    Example:
        >>> describe_seconds(3), describe_seconds(200), describe_seconds(20_000)
        ('about 3 s', 'about 3 min', 'about 5.6 h')
    """
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"
