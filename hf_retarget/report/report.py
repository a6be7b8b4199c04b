"""The report of a port: one self-contained page, and its figures as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_retarget.advice import KEEP, choose_action, compare_times
from hf_retarget.contenders import PORT
from hf_retarget.document import ContenderFigures, PortDocument
from hf_retarget.files import write_text
from hf_retarget.names import SIDES
from hf_retarget.report import classes, figures
from hf_retarget.report.chart import Chart
from hf_retarget.report.page import render
from hf_retarget.words import duration, number, percent, plural, size

Row = tuple[str, ...]
_CONFUSIONS = 10  # maximum number of rows

_CHARTS: tuple[Callable[[PortDocument], Chart | None], ...] = (
    figures.draw_curve,
    figures.draw_price,
    figures.draw_gradients,
    figures.draw_moved,
    figures.draw_groups,
    figures.draw_sweeps,
    figures.draw_batchnorm,
    classes.draw_classes,
    classes.draw_confusion,
    figures.draw_time,
)


@dataclass(frozen=True)
class Report:
    """A page, its figures, and what could not be drawn."""

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
    """Compose the report of a port from its document, thumbnails of test images, and the permutation graph as SVG.

    A chart that cannot be drawn is left out and listed in `problems`.
    """
    problems: list[str] = []
    charts: dict[str, Chart | None] = {}
    drawings = {draw.__name__.removeprefix("draw_"): partial(draw, document) for draw in _CHARTS}
    for name, draw in (drawings | {"samples": partial(classes.draw_samples, document, thumbnails or {})}).items():
        try:
            charts[name] = draw()
        except Exception as error:  # a chart must not fail a port; the report lists the problem
            charts[name] = None
            problems.append(f"{name}: {type(error).__name__}: {error}")
    mark, verdict, kind = split_verdict(document.verdict)
    models = [each for each in (document.result, document.rival) if each]
    confusions = classes.list_confusions(document.result.test.confusion or (), document.data.class_names)
    html = render(
        "report.html",
        title=f"{document.models['target'].architecture}: a fine-tuning, ported to a new base",
        document=document,
        mark=mark,
        verdict=verdict,
        kind=kind,
        times=compare_times(document),
        keep=choose_action(document) == KEEP,
        facts=list_facts(document),
        tests=tabulate_tests(document),
        steps=tabulate_steps(document),
        charts=charts,
        class_columns=("class", *(each.row.label for each in models)),
        classes=[(name, *map(percent, shares[: len(models)])) for name, *shares in classes.list_classes(document)],
        confusions=confusions[:_CONFUSIONS],
        samples=classes.list_samples(document, thumbnails or {}),
        inputs=list_inputs(document),
        options=_flatten(document.recipe, ""),
        graph=graph,
        problems=problems,
    )
    return Report(html, tuple(chart for chart in charts.values() if chart), graph, tuple(problems))


def compose_summary(document: PortDocument) -> str:
    """The report of a port without images."""
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
        options=_flatten(document.recipe, ""),
    )


def describe_result(figures: ContenderFigures, document: PortDocument) -> str:
    """The label of a contender in a table of results, with its detail, best step or price."""
    if figures.detail:
        return f"{figures.row.label} ({figures.detail})"
    if figures.best_step:
        planned = f" of {document.steps_planned}" if figures.name == document.winner else ""
        return f"{figures.row.label} (best step {figures.best_step}{planned})"
    return (
        f"{figures.row.label} ({figures.gradients:,} minibatches)" if figures.row.is_alternative else figures.row.label
    )


# ---- texts and tables: verdict, scores, steps, inputs, options


def split_verdict(verdict: str) -> tuple[str, str, str]:
    """Split the verdict into its headline and the facts, and classify it as good, bad or open.

    Example:
        >>> split_verdict("Not worth it: 60.0% of 400 test images.")
        ('Not worth it', '60.0% of 400 test images.', 'bad')
    """
    mark, _, rest = verdict.partition(": ")
    kind = "good" if mark.startswith("Worth it") else "bad" if mark.startswith("Not") else "open"
    return mark, rest, kind


def list_facts(document: PortDocument) -> list[tuple[str, str, str]]:
    """The key test accuracies: figure, label, and name of the colour."""
    order = sorted(document.table, key=lambda each: (each.role != "after", each.role != "port"))
    shown = [each for each in order if each.row.drawn and (each.role != PORT or each.name == document.winner)]
    return [(percent(each.test.top1), each.row.label, each.name) for each in shown]


def tabulate_tests(document: PortDocument) -> tuple[Row, list[Row]]:
    """Columns and rows of the table of test scores."""
    table, also = document.table, document.also
    columns = {
        "on the test images": [describe_result(each, document) for each in table],
        "top-1" if document.labelled else "agreement": [percent(each.test.top1) for each in table],
        **({f"top-1, {also.name}": [percent(each.also.top1 if each.also else None) for each in table]} if also else {}),
        "top-5": [percent(each.test.top5) for each in table],
        "loss": [number(each.test.loss) for each in table],
        "validation": [percent(each.validation) for each in table],
        "flips −/+": ["–" if each.flips is None else "{:,} / {:,}".format(*each.flips) for each in table],
        "price": [f"{each.price:,.0f}" for each in table],
    }
    return tuple(columns), list(zip(*columns.values(), strict=True))


def tabulate_steps(document: PortDocument) -> tuple[Row, list[Row]]:
    """Columns and rows of the table of steps, of the port and the contenders it is compared with."""
    others = [each for each in figures.list_courses(document) if each is not document.trail]
    courses = [{step.step: step.top1 for step in each.steps} for each in others]
    rows = [
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
    return ("step", "way", "port", "loss", *(each.row.short for each in others), "moved", "sweeps", "time"), rows


def list_inputs(document: PortDocument) -> list[tuple[str, str]]:
    """The inputs (models with revisions and hashes, images) and the environment."""
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
        rows.append(("targets", document.targets))
    if document.relation:
        rows.append(("bases", document.relation.sentence))
    if document.gates:
        words = {None: "could not be checked", "": "fine"}
        lines = [f"{each.looks_at}: {words.get(each.found, each.found)}" for each in document.gates]
        rows.append(("checks", "\n".join(lines)))
    if graph:
        checked = (graph.get("check") or {}).get("verdict", "not checked")
        rows.append(("permutation graph", f"{graph['groups']} groups; {checked}\nfingerprint {graph['fingerprint']}"))
    rows.append(
        ("computed on", f"{device['type']}, {plural(device['processes'], 'process')}, precision {device['precision']}")
    )
    rows.append(("peak memory", size(document.peak_memory)))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in document.versions.items())))
    return rows


def _flatten(value: Any, name: str) -> list[Row]:
    """All non-empty fields of a recipe."""
    if isinstance(value, dict):
        return [row for key, each in value.items() for row in _flatten(each, f"{name}.{key}" if name else str(key))]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [(name, text)] if text not in ("null", "[]", "") else []
