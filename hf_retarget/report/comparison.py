"""Pages about several ports: the comparison page, and the page of `port-all`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_retarget import __version__
from hf_retarget.contenders import Asked, Contender, contenders, find_contender
from hf_retarget.names import SIDES
from hf_retarget.report.chart import Chart, Drawing
from hf_retarget.report.page import COLOURS, clean, render
from hf_retarget.words import duration, percent, plural

Document = Mapping[str, Any]
"""The JSON document of a comparison (or of `port-all`)."""
Curve = Sequence[Sequence[float]]

_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("", "o", "s", "^")
_NAME = 30  # maximum length of group names in a chart; otherwise groups are numbered


def describe_spread(spread: Mapping[str, Any] | None, kind: str = "percent") -> str:
    """Format mean and deviation, which is left out for a single run or if all runs agree.

    Example:
        >>> describe_spread({"mean": 0.61, "deviation": 0.012, "count": 3})
        '61.0 ± 1.2%'
        >>> describe_spread({"mean": 7.5, "deviation": None, "count": 1}, "number"), describe_spread(None)
        ('7.5', '–')
    """
    if spread is None:
        return "–"
    mean, deviation = spread["mean"], spread["deviation"]
    if kind == "percent":
        return percent(mean) if not deviation else f"{100 * mean:.1f} ± {100 * deviation:.1f}%"
    if kind == "seconds":
        return duration(mean) if not deviation else f"{duration(mean)} ± {duration(deviation)}"
    words = f"{mean:,.1f}".removesuffix(".0")
    return f"{words} ± {deviation:,.1f}" if deviation else words


def make_table(document: Document) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and rows of the table of groups; names are preceded by their number if charts use it."""
    shown, rows = _shown(document), []
    for label, group in zip(_labels(document), document["groups"], strict=True):
        rows.append(
            (
                group["name"] if group["name"] == label else f"{label}: {group['name']}",
                str(len(group["runs"])),
                describe_spread(group["port"]),
                *(describe_spread(group["top1"].get(name)) for name in shown),
                describe_spread(group["best_step"], "number"),
                describe_spread(group["minibatches"], "number"),
                describe_spread(group["seconds"], "seconds"),
            )
        )
    columns = (find_contender(name).short for name in shown)
    return ("group", "runs", "port", *columns, "best step", "minibatches", "time"), rows


def list_runs(document: Document) -> list[tuple[str, ...]]:
    """A table of all runs for spreadsheets; the first row names the columns."""
    beside = _beside(document)
    head = ("port", "group", "method", "top1 port", *(f"top1 {name}" for name in beside), "best step", "minibatches",
            "seconds", "port seed", "fine-tuning seed")  # fmt: skip
    rows = [
        (
            run["folder"],
            group["name"],
            run["winner"],
            str(run["top1"][run["winner"]]),
            *(str(run["top1"].get(name, "")) for name in beside),
            *(str(run[name]) for name in ("best_step", "minibatches", "seconds")),
            *(str(seed) for seed in run["seeds"].values()),
        )
        for group in document["groups"]
        for run in group["runs"]
    ]
    return [head, *rows]


def _labels(document: Document) -> list[str]:
    """Labels of groups in charts: their names, or numbers if a name is long."""
    names = [clean(group["name"]) for group in document["groups"]]
    return names if max(map(len, names)) <= _NAME else [str(number) for number in range(1, len(names) + 1)]


def _beside(document: Document) -> list[str]:
    """The contenders other than the ports themselves, which share one column whatever their method."""
    runs = [run for group in document["groups"] for run in group["runs"]]
    return [name for name in document["scores"] if any(name in run["top1"] and name != run["winner"] for run in runs)]


def _shown(document: Document) -> list[str]:
    """The contenders with a column: those in charts that are compared with a port."""
    return [name for name in _beside(document) if find_contender(name).drawn]


def draw_comparison_page(document: Document) -> str:
    """The page of a comparison: table, test accuracies and curves of all ports."""
    shown, (columns, rows) = _shown(document), make_table(document)
    runs = [
        (
            run["name"],
            label,
            percent(run["top1"][run["winner"]]),
            *(percent(run["top1"].get(name)) for name in shown),
            run["best_step"],
        )
        for label, group in zip(_labels(document), document["groups"], strict=True)
        for run in group["runs"]
    ]
    winner, reasons, clear = name_winner(document)
    best = max(range(len(rows)), key=lambda place: document["groups"][place]["port"]["mean"])
    return render(
        "comparison.html",
        wide=True,
        winner=winner,
        reasons=reasons,
        clear=clear,
        best=best if len(rows) > 1 else -1,
        colours=dict(enumerate(shown, start=3)),
        title=f"{plural(len(runs), 'port')} compared",
        version=__version__,
        document=document,
        differing=[SIDES.get(name, name).replace("_", " ") for name in document["differing"]],
        columns=columns,
        rows=[tuple(cell.replace(" ± ", "\u00a0±\u00a0") for cell in row) for row in rows],
        run_columns=("run", "group", "port", *(find_contender(name).short for name in shown), "best step"),
        runs=runs,
        charts={
            "scores": draw_scores(document),
            "curves": draw_curves(document),
            "prices": draw_prices(document),
        },
    )


def draw_port_all_page(document: Document) -> str:
    """The page of `port-all`: what to do with each model, figures and links."""
    models = document["models"]
    shown = list_shown(models)
    counts = Counter(each["action"] or each["status"] for each in models)
    return render(
        "port_all.html",
        title=f"{plural(len(models), 'fine-tuning')} on a new base",
        version=__version__,
        document=document,
        counts=counts.most_common(),
        columns=[find_contender(name).short for name in shown],
        shown=shown,
    )


def list_shown(models: Sequence[Document]) -> list[str]:
    """The contenders with a column in the table of `port-all`."""
    return [each.name for each in contenders() if each.drawn and any(each.name in one["top1"] for one in models)]


def name_winner(document: Document) -> tuple[str, str, bool]:
    """The best group, the reasons, and whether its lead exceeds twice the deviation between runs."""
    if unlike := [each for each in document.get("warnings", ()) if each.startswith("different ")]:
        return "No winner", f"{unlike[0]}.", False
    ranked = sorted(document["groups"], key=lambda group: -group["port"]["mean"])
    first, beside = ranked[0], [each for each in contenders() if each.is_original or each.is_alternative]
    facts = [f"{first['name']}: {describe_spread(first['port'])} on the test images"]
    lead, deviation = 0.0, first["port"]["deviation"] or 0.0
    if len(ranked) > 1:
        second = ranked[1]
        lead = first["port"]["mean"] - second["port"]["mean"]
        deviation = max(deviation, second["port"]["deviation"] or 0.0)
        facts.append(f"{100 * lead:+.1f} points against the next, {second['name']}")
    for row in beside:
        if other := first["top1"].get(row.name):
            facts.append(f"{100 * (first['port']['mean'] - other['mean']):+.1f} points against {row.label}")
    ahead = lead > 2 * deviation
    if not deviation and len(ranked) > 1:
        facts.append("there are too few runs to estimate their deviation")
    label = first["name"] if len(first["name"]) <= _NAME else f"group {document['groups'].index(first) + 1}"
    return (
        (f"Best: {label}" if ahead or len(ranked) == 1 else "No clear winner"),
        "; ".join(facts) + ".",
        bool(ahead and deviation),
    )


def draw_scores(document: Document) -> Chart:
    """Test accuracies by group: a marker for the mean, a bar for the deviation, a stroke for each run."""
    groups = document["groups"]
    ports = {run["winner"] for group in groups for run in group["runs"]}
    names = [name for name in document["scores"] if find_contender(name).drawn]
    names.sort(key=lambda name: name not in ports)
    drawing = Drawing("scores", 6.8, 1.5 + 0.24 * len(names) * len(groups) + 0.25 * len(groups))
    axes, tips, ticks, height = drawing.axes, dict[float, str](), [], 0.0
    unnamed = set(names)
    for group in groups:
        start = height
        if start:
            axes.axhline(start - 1, color=COLOURS["line"], linewidth=0.8)
        for name in (each for each in names if each in group["top1"]):
            spread, row = group["top1"][name], find_contender(name)
            values = [run["top1"][name] for run in group["runs"] if name in run["top1"]]
            paint, label = row.colours[0], row.short if name in unnamed else None
            unnamed.discard(name)
            axes.plot(values, [height] * len(values), "|", color=paint, markersize=7, alpha=0.6)
            axes.errorbar(spread["mean"], height, xerr=spread["deviation"] or 0, color=paint, marker=row.marker,
                          linestyle="none", markersize=6, elinewidth=1.4, capsize=2.5, label=label)  # fmt: skip
            tips[height] = f"{group['name']}\n{row.short}: {describe_spread(spread)}, {plural(spread['count'], 'run')}"
            height += 1
        ticks.append((start + height - 1) / 2)
        height += 1
    axes.axvline(document["chance"], color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance")
    axes.set_yticks(ticks, _labels(document))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(height - 0.5, -0.9)
    axes.set_xlim(left=0)
    drawing.rows(tips)
    drawing.label("accuracy on the test images", percents="x", legend=4)
    words = [
        f"{group['name']}: "
        + ", ".join(f"{find_contender(name).short} {describe_spread(group['top1'].get(name))}" for name in names)
        for group in groups
    ]
    return drawing.finish("; ".join(words))


def draw_curves(document: Document) -> Chart:
    """Validation accuracy along the fine-tuning, in the winner's colour: thick for a group's mean, thin for a run."""
    groups = document["groups"]
    same = len({run["steps"] for group in groups for run in group["runs"]}) == 1
    drawing = Drawing("curves", 6.8, 4.0)
    tips: dict[float, str] = {}
    for number, (group, label) in enumerate(zip(groups, _labels(document), strict=True)):
        style = _style(number, find_contender(group["runs"][0]["winner"]))
        units = [1 if same else max(1, run["steps"]) for run in group["runs"]]
        curves = [
            [(at / unit, top1) for at, top1 in run["curve"]] for run, unit in zip(group["runs"], units, strict=True)
        ]
        mean = [(at / units[0], top1) for at, top1 in group["curve"]]
        _add_lines(drawing, curves, mean, label=label, **style)
        for at, top1 in mean:
            heading = f"step {at:g}" if same else f"{at:.0%} of the way"
            tips[at] = f"{tips.get(at, heading)}\n{group['name']}: {percent(top1)}"
    drawing.axes.axhline(document["chance"], color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance")
    drawing.axes.set_ylim(bottom=0)
    drawing.columns(tips)
    if same:
        drawing.label("step along the fine-tuning", "validation accuracy", percents="y", counts="x", legend=3)
    else:
        drawing.label("share of the fine-tuning", "validation accuracy", percents="xy", legend=3)
    ends = "; ".join(f"{group['name']} ends at {percent(group['curve'][-1][1])}" for group in groups if group["curve"])
    return drawing.finish(f"Validation accuracy along the fine-tuning, mean of each group: {ends}.")


def draw_prices(document: Document) -> Chart | None:
    """Validation accuracy over training images, of fine-tuning after the port and of plain fine-tuning."""
    groups = document["groups"]
    paid = [each for each in contenders() if each.is_alternative or each.after(Asked("", trains_after=True))]
    if not any(group["curves"].get(each.name) for group in groups for each in paid):
        return None
    drawing = Drawing("prices", 6.8, 4.0)
    tips: dict[float, str] = {}
    for number, (group, label) in enumerate(zip(groups, _labels(document), strict=True)):
        for row in (each for each in paid if each.name in group["curves"]):
            curves = [run["curves"][row.name] for run in group["runs"] if row.name in run["curves"]]
            mean, words = group["curves"][row.name], f"{label}: {row.short}"
            _add_lines(drawing, curves, mean, label=words, **_style(number, row))
            for at, top1 in mean:
                tips[at] = f"{tips.get(at, f'after {at:,.0f} images')}\n{words}: {percent(top1)}"
    drawing.axes.set_ylim(bottom=0)
    drawing.columns(tips)
    drawing.label("training images that went into gradients", "validation accuracy", percents="y", thousands="x")
    return drawing.finish(
        "Validation accuracy over training images: fine-tuning after the port, and plain fine-tuning."
    )


def _style(number: int, row: Contender) -> dict[str, Any]:
    """The line style of a contender in a group: the contender's colour, and a dash pattern of the group."""
    cycle, place = divmod(number, len(_STYLES))
    return {"color": row.colours[0], "linestyle": _STYLES[place], "marker": _MARKERS[cycle % len(_MARKERS)]}


def _add_lines(drawing: Drawing, runs: Sequence[Curve], mean: Curve, label: str, **style: Any) -> None:
    """A thin line for each run, and a thick one for their mean."""
    for curve in runs:
        drawing.axes.plot(*zip(*curve, strict=True), **style, linewidth=0.8, alpha=0.5)
    drawing.axes.plot(*zip(*mean, strict=True), **style, linewidth=2.6, label=label)
