"""``hf-retarget port-all``: port every fine-tuning of a base to a new one, and print the result of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, lock_option, model_options, resumable, run_options
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import describe_command, echo, echo_json, print_table
from hf_retarget.contenders import contenders
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.words import percent

if TYPE_CHECKING:
    from hf_retarget.porting.port_all import Outcome, PortedAll
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget port-all --src-base timm/a --new-base timm/b --models me/birds me/more-birds --data cub --out ported
  hf-retarget port-all --src-base timm/a --new-base timm/b --models-file models.yaml --out ported
  hf-retarget port-all … --reuse-permutation --out ported

\b
A models file is a list of models, with data and options of their own where needed:
  - me/birds
  - model: me/pets
    data: pets
    overrides: {port.steps: 15}
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.option("--src-base", required=True, metavar="MODEL", help="Old base, from which all fine-tunings started.")
@click.option("--new-base", required=True, metavar="MODEL", help="New base, to which they are to move.")
@click.option("--models", multiple=True, metavar="MODEL …", help="Fine-tunings of the old base.")
@click.argument("more", nargs=-1, metavar="")
@click.option(
    "--models-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML list of fine-tunings: model, and if need be data, recipe, overrides and name (the folder).",
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Folder for them all."
)
@click.option(
    "--reuse-permutation", is_flag=True, help="Use the permutation of the first port for all others: no gradients."
)
@click.option(
    "--gradient-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the gradients of the old side there, for ports to other bases.",
)
@click.option("--overwrite", is_flag=True, help="Port again what is there already.")
@lock_option
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@recipe_options(required=False)
@debug_option
@click.pass_context
def port_all(
    ctx: click.Context,
    /,
    recipe: Recipe,
    models: tuple[str, ...],
    more: tuple[str, ...],
    models_file: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Port every fine-tuning of an old base to a new one, each into a folder of its own below DIR.

    One that fails does not stop the rest. The same command continues where it was interrupted, and skips what is
    finished. Exits with 1 if any failed.
    """
    if not (models or models_file):
        raise click.UsageError("Missing option '--models' or '--models-file'.")
    with status("starting"):
        from hf_retarget.porting.port_all import port_all
    with resumable("; the same command continues"), watch(quiet) as progress:
        done = port_all(
            models=[*models, *more],
            models_file=models_file,
            recipe=recipe,
            command=describe_command(sys.argv),
            progress=progress,
            **options,
        )
    if is_main_process():
        if as_json:
            echo_json({"folder": str(done.out)} | done.to_json())
        else:
            _print(done)
    if done.failed:
        ctx.exit(1)


def _print(done: PortedAll) -> None:
    shown = [each for each in contenders() if each.drawn and any(each.name in one.top1 for one in done.outcomes)]
    columns = ("model", *(each.short for each in shown), "permutation", "result")
    print_table(columns, [_row(each, [one.name for one in shown]) for each in done.outcomes])
    echo()
    for each in done.failed:
        echo(f"{each.model}: {each.error}")
    ported = len(done.outcomes) - len(done.failed)
    echo(f"{ported} of {len(done.outcomes)} ported, in {done.out}")


def _row(outcome: Outcome, names: list[str]) -> tuple[str, ...]:
    permutation = f"of {outcome.permutation_from}" if outcome.permutation_from else "own"
    words = {"ported": "ported", "there": "there already", "failed": "failed"}[outcome.status]
    figures = (percent(outcome.top1.get(name)) for name in names)
    return outcome.model, *figures, "–" if outcome.status == "failed" else permutation, words
