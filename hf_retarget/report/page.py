"""Rendering of self-contained HTML pages from templates, and the colours of pages, pictures and charts."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.contenders import contenders
from hf_retarget.untrusted import CONTROL
from hf_retarget.words import duration, number, percent, size

if TYPE_CHECKING:
    from jinja2 import Environment

# XML forbids most control characters even when escaped, but labels may contain them.
_FORBIDDEN = re.compile(f"{CONTROL.pattern}|[\ufffe\uffff]")


def render(template: str, /, **values: Any) -> str:
    """Render a template of `templates/`. All values are escaped, except SVG marked as `safe`.

    Example:
        >>> "<title>a &lt; b</title>" in render("base.html", title="a < b")
        True
    """
    return clean(_environment().get_template(template).render(palette=all_colours(), **values))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number, "duration": duration, "size": size}
    return environment


def clean(text: str, longest: int | None = None) -> str:
    """Remove control characters and direction marks from a text, and shorten it in the middle if it is too long.

    Example:
        >>> clean("a very long name", longest=9)
        'a ve…name'
    """
    text = _FORBIDDEN.sub("�", text)
    if longest is None or len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[-half:]}"


# ---- colours

PALETTE: dict[str, tuple[str, str]] = {
    # ground, text and lines
    "bg": ("#ffffff", "#14171c"),
    "band": ("#f5f6f9", "#1d222a"),
    "text": ("#1f2430", "#e6e9ef"),
    "muted": ("#5b6472", "#a3acba"),
    "line": ("#c3c9d3", "#465061"),
    "link": ("#1d4ed8", "#93c5fd"),
    # charts that do not compare models: the subject, its comparison, and a third series
    "accent": ("#2563eb", "#60a5fa"),
    "other": ("#c2410c", "#fb923c"),
    "third": ("#7c3aed", "#b794f6"),
    # verdicts
    "good": ("#15803d", "#4ade80"),
    "bad": ("#b91c1c", "#f87171"),
    "open": ("#a16207", "#facc15"),
    # groups of neurons: by role, in four shades to distinguish neighbours
    "stream0": ("#2563eb", "#60a5fa"),
    "stream1": ("#0891b2", "#22d3ee"),
    "stream2": ("#4f46e5", "#818cf8"),
    "stream3": ("#0f766e", "#2dd4bf"),
    "inner0": ("#ea580c", "#fb923c"),
    "inner1": ("#b7791f", "#eab308"),
    "inner2": ("#c2410c", "#f97316"),
    "inner3": ("#a16207", "#facc15"),
    "segment0": ("#15803d", "#4ade80"),
    "segment1": ("#4d7c0f", "#a3e635"),
    "segment2": ("#059669", "#34d399"),
    "segment3": ("#65a30d", "#84cc16"),
    "head0": ("#6d28d9", "#a78bfa"),
    "head1": ("#a855f7", "#c084fc"),
    "head2": ("#d946ef", "#e879f9"),
    "head3": ("#8b5cf6", "#8b7bf0"),
    # groups of neurons: by the gain from matching
    "gain0": ("#94a3b8", "#64748b"),
    "gain1": ("#f59e0b", "#b45309"),
    "gain2": ("#ea580c", "#fb923c"),
    "gain3": ("#c026d3", "#e879f9"),
    "gain4": ("#4f46e5", "#a5b4fc"),
    # other parts of a graph picture
    "lead": ("#9aa3b2", "#667085"),
    "pin": ("#8b93a1", "#7d8694"),
    "box": ("#f3ecff", "#271f3a"),
}
"""Name -> (light, dark). Pages define these as CSS variables (``var(--accent)``) by the macro ``variables``.

Charts use the light value; in a page it becomes the variable of the first name with this value.
"""

COLOURS = {name: light for name, (light, _) in PALETTE.items()}


def all_colours() -> dict[str, tuple[str, str]]:
    """The colours of all contenders by name, and the palette."""
    return {each.name: each.colours for each in contenders()} | PALETTE
