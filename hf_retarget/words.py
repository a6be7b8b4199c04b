"""Formatting of numbers, sizes, durations and names for people: in the terminal, reports and cards."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage.

    Example:
        >>> percent(0.1234), percent(None)
        ('12.3%', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


def number(value: float | None, digits: int = 3) -> str:
    """A number, rounded.

    Example:
        >>> number(0.12345), number(12345), number(None)
        ('0.123', '12,345', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """How long something took.

    Example:
        >>> duration(0.24), duration(75), duration(7300)
        ('0.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def estimate(seconds: float) -> str:
    """About how long something will take.

    Example:
        >>> estimate(3), estimate(200), estimate(20_000)
        ('about 3 s', 'about 3 min', 'about 5.6 h')
    """
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


def size(count: int | None) -> str:
    """A number of bytes.

    Example:
        >>> size(1_500_000), size(None)
        ('1.5 MB', '–')
    """
    if count is None:
        return "–"
    for unit, limit in (("kB", 1e6), ("MB", 1e9)):
        if count < limit:
            return f"{count / limit * 1000:.1f} {unit}"
    return f"{count / 1e9:.1f} GB"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    Example:
        >>> plural(1, "image"), plural(1200, "image")
        ('1 image', '1,200 images')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def nearest(name: object, names: Iterable[str], most: int = 1) -> str:
    """The end of a message about an unknown name: up to `most` similar names, or nothing.

    Example:
        >>> nearest("stpes", ["steps", "seed"]), nearest("head", ["heads", "hea"], 2)
        ("; did you mean 'steps'?", "; did you mean 'heads' or 'hea'?")
    """
    found = difflib.get_close_matches(str(name), list(names), n=most)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def shorten_names(names: Iterable[str]) -> list[str]:
    """Shorten paths to as many trailing parts as tell them apart; number equal ones.

    Example:
        >>> shorten_names(["runs/1/tuned", "runs/2/tuned", "timm/resnet18.a1_in1k"])
        ['1/tuned', '2/tuned', 'timm/resnet18.a1_in1k']
        >>> shorten_names(["old/", "old/"])
        ['old', 'old (2)']
    """
    texts = [name.rstrip("/") for name in names]
    parts = [text.split("/") for text in texts]
    length = 1
    while length < max(map(len, parts), default=1) and len({tuple(each[-length:]) for each in parts}) < len(set(texts)):
        length += 1
    short: list[str] = []
    for each in parts:
        name = "/".join(each[-length:]) or "/"
        same = sum(other == name or other.startswith(f"{name} (") for other in short)
        short.append(f"{name} ({same + 1})" if same else name)
    return short
