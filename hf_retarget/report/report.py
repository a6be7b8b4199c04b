"""The report of a port: one page that tells a stranger within a minute what happened, and the figures as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_retarget.files import write_text
from hf_retarget.report import captions
from hf_retarget.report.chart import Chart
from hf_retarget.report.classes import (
    WORDS,
    class_names,
    draw_classes,
    draw_confusion,
    list_classes,
    list_confusions,
    ours,
    theirs,
)
from hf_retarget.report.curves import draw_cosines, draw_curve, draw_price
from hf_retarget.report.neurons import draw_batchnorm, draw_groups, draw_moved, draw_sweeps
from hf_retarget.report.page import percent, render
from hf_retarget.report.samples import draw_samples, list_samples
from hf_retarget.report.spent import draw_time
from hf_retarget.report.tables import (
    list_facts,
    list_inputs,
    list_options,
    list_step_columns,
    list_steps,
    list_tests,
    name_input,
    split_verdict,
)

Document = dict[str, Any]

_CHARTS: dict[str, Callable[[Document], Chart | None]] = {
    "curve": draw_curve,
    "price": draw_price,
    "gradients": draw_cosines,
    "moved": draw_moved,
    "groups": draw_groups,
    "sweeps": draw_sweeps,
    "batchnorm": draw_batchnorm,
    "classes": draw_classes,
    "confusion": draw_confusion,
    "time": draw_time,
}
_CAPTIONS: dict[str, Callable[[Document], str]] = {
    "curve": captions.caption_curve,
    "price": captions.caption_price,
    "gradients": captions.caption_cosines,
    "moved": captions.caption_moved,
    "groups": captions.caption_groups,
    "sweeps": captions.caption_sweeps,
    "batchnorm": captions.caption_batchnorm,
    "classes": captions.caption_classes,
}


@dataclass(frozen=True)
class Report:
    """A page, its figures as files, and what could not be drawn."""

    html: str = field(repr=False)
    charts: tuple[Chart, ...] = field(repr=False)
    graph: str | None = field(default=None, repr=False)
    problems: tuple[str, ...] = ()

    def save(self, folder: str | Path) -> None:
        """Write report.html and figures/."""
        for chart in self.charts:
            chart.save(Path(folder) / "figures")
        if self.graph:
            write_text(Path(folder) / "figures" / "graph.svg", self.graph)
        write_text(Path(folder) / "report.html", self.html)


def compose_report(
    document: Document, thumbnails: Mapping[int, bytes] | None = None, graph: str | None = None
) -> Report:
    """The report of a port, from what port.json says, small test images, and the permutation graph as SVG.

    A chart that cannot be drawn is left out and named: the page appears in any case.
    """
    problems: list[str] = []
    charts = {name: _attempt(name, partial(draw, document), problems) for name, draw in _CHARTS.items()}
    charts["samples"] = _attempt("samples", lambda: draw_samples(document, thumbnails or {}), problems)
    drawn = {name: chart for name, chart in charts.items() if chart is not None}
    words = {name: _attempt(name, partial(_CAPTIONS[name], document), problems) for name in drawn
             if name in _CAPTIONS}  # fmt: skip
    mark, verdict, kind = split_verdict(document["verdict"])
    names = {side: name_input(document["inputs"][side]) for side in ("source", "tuned", "target")}
    models = [name for name in (ours(document), theirs(document)) if name]
    html = render(
        "report.html",
        title=f"{document['inputs']['target']['architecture']}: a fine-tuning, ported to a new base",
        names=names,
        document=document,
        mark=mark,
        verdict=verdict,
        kind=kind,
        facts=list_facts(document),
        tests=list_tests(document),
        step_columns=list_step_columns(document),
        steps=list_steps(document),
        charts=charts,
        captions={name: text or "" for name, text in words.items()},
        class_columns=("class", *(WORDS[name] for name in models)),
        classes=[(name, *map(percent, shares[: len(models)])) for name, *shares in list_classes(document)],
        confusions=list_confusions(document),
        samples=list_samples(document, class_names(document), thumbnails or {}),
        inputs=list_inputs(document),
        options=list_options(document),
        graph=graph,
        problems=problems,
    )
    return Report(html, tuple(drawn.values()), graph, tuple(problems))


def _attempt(name: str, make: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return make()
    except Exception as error:  # a picture is no reason to lose a port; that it is missing is said
        problems.append(f"{name}: {type(error).__name__}: {error}")
        return None
