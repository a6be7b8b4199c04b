"""``hf-retarget plane``: accuracy and loss between models, on a line or a plane."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_options, output_options, resumable, run_options
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import describe_command, echo, echo_json, print_table
from hf_retarget.errors import FinishedError
from hf_retarget.names import SPLITS
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json
from hf_retarget.words import number, percent, shorten_names

if TYPE_CHECKING:
    from hf_retarget.landscape.result import PlaneResult
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget plane --models a/ b/ --permute match --data pets --out line
  hf-retarget plane --models plain/ ported/ a/ --data pets --report ported/
  hf-retarget plane --models a/ b/ c/ --data pets --grid 9 --out plane
"""

_RECIPE = ("bn_batches", "batch_size", "seed")
"""Options for fields of the recipe's section `port`."""


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.argument("more", nargs=-1, metavar="[MODEL]...")
@click.option("--models", multiple=True, metavar="MODEL …", help="Two or three models, also as NAME=MODEL.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for pictures and figures.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="PORT",
    help="Add the picture to the report of this port (default for DIR: PORT/plane).",
)
@click.option(
    "--grid", type=click.IntRange(min=2, max=201), metavar="N", help="Points along a side (33 for a line, else 17)."
)
@click.option(
    "--margin",
    type=click.FloatRange(min=0, max=10),
    metavar="PART",
    help="How far to extend beyond the models, as a share of their distance (0 for a line, else 0.2).",
)
@click.option("--split", type=click.Choice(SPLITS), default="test", show_default=True, help="Images to score on.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Score on only N images of the split.")
@click.option("--bn-batches", type=click.IntRange(min=0), help="Minibatches to re-estimate BatchNorm at each point.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Images per such minibatch.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of minibatches, --limit and matching.")
@click.option(
    "--permute",
    multiple=True,
    metavar="HOW",
    help="'match': align all models with the first by their weights. NAME=match, NAME=FILE or NAME=PORT (a port's "
    "folder): align only this one.",
)
@click.option(
    "--graph",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Permutation graph of the permutations (default: traced).",
)
@output_options
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@recipe_options("data")
@debug_option
def plane(  # more than seven parameters: each is an option of this command only
    recipe: Recipe,
    more: tuple[str, ...],
    models: tuple[str, ...],
    permute: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    out: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Show accuracy and loss on the line or plane through models.

    Two models span a line, of which the barrier is measured, and three a plane. The models share an architecture and
    the size of the head. BatchNorm statistics are re-estimated at every point. A coarse picture appears in DIR early;
    --resume continues an interrupted run.
    """
    if not models and not more:
        raise click.UsageError("Missing option '--models'.")
    if out is None and report is None:
        raise click.UsageError("Missing option '--out' (or --report PORT).")
    changes = {f"port.{name}": options.pop(name) for name in _RECIPE}
    recipe = recipe.override(**{key: value for key, value in changes.items() if value is not None})
    with status("starting"):
        from hf_retarget.landscape.plane import plane
        from hf_retarget.landscape.result import PlaneResult
    folder = out or Path(report or "") / "plane"
    with resumable(), watch(quiet) as progress:
        try:
            result = plane(
                read_models((*models, *more)),
                recipe=recipe,
                permute=read_permutations(permute),
                out=out,
                report=report,
                progress=progress,
                command=describe_command(sys.argv),
                **options,
            )
        except FinishedError as finished:
            progress.say(str(finished))
            result = PlaneResult(read_json(folder.expanduser() / "plane.json", MAX_DOCUMENT_BYTES))
    if not is_main_process():
        return
    if as_json:
        echo_json({"folder": str(folder)} | result.figures)
        return
    _print(result, folder)
    if report is not None:
        echo(f"Shown in {report / 'report.html'}")


def read_models(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=MODEL; a model without a name gets the end of its reference.

    Example:
        >>> read_models(("plain=runs/retuned", "runs/ported/"))
        {'plain': 'runs/retuned', 'ported': 'runs/ported/'}
    """
    given, references = [], []
    for text in texts:
        name, _, reference = text.partition("=")
        has_name = name and reference and "/" not in name and not Path(text).exists()
        given.append(name if has_name else "")
        references.append(reference if has_name else text)
    names = [name or short for name, short in zip(given, shorten_names(references), strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"Two models are named '{name}'; give them names with NAME=MODEL.")
    return dict(zip(names, references, strict=True))


def read_permutations(texts: tuple[str, ...]) -> str | dict[str, str] | None:
    """Parse --permute: nothing, 'match' for all, or a method for each name.

    Example:
        >>> read_permutations(()), read_permutations(("match",)), read_permutations(("old=ported/",))
        (None, 'match', {'old': 'ported/'})
    """
    if not texts:
        return None
    if texts == ("match",):
        return "match"
    pairs = dict(text.split("=", 1) for text in texts if "=" in text)
    if len(pairs) != len(texts):
        raise click.UsageError("--permute is 'match' alone, or NAME=match, NAME=FILE or NAME=PORT for each model.")
    return pairs


def _print(result: PlaneResult, out: Path) -> None:
    data, points = result.figures["data"], result.points
    rows = [(each["name"], percent(each["top1"]), number(each["loss"])) for each in result.figures["models"]]
    if not result.is_line:
        losses = [each["loss"] for each in points if each["loss"] is not None]
        rows.append(("best point", percent(max(each["top1"] for each in points)), number(min(losses, default=None))))
    print_table((f"{data['images']:,} images of {data['name']}, {data['split']}", "top-1", "loss"), rows)
    if result.barrier:
        loss, top1 = result.barrier["loss"], result.barrier["top1"]
        words = "not finite" if loss is None else f"{loss:.3f} at {result.barrier['loss_at']:.2f}"
        echo(f"\nbarrier: loss {words}, accuracy {100 * top1:.1f} points at {result.barrier['top1_at']:.2f}")
    echo(f"\n{len(points):,} points; pictures and figures in {out}")
