"""How long work tells what it does: a protocol that the command line fills in, and silence by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Somebody who watches. Calls to `track` may be nested: the inner one is a part of an item of the outer."""

    def track(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """Yield the items, and show `doing` and how far it has come."""

    def say(self, line: str) -> None:
        """Show one line that stays."""

    def row(self, cells: Mapping[str, str], line: str) -> None:
        """Show one row of a table that grows: heading → text. Where there is no terminal, the line instead."""


class _Silent:
    def track(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        yield from items

    def say(self, line: str) -> None:
        pass

    def row(self, cells: Mapping[str, str], line: str) -> None:
        pass


SILENT: Progress = _Silent()
"""Nobody watches.

Example:
    >>> list(SILENT.track([1, 2], "counting"))
    [1, 2]
"""
