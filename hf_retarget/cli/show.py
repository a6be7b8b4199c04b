"""What a command prints: plain text on stdout or stderr, one JSON document, and no control characters of strangers."""

from __future__ import annotations

from typing import Any

import click

from hf_retarget.files import to_json
from hf_retarget.untrusted import plain


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text; names from files of strangers may hold terminal escapes, which become visible.

    Example:
        >>> echo("class \\x1b[31mcat")
        class \\x1b[31mcat
    """
    click.echo(plain(text), err=err, nl=nl)


def echo_json(content: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(content))
