"""Printing of text, tables and JSON, without control characters from untrusted files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.errors import RetargetError
from hf_retarget.files import to_json, write_text
from hf_retarget.untrusted import plain
from hf_retarget.words import estimate, percent, plural

if TYPE_CHECKING:
    from hf_retarget.document import PortDocument
    from hf_retarget.recipe import Recipe

_BARS = "▁▂▃▄▅▆▇█"
_NO_LIMIT = 100_000  # columns of a table, unless shown on a terminal

Row = tuple[str, ...]


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text, with terminal escapes made visible.

    Example:
        >>> echo("class \\x1b[31mcat")
        class \\x1b[31mcat
    """
    click.echo(plain(text), err=err, nl=nl)


def echo_json(content: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(content))


def echo_rows(rows: Sequence[Row], width: int = 10) -> None:
    """Print pairs of a name and a text, one per line."""
    for name, words in rows:
        echo(f"{name:<{width}} {words}")


def print_table(columns: Row, rows: Sequence[Row], names: int = 1) -> None:
    """Print a table, with lines only on a terminal; the first `names` columns are text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if shown else None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        is_text = place < names
        table.add_column(
            Text(column.upper()), justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    Console(highlight=False, force_terminal=shown, width=None if shown else _NO_LIMIT).print(table)


def print_curves(document: PortDocument) -> None:
    """Print the validation accuracy of each contender by step, on stderr."""
    shown = [each for each in document.table if each.steps]
    width = max((len(each.row.short) for each in shown), default=0)
    for each in shown:
        bars = "".join(_BARS[round(step.top1 * (len(_BARS) - 1))] for step in each.steps)
        words = f"best {percent(each.validation)} on validation, {plural(len(each.steps), each.row.axis)}"
        echo(f"{each.row.short:<{width}}  {bars}  {words}", err=True)


def print_scores(document: PortDocument) -> None:
    """Print the test scores and prices of all contenders as a table."""
    from hf_retarget.report.report import tabulate_tests

    columns, rows = tabulate_tests(document)
    hidden = (
        {"validation"} if any(each.test.top5 is not None for each in document.contenders) else {"validation", "top-5"}
    )
    shown = [place for place, column in enumerate(columns) if column not in hidden]
    names = ["also" if columns[place].startswith("top-1, ") else columns[place] for place in shown]
    print_table(tuple(names), [tuple(row[place] for place in shown) for row in rows])


def check_target(path: Path | None, suffix: str) -> None:
    """Refuse to overwrite anything but an earlier file of the same kind."""
    if path is not None and path.exists() and (not path.is_file() or path.suffix != suffix):
        raise RetargetError(f"'{path}' exists and is not a {suffix} file; name another file")


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, with a message on a terminal."""
    write_text(path, text)
    if sys.stderr.isatty():
        echo(f"Wrote {path}", err=True)


def describe_time(seconds: float, unmatched: float | None) -> str:
    """The estimated time of a port, and what it is if nothing has to be matched."""
    whole = f"{estimate(seconds)}, plus the search for permutations"
    return whole if unmatched is None else f"{estimate(unmatched)}; if neurons have to be matched, {whole}"


def describe_inputs(folder: Path, recipe: Recipe) -> str:
    """A finished folder and its data, as arguments of the next command."""
    words = [str(folder), "--data", f"{folder}/recipe.yaml"]
    return shlex.join([*words, *(["--data-reference", hidden] if (hidden := hidden_data(recipe)) else [])])


def hidden_data(recipe: Recipe) -> str:
    """The location of the images, if it is a path, of which a finished folder has only the last part."""
    from hf_retarget.publish.contents import shorten_path

    reference = recipe.data.reference
    return "" if shorten_path(reference) == reference else reference


def describe_command(arguments: list[str]) -> str:
    """The given command line, without the token.

    Example:
        >>> describe_command(["/usr/bin/hf-retarget", "port", "--token", "hf_secret", "--token=hf_secret", "--steps=3"])
        'hf-retarget port --steps=3'
    """
    kept = [
        each
        for before, each in pairwise(arguments)
        if "--token" not in (before, each) and not each.startswith("--token=")
    ]
    return shlex.join(["hf-retarget", *kept])
