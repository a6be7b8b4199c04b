"""Charts drawn by matplotlib, saved as SVG and PNG, and embedded in pages with tooltips and the page's colours."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from hf_retarget.files import atomic_path
from hf_retarget.report.page import COLOURS, all_colours, clean

if TYPE_CHECKING:
    from matplotlib.artist import Artist

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_FONT = "DejaVu Sans"  # comes with matplotlib, so pictures are the same everywhere

_DPI = 130  # of a PNG

_STYLE: dict[Any, Any] = {
    "font.family": [_FONT],
    "font.size": 9.5,
    "text.color": COLOURS["text"],
    "axes.edgecolor": COLOURS["line"],
    "axes.facecolor": "none",
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.5,
    "figure.facecolor": COLOURS["bg"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
    "figure.dpi": 72,
    "svg.fonttype": "none",  # keeps text small, accessible and searchable
}


@dataclass(frozen=True)
class Chart:
    """A finished chart."""

    name: str
    """The name of its files, and the prefix of its ids."""
    alt: str
    """The text alternative."""
    svg: str = field(repr=False)
    png: bytes = field(repr=False)
    inline: str = field(repr=False)
    """The SVG for embedding in a page, with tooltips and the page's colours."""
    caption: str = ""
    """What it shows, and how to read it."""

    def save(self, folder: str | Path) -> None:
        """Write NAME.svg and NAME.png."""
        for ending, content in (("svg", self.svg.encode()), ("png", self.png)):
            with atomic_path(Path(folder) / f"{self.name}.{ending}") as temporary:
                temporary.write_bytes(content)


class Drawing:
    """A chart under construction: matplotlib axes in our style, and tooltips.

    With several `panels` side by side, `axes` is the first of them.

    Example:
        >>> drawing = Drawing("curve")
        >>> line = drawing.axes.plot([1, 2, 3], [0.1, 0.4, 0.5], color=COLOURS["accent"])
        >>> drawing.columns({1: "step 1: 10%", 2: "step 2: 40%", 3: "step 3: 50%"})
        >>> "step 2: 40%" in drawing.finish("Accuracy rises from 10% to 50%.").inline
        True
    """

    def __init__(self, name: str, width: float = 5.0, height: float = 3.3, panels: int = 1) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self.name = name
        self._tips: dict[str, str] = {}
        with rc_context(_STYLE):
            self.figure = Figure(figsize=(width, height), layout="constrained")
            self.panels: list[Any] = list(self.figure.subplots(1, panels, squeeze=False)[0])
        self.axes = self.panels[0]

    def tip(self, artist: Artist, text: str) -> None:
        """Set the tooltip of `artist`, shown on hovering and with the arrow keys."""
        key = f"tip{len(self._tips)}"
        artist.set_gid(key)
        self._tips[key] = text

    def columns(self, tips: Mapping[float, str], axes: Any = None) -> None:
        """Set a tooltip for each position on the x axis."""
        self._strips((axes or self.axes).axvspan, tips)

    def rows(self, tips: Mapping[float, str]) -> None:
        """Set a tooltip for each position on the y axis."""
        self._strips(self.axes.axhspan, tips)

    def _strips(self, draw: Callable[..., Artist], tips: Mapping[float, str]) -> None:
        # Strips end half-way to the neighbours; the outermost ones are symmetric.
        places = sorted(tips)
        if places:
            one, other = (places[1], places[-2]) if len(places) > 1 else (places[0] + 1, places[0] - 1)
            beyond = [2 * places[0] - one, *places, 2 * places[-1] - other]
            middles = [(low + high) / 2 for low, high in pairwise(beyond)]
            for place, (low, high) in zip(places, pairwise(middles), strict=True):
                self.tip(draw(low, high, facecolor=COLOURS["line"], alpha=0.004, linewidth=0), tips[place])

    def label(
        self, x: str = "", y: str = "", *, percents: str = "", counts: str = "", thousands: str = "", legend: int = 2
    ) -> None:
        """Label the axes, and add a legend with this many columns below the chart, or none.

        The axes in `percents`, `counts` and `thousands` ("x", "y" or both) show percentages with decimals only if
        needed, whole numbers, or large numbers.
        """
        from matplotlib import rc_context
        from matplotlib.ticker import MaxNLocator

        self.axes.set(xlabel=x, ylabel=y)
        for axis in percents:
            getattr(self.axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        for axis in counts:
            getattr(self.axes, f"{axis}axis").set_major_locator(MaxNLocator("auto", integer=True))
        for axis in thousands:
            getattr(self.axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{value:,.0f}")
        if legend:
            with rc_context(_STYLE):
                self.figure.legend(loc="outside lower center", ncols=legend, fontsize=9, handlelength=2.6)

    def finish(self, alt: str, caption: str = "") -> Chart:
        """Render, with reproducible bytes."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.text import Text

        svg, png = io.StringIO(), io.BytesIO()
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)  # a label may contain a dollar sign
            text.set_text(clean(text.get_text()))
        with rc_context(_STYLE | {"svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has other fonts
            # Not savefig, which lays out and draws twice for each format.
            layout: Any = self.figure.get_layout_engine()
            layout.execute(self.figure)
            self.figure.set_layout_engine("none")
            canvas: Any = FigureCanvasSVG(self.figure)
            canvas.print_svg(svg, metadata={"Date": None, "Creator": None})
            self.figure.set_dpi(_DPI)
            canvas = FigureCanvasAgg(self.figure)
            canvas.print_png(png, metadata={"Software": None})
        root = ElementTree.fromstring(clean(svg.getvalue()))
        for each in root.findall(f"{{{_SVG}}}metadata"):
            root.remove(each)
        _prefix_ids(root, f"{self.name}-")
        for node in root.iter(f"{{{_SVG}}}g"):
            if tip := self._tips.get(node.get("id", "").removeprefix(f"{self.name}-")):
                node.set("class", "spot")
                _add_title(node, clean(tip))
        title = _add_title(root, clean(alt))
        whole = _to_text(root)
        root.remove(title)  # which browsers would show all over the chart
        return Chart(self.name, clean(alt), whole, png.getvalue(), _make_part(root, clean(alt)), caption)


def _prefix_ids(root: ElementTree.Element, prefix: str) -> None:
    # Several charts share a page, and matplotlib numbers each from one.
    for node in root.iter():
        for key, value in node.attrib.items():
            if key == "id":
                node.set(key, prefix + value)
            elif key in ("href", f"{{{_XLINK}}}href") and value.startswith("#"):
                node.set(key, f"#{prefix}{value[1:]}")
            elif "url(#" in value:
                node.set(key, value.replace("url(#", f"url(#{prefix}"))


def _add_title(node: ElementTree.Element, text: str) -> ElementTree.Element:
    title = ElementTree.Element(f"{{{_SVG}}}title")
    title.text = text
    node.insert(0, title)
    return title


def _to_text(root: ElementTree.Element) -> str:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _make_part(root: ElementTree.Element, alt: str) -> str:
    """The chart for embedding in a page, with CSS variables for colours and without a fixed size."""
    names = {light: name for name, (light, _) in reversed(all_colours().items())}  # the first name of a colour wins
    paint = re.compile("|".join(names))
    for parent in list(root.iter()):
        for sheet in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(sheet)  # it would apply to the whole page; style.css has the same rules
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    wide = f"--width:{float(root.attrib['viewBox'].split()[2]) / 12:g}rem"  # on a phone, as wide as its letters need
    root.attrib.update({"aria-label": alt, "class": "chart", "role": "img", "style": wide, "tabindex": "0"})
    for node in root.iter():
        if style := node.get("style"):
            style = style.replace(f"'{_FONT}'", "system-ui").replace(_FONT, "system-ui")
            node.set("style", paint.sub(lambda found: f"var(--{names[found.group()]})", style))
    return _to_text(root)
