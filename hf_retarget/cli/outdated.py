"""``hf-retarget outdated``: find models whose base has a successor, and how to port them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hf_retarget.cli.options import debug_option, token_option
from hf_retarget.cli.show import echo, echo_json, print_table
from hf_retarget.progress import status, watch
from hf_retarget.words import plural

if TYPE_CHECKING:
    from hf_retarget.successors import Finding

SOME = 3
"""The exit code if some models are outdated."""

_EXAMPLE = """\b
Examples:
  hf-retarget outdated me/birds me/pets
  hf-retarget outdated --user me --json
  hf-retarget outdated --folder runs/
"""


@click.command(epilog=_EXAMPLE)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--user", metavar="NAME", help="All models of a user or organisation on the Hub.")
@click.option(
    "--folder", metavar="DIR", type=click.Path(path_type=Path), help="All models in a folder and its subfolders."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@token_option
@debug_option
@click.pass_context
def outdated(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    user: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    token: str | None,
) -> None:
    """Find models whose base has a new version or new weights.

    The command that ports each is printed. A MODEL is a Hub id or a folder. Its base is the one named in its port.json,
    finetune.json, adapter_config.json or card. Exits with 0 if none is outdated, with 3 if some are, and with 1 if any
    model failed.
    """
    if not (models or user or folder):
        raise click.UsageError("Missing models: name some, or use --user or --folder.")
    with status("starting"):
        from hf_retarget.successors import outdated
    with watch(quiet) as progress:
        found = outdated(models, user=user, folder=folder, token=token, progress=progress)
    if as_json:
        echo_json(found.to_json())
    else:
        print_table(("model", "base", "successor", "fits", "bases"), [_row(each) for each in found.findings], names=5)
        for each in found.findings:
            for line in (*([each.why] if each.why else []), *each.notes, *([each.error] if each.error else [])):
                echo(f"{each.model}: {line}")
        echo()
        for each in found.outdated:
            if each.command:
                echo(each.command)
        echo(f"{len(found.outdated)} of {plural(len(found.findings), 'model')} outdated")
    ctx.exit(1 if found.failed else SOME if found.outdated else 0)


def _row(each: Finding) -> tuple[str, ...]:
    def short(name: str | None, commit: str | None) -> str:
        return "–" if name is None else f"{name}@{commit[:8]}" if commit else name

    successor, _, commit = (each.successor or "").partition("@")
    fits = {True: "yes", False: "no", None: "–"}[each.fits]
    relation = each.relation.word if each.relation else "–"
    return each.model, short(each.base, each.revision), short(successor or None, commit), fits, relation
