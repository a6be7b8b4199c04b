"""``hf-retarget port-all``: port all fine-tunings of a base to a new one, and print the result of each."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, lock_option, model_options, require, resumable, run_options
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import describe_command, echo, echo_json, print_table
from hf_retarget.contenders import find_contender
from hf_retarget.names import PORT_ALL_PAGE
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.words import percent

if TYPE_CHECKING:
    from hf_retarget.porting.port_all import Outcome, PortedAll
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget port-all --src-base old/ --new-base new/ --models a/ b/ \\
      --data cub --out ported
  hf-retarget port-all … --models-file models.yaml --out ported
  hf-retarget port-all … --reuse-permutation --out ported
  hf-retarget port-all … --out ported --shard 3/16   # the fourth of 16 parts
  hf-retarget port-all --out ported --collect        # when all are done

\b
A models file is a list of models, optionally with their own data and options:
  - me/birds
  - model: me/pets
    data: pets
    overrides: {port.steps: 15}
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.option("--src-base", metavar="MODEL", help="Old base of all fine-tunings.")
@click.option("--new-base", metavar="MODEL", help="New base, to which they move.")
@click.option("--models", multiple=True, metavar="MODEL …", help="Fine-tunings of the old base.")
@click.argument("more", nargs=-1, metavar="")
@click.option(
    "--models-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML list of fine-tunings: model, and optionally data, recipe, overrides and name (the folder).",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for all results.",
)
@click.option(
    "--reuse-permutation",
    is_flag=True,
    help="Reuse the permutation of the first port for all others, without gradients.",
)
@click.option(
    "--shard", metavar="I/N", help="Port only part I of N (from 0), on one of N machines; detected in a Slurm array."
)
@click.option("--collect", is_flag=True, help="Port nothing; join the results of all parts in DIR into one page.")
@click.option(
    "--gradient-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Cache the gradients along the fine-tunings, for ports to other bases.",
)
@click.option("--overwrite", is_flag=True, help="Port finished models again.")
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
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Port all fine-tunings of an old base to a new one.

    Each gets its own folder below DIR. A failure does not stop the rest. After an interruption, the same command
    continues and skips finished models. DIR/port-all.html recommends what to do with each. Exits with 1 if any failed,
    or, with --collect, is missing.
    """
    shard, collect = options.pop("shard"), options.pop("collect")
    if collect and (shard or models or options["models_file"]):
        raise click.UsageError("--collect only reads DIR; leave out --shard and the models.")
    if not collect:
        require(src_base=options["src_base"], new_base=options["new_base"])
        if not (models or options["models_file"]):
            raise click.UsageError("Missing option '--models' or '--models-file'.")
    with status("starting"):
        from hf_retarget.porting.port_all import collect_ports, port_all, read_shard
    with resumable("; the same command continues"), watch(quiet) as progress:
        if collect:
            done = collect_ports(options["out"])
        else:
            options["shard"] = read_shard(shard, os.environ)
            command = describe_command(sys.argv)
            done = port_all(models=[*models, *more], recipe=recipe, command=command, progress=progress, **options)
    if is_main_process():
        if as_json:
            echo_json({"folder": str(done.out)} | done.to_json())
        else:
            _print(done)
    if done.failed or done.problems or any(each.status == "waiting" for each in done.outcomes):
        ctx.exit(1)


def _print(done: PortedAll) -> None:
    from hf_retarget.report.comparison import list_shown

    shown = list_shown(done.to_json()["models"])
    columns = ("model", "what to do", *(find_contender(name).short for name in shown), "permutation", "result")
    print_table(columns, [_row(each, shown) for each in done.outcomes], names=2)
    echo()
    for each in done.failed:
        echo(f"{each.model}: {each.error}")
    for line in done.problems:
        echo(line)
    ported = sum(each.status in ("ported", "there") for each in done.outcomes)
    echo(f"{ported} of {len(done.outcomes)} ported, in {done.out}")
    if done.shard.count == 1:
        echo(f"Look: {done.out / PORT_ALL_PAGE}", err=True)


def _row(outcome: Outcome, names: list[str]) -> tuple[str, ...]:
    permutation = f"of {outcome.permutation_from}" if outcome.permutation_from else "own"
    figures = (percent(outcome.top1.get(name)) for name in names)
    words = {"there": "there already"}.get(outcome.status, outcome.status)
    return outcome.model, outcome.action or "–", *figures, permutation if outcome.action else "–", words
