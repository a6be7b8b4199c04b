"""Pages: one HTML file each, with style and script inside, that needs nothing else and no network."""

from __future__ import annotations

import base64
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.report.chart import Chart, clean

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, /, **values: Any) -> str:
    """Fill in a template of `templates/`. All text is escaped, wherever it comes from.

    Example:
        >>> "<title>a &lt; b</title>" in render("base.html", title="a < b")
        True
    """
    return clean(_environment().get_template(template).render(**values))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "duration": duration,
        "size": size,
        "drawn": _drawn,
        "trusted": _trusted,
        "data_uri": data_uri,
    }
    environment.globals["file"] = _file
    return environment


def _drawn(chart: Chart) -> Markup:
    from markupsafe import Markup

    return Markup(chart.inline)  # matplotlib and ElementTree have escaped it


def _trusted(svg: str) -> Markup:
    """An SVG that this package drew, and so has escaped."""
    from markupsafe import Markup

    return Markup(svg)


def _file(name: str) -> Markup:
    """A file of ours, put into the page as it is: the style sheet and the script."""
    from markupsafe import Markup

    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """A picture as an address that holds it.

    Example:
        >>> data_uri(b"ab")
        'data:image/png;base64,YWI='
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as people read it.

    Example:
        >>> percent(0.1234), percent(None)
        ('12.3%', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


def number(value: float | None, digits: int = 3) -> str:
    """A number, short.

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


def size(count: int | None) -> str:
    """Bytes as people read them.

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
