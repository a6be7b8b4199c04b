"""The report of a port: one page that tells a stranger within a minute what happened, and the figures as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_retarget.contenders import PORT
from hf_retarget.document import ContenderFigures, PortDocument
from hf_retarget.files import write_text
from hf_retarget.names import SIDES
from hf_retarget.report import captions
from hf_retarget.report.captions import describe_flips, describe_result
from hf_retarget.report.chart import Chart
from hf_retarget.report.classes import (
    draw_classes,
    draw_confusion,
    draw_samples,
    list_classes,
    list_confusions,
    list_samples,
)
from hf_retarget.report.figures import (
    draw_batchnorm,
    draw_cosines,
    draw_curve,
    draw_groups,
    draw_moved,
    draw_price,
    draw_sweeps,
    draw_time,
    list_courses,
)
from hf_retarget.report.page import render
from hf_retarget.words import duration, number, percent, plural, size

_CHARTS: dict[str, Callable[[PortDocument], Chart | None]] = {
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
_CAPTIONS: dict[str, Callable[[PortDocument], str]] = {
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
    document: PortDocument, thumbnails: Mapping[int, bytes] | None = None, graph: str | None = None
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
    mark, verdict, kind = split_verdict(document.verdict)
    models = [each for each in (document.result, document.rival) if each]
    html = render(
        "report.html",
        title=f"{document.models['target'].architecture}: a fine-tuning, ported to a new base",
        document=document,
        mark=mark,
        verdict=verdict,
        kind=kind,
        facts=list_facts(document),
        test_columns=list_test_columns(document),
        tests=list_tests(document),
        step_columns=list_step_columns(document),
        steps=list_steps(document),
        charts=charts,
        captions={name: text or "" for name, text in words.items()},
        class_columns=("class", *(each.row.label for each in models)),
        classes=[(name, *map(percent, shares[: len(models)])) for name, *shares in list_classes(document)],
        confusions=list_confusions(document),
        samples=list_samples(document, thumbnails or {}),
        inputs=list_inputs(document),
        options=list_options(document),
        graph=graph,
        problems=problems,
    )
    return Report(html, tuple(drawn.values()), graph, tuple(problems))


def compose_summary(document: PortDocument) -> str:
    """The page of a port for which nothing was scored on images."""
    mark, verdict, kind = split_verdict(document.verdict)
    text = document.text
    return render(
        "summary.html",
        title=f"{document.models['target'].architecture}: a fine-tuning, added to a new base",
        document=document,
        mark=mark,
        verdict=verdict,
        kind=kind,
        losses=[(SIDES.get(side, side), number(loss, 4)) for side, loss in text.losses.items()] if text else [],
        inputs=list_inputs(document),
        options=list_options(document),
    )


def _attempt(name: str, make: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return make()
    except Exception as error:  # a picture is no reason to lose a port; that it is missing is said
        problems.append(f"{name}: {type(error).__name__}: {error}")
        return None


# ---- what is no picture: verdict, scores, steps, inputs, options


def split_verdict(verdict: str) -> tuple[str, str, str]:
    """The verdict as a mark, the rest of the sentence, and whether it is good, bad or open.

    Example:
        >>> split_verdict("Not worth it: 60.0% of 400 test images.")
        ('Not worth it', '60.0% of 400 test images.', 'bad')
    """
    mark, _, rest = verdict.partition(": ")
    kind = "good" if mark.startswith("Worth it") else "bad" if mark.startswith("Not") else "open"
    return mark, rest, kind


def list_facts(document: PortDocument) -> list[tuple[str, str, str]]:
    """The test accuracies to see first: figure, words, and whose colour."""
    order = sorted(document.table, key=lambda each: (each.role != "after", each.role != "port"))
    shown = [each for each in order if each.row.drawn and (each.role != PORT or each.name == document.winner)]
    return [(percent(each.test.top1), each.row.label, each.name) for each in shown]


def list_test_columns(document: PortDocument) -> tuple[str, ...]:
    """The headings of the test scores."""
    also = (f"top-1, {document.also.name}",) if document.also else ()
    return (
        "on the test images",
        "top-1" if document.labelled else "agreement",
        *also,
        "top-5",
        "loss",
        "validation",
        "flips − / +",
        "price",
    )


def list_tests(document: PortDocument) -> list[tuple[str, ...]]:
    """All test scores."""
    return [
        (
            describe_result(each, document),
            percent(each.test.top1),
            *((percent(each.also.top1 if each.also else None),) if document.also else ()),
            percent(each.test.top5),
            number(each.test.loss),
            percent(each.validation),
            describe_flips(each),
            f"{each.price:,.0f}",
        )
        for each in document.table
    ]


def list_step_columns(document: PortDocument) -> tuple[str, ...]:
    """The headings of the steps."""
    return ("step", "way", "port", "loss", *(each.row.short for each in _others(document)), "moved", "sweeps", "time")


def list_steps(document: PortDocument) -> list[tuple[str, ...]]:
    """All steps of the port, and of what it is compared with."""
    courses = [{step.step: step.top1 for step in each.steps} for each in _others(document)]
    return [
        (
            f"{each.step}{' ★' if each.step == document.trail.best_step else ''}",
            percent(each.far, 0),
            percent(each.top1),
            number(each.loss),
            *(percent(course.get(each.step)) for course in courses),
            percent(each.moved, 0),
            str(each.sweeps),
            duration(sum(each.seconds.values())),
        )
        for each in document.trail.steps
    ]


def _others(document: PortDocument) -> list[ContenderFigures]:
    return [each for each in list_courses(document) if each is not document.trail]


def list_inputs(document: PortDocument) -> list[tuple[str, str]]:
    """What went in: models, their revisions and hashes, images; and what made the result."""
    rows = []
    for side, each in document.models.items():
        lines = [each.name, each.architecture]
        lines += [f"revision {each.revision}"] if each.revision else []
        lines += [f"{file} sha256 {value}" for file, value in each.hashes.items()]
        rows.append((SIDES.get(side, side), "\n".join(lines)))
    data, graph, device = document.data, document.graph, document.device
    if data.images:
        images = ", ".join(f"{count:,} {split}" for split, count in data.images.items())
        told = [data.name, f"{data.classes} classes; images: {images}", data.made, f"fingerprint {data.fingerprint}"]
        rows.append(("images", "\n".join([*told, *([f"revision {data.revision}"] if data.revision else [])])))
        rows.append(("head", f"{document.head['policy']} ({document.head['why']})"))
        rows.append(("aimed at", document.targets))
    if document.relation:
        rows.append(("bases", document.relation.sentence))
    if document.gates:
        words = {None: "could not be seen", "": "fine"}
        lines = [f"{each.looks_at}: {words.get(each.found, each.found)}" for each in document.gates]
        rows.append(("looked at first", "\n".join(lines)))
    if graph:
        checked = (graph.get("check") or {}).get("verdict", "not checked")
        rows.append(("permutation graph", f"{graph['groups']} groups; {checked}\nfingerprint {graph['fingerprint']}"))
    rows.append(
        ("computed on", f"{device['type']}, {plural(device['processes'], 'process')}, precision {device['precision']}")
    )
    rows.append(("peak memory", size(document.peak_memory)))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in document.versions.items())))
    return rows


def list_options(document: PortDocument) -> list[tuple[str, str]]:
    """Every field of the recipe."""
    return [(name, value) for name, value in _flat(document.recipe, "") if value not in ("null", "[]", "")]


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, each in value.items() for row in _flat(each, f"{name}.{key}" if name else str(key))]
    return [(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]
