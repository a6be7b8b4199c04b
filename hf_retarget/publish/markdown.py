"""Text of others in Markdown: shown as it is, whatever is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable


def plain(text: object) -> str:
    """Text that neither Markdown nor HTML nor a table takes for anything but text, on one line.

    Example:
        >>> print(plain("a|b <script> *Käfer* 🐞"))
        a\\|b &lt;script&gt; \\*Käfer\\* 🐞
    """
    words = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(words, quote=False))


def fenced(text: str, language: str = "") -> list[str]:
    """Lines of a block of code that the text cannot leave.

    Example:
        >>> fenced("a ``` b")
        ['````', 'a ``` b', '````', '']
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table; the cells are Markdown already.

    Example:
        >>> table(("a", "b"), [("1", "2")])
        ['| a | b |', '|---|---|', '| 1 | 2 |', '']
    """
    names = list(head)
    return [_row(names), "|" + "---|" * len(names), *(_row(row) for row in rows), ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
