"""Pages and pictures from templates: one file each, with style and script inside, that needs no network."""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.report.chart import clean
from hf_retarget.report.palette import all_colours
from hf_retarget.words import duration, number, percent, size

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, /, **values: Any) -> str:
    """Fill in a template of `templates/`. All values are escaped, except an SVG of this package marked as `safe`.

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


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """An image as a data URI.

    Example:
        >>> data_uri(b"ab")
        'data:image/png;base64,YWI='
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
