"""``hf-retarget compare``: compare several ports in a table and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from hf_retarget.cli.options import debug_option
from hf_retarget.cli.show import check_target, echo, echo_json, print_table, write_file
from hf_retarget.untrusted import plain

_EXAMPLE = """\b
Examples:
  hf-retarget compare ported-0/ ported-1/ ported-2/
  hf-retarget compare runs/ --html compare.html --csv compare.csv
  hf-retarget compare runs/*/ported --over tuned --over target --json
"""

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=_EXAMPLE)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option(
    "--over",
    multiple=True,
    metavar="FIELD",
    help="Also average over this field, as over seeds: tuned, target (the new base), data.seed …",
)
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page with the table and all curves.")
@click.option("--csv", "table", type=_FILE, metavar="FILE", help="Write a CSV file with one row per port.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@debug_option
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    folders: tuple[Path, ...],
    over: tuple[str, ...],
    html: Path | None,
    table: Path | None,
    as_json: bool,
) -> None:
    """Compare finished ports, grouped by what differs.

    Ports that differ only in their seeds form a group, of which mean and deviation are shown. A DIR is the folder of a
    port, or a folder of such folders. Unreadable ports are reported and left out, and the exit code is then 1.
    """
    check_target(html, ".html")
    check_target(table, ".csv")
    from hf_retarget.comparison import compare
    from hf_retarget.report.comparison import draw_comparison_page, list_runs, make_table

    found = compare(folders, over=over)
    document = found.to_json()
    for line in found.problems:
        echo(f"Left out: {line}", err=True)
    for line in found.warnings:
        echo(f"Warning: {line}", err=True)
    if as_json:
        echo_json(document)
    else:
        print_table(*make_table(document))
    if html:
        write_file(html, draw_comparison_page(document))
    if table:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(_as_text, list_runs(document)))
        write_file(table, text.getvalue())
    if found.problems:
        ctx.exit(1)


def _as_text(row: Iterable[Any]) -> list[Any]:
    """Keep spreadsheets and terminals from reading names in ports of strangers as formulas and commands."""
    texts = [plain(each) if isinstance(each, str) else each for each in row]
    return [f"'{each}" if isinstance(each, str) and each[:1] in ("=", "+", "-", "@") else each for each in texts]
