"""The page that puts several ports beside each other: one table, and their curves over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_retarget.contenders import Asked, contenders, find_contender
from hf_retarget.report.chart import COLOURS, Chart, Drawing, clean
from hf_retarget.report.page import render
from hf_retarget.words import duration, percent, plural

Document = Mapping[str, Any]

_PAINTS = ("accent", "other", "stream3", "third", "inner3", "head2")
_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_NAME = 30  # letters of a group's name in a chart; if one has more, the groups are numbered there


def describe_spread(spread: Mapping[str, Any] | None, kind: str = "percent") -> str:
    """Mean and, if there are several runs, deviation.

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
        return percent(mean) if deviation is None else f"{100 * mean:.1f} ± {100 * deviation:.1f}%"
    if kind == "seconds":
        return duration(mean) if deviation is None else f"{duration(mean)} ± {duration(deviation)}"
    words = f"{mean:,.1f}".removesuffix(".0")
    return words if not deviation else f"{words} ± {deviation:,.1f}"


def list_columns(document: Document) -> tuple[str, ...]:
    """The headings of the table."""
    return (
        "group",
        "runs",
        "port",
        *(find_contender(name).short for name in _shown(document)),
        "best step",
        "minibatches",
        "time",
    )


def list_rows(document: Document) -> list[tuple[str, ...]]:
    """The table, a row for each group."""
    return [
        (
            name,
            str(len(group["runs"])),
            describe_spread(group["port"]),
            *(describe_spread(group["top1"].get(name)) for name in _shown(document)),
            describe_spread(group["best_step"], "number"),
            describe_spread(group["minibatches"], "number"),
            describe_spread(group["seconds"], "seconds"),
        )
        for name, group in zip(list_names(document), document["groups"], strict=True)
    ]


def list_names(document: Document) -> list[str]:
    """The groups as a table calls them: with a number if the charts use it.

    Example:
        >>> list_names({"groups": [{"name": "fgmt"}, {"name": "fgmt, with so many differences that it is long"}]})
        ['1: fgmt', '2: fgmt, with so many differences that it is long']
    """
    names = [group["name"] for group in document["groups"]]
    return [name if name == label else f"{label}: {name}" for name, label in zip(names, _labels(document), strict=True)]


def _labels(document: Document) -> list[str]:
    names = [clean(group["name"]) for group in document["groups"]]
    return names if max(map(len, names)) <= _NAME else [str(number) for number in range(1, len(names) + 1)]


def _shown(document: Document) -> list[str]:
    """The contenders that have a column: those that charts show and that stand beside a port."""
    return [name for name in _beside(document) if find_contender(name).drawn]


def _beside(document: Document) -> list[str]:
    """The contenders that are not only ports: those are compared in one column, whatever their method."""
    runs = [run for group in document["groups"] for run in group["runs"]]
    return [name for name in document["scores"] if any(name in run["top1"] and name != run["winner"] for run in runs)]


def draw_comparison_page(document: Document, version: str = "") -> str:
    """One page, without network: the table, test accuracies, and the curves of all ports over each other."""
    groups = document["groups"]
    count = sum(len(group["runs"]) for group in groups)
    charts = (draw_scores(document), draw_curves(document), draw_prices(document))
    runs = [
        (
            run["name"],
            label,
            percent(run["top1"][run["winner"]]),
            *(percent(run["top1"].get(name)) for name in _shown(document)),
            run["best_step"],
        )
        for label, group in zip(_labels(document), groups, strict=True)
        for run in group["runs"]
    ]
    return render(
        "comparison.html",
        title=f"{plural(count, 'port')} beside each other",
        version=version,
        document=document,
        differing=[name.replace("_", " ") for name in document["differing"]],
        columns=list_columns(document),
        rows=[tuple(cell.replace(" ± ", "\u00a0±\u00a0") for cell in row) for row in list_rows(document)],
        run_columns=("run", "group", "port", *(find_contender(name).short for name in _shown(document)), "best step"),
        runs=runs,
        charts=dict(zip(("scores", "curves", "prices"), charts, strict=True)),
    )


def _paint(number: int) -> dict[str, Any]:
    cycle, place = divmod(number, len(_PAINTS))
    return {"color": COLOURS[_PAINTS[place]], "linestyle": _STYLES[cycle % len(_STYLES)]}


def draw_scores(document: Document) -> Chart:
    """Test accuracies of every group: a mark for the mean, a bar for the deviation, a dot for each run."""
    groups = document["groups"]
    ports = {run["winner"] for group in groups for run in group["runs"]}
    names = [name for name in document["scores"] if find_contender(name).drawn]
    names.sort(key=lambda name: name not in ports)
    drawing = Drawing("scores", 6.8, 1.5 + 0.24 * len(names) * len(groups) + 0.25 * len(groups))
    axes, places, tips, ticks = drawing.axes, [], [], []
    height = 0.0
    seen: set[str] = set()
    for number, group in enumerate(groups):
        start = height
        for name in (each for each in names if each in group["top1"]):
            spread = group["top1"][name]
            values = [run["top1"][name] for run in group["runs"] if name in run["top1"]]
            row = find_contender(name)
            paint = row.colours[0]
            label = None if name in seen else row.short
            seen.add(name)
            axes.plot(values, [height] * len(values), "|", color=paint, markersize=7, alpha=0.6)
            axes.errorbar(spread["mean"], height, xerr=spread["deviation"] or 0, color=paint, marker=row.marker,
                          linestyle="none", markersize=6, elinewidth=1.4, capsize=2.5, label=label)  # fmt: skip
            places.append(height)
            tips.append(f"{group['name']}\n{row.short}: {describe_spread(spread)}, {plural(spread['count'], 'run')}")
            height += 1
        ticks.append((start + height - 1) / 2)
        if number + 1 < len(groups):
            axes.axhline(height, color=COLOURS["line"], linewidth=0.8)
        height += 1
    axes.axvline(document["chance"], color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance")
    axes.set_yticks(ticks, _labels(document))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(height - 0.5, -0.9)
    axes.set_xlim(left=0)
    axes.set_xlabel("accuracy on the test images")
    drawing.percents("x")
    drawing.rows(places, tips)
    drawing.legend(4)
    return drawing.finish(
        "; ".join(
            f"{group['name']}: "
            + ", ".join(f"{find_contender(name).short} {describe_spread(group['top1'].get(name))}" for name in names)
            for group in groups
        )
    )


def draw_curves(document: Document) -> Chart:
    """Validation accuracy along the fine-tuning: a colour for each group, thin for a run, thick for the mean."""
    groups = document["groups"]
    lengths = {run["steps"] for group in groups for run in group["runs"]}
    same = len(lengths) == 1

    def place(step: float, run: Mapping[str, Any]) -> float:
        return step if same else step / run["steps"]

    drawing = Drawing("curves", 6.8, 4.0)
    texts: dict[float, list[str]] = {}
    for number, (group, label) in enumerate(zip(groups, _labels(document), strict=True)):
        paint = _paint(number)
        for run in group["runs"]:
            xy = [(place(at, run), top1) for at, top1 in run["curve"]]
            drawing.axes.plot(*zip(*xy, strict=True), **paint, linewidth=0.8, alpha=0.5)
        mean = [(place(at, group["runs"][0]), top1) for at, top1 in group["curve"]]
        drawing.axes.plot(*zip(*mean, strict=True), **paint, linewidth=2.6, label=label)
        for at, top1 in mean:
            texts.setdefault(at, [f"step {at:g}" if same else f"{at:.0%} of the way"]).append(
                f"{group['name']}: {percent(top1)}"
            )
    drawing.axes.axhline(document["chance"], color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance")
    drawing.columns(list(texts), ["\n".join(lines) for lines in texts.values()])
    drawing.axes.set_ylim(bottom=0)
    drawing.axes.set_xlabel("step along the fine-tuning" if same else "share of the fine-tuning")
    drawing.axes.set_ylabel("validation accuracy")
    drawing.percents()
    if same:
        drawing.counts()
    else:
        drawing.percents("x")
    drawing.legend(3)
    ends = "; ".join(f"{group['name']} ends at {percent(group['curve'][-1][1])}" for group in groups if group["curve"])
    return drawing.finish(f"Validation accuracy along the fine-tuning, mean of each group: {ends}.")


def draw_prices(document: Document) -> Chart | None:
    """Validation accuracy over training images: fine-tuning after the port, against plain fine-tuning (dashed)."""
    groups = document["groups"]
    paid = [each for each in contenders() if each.is_alternative or each.after(Asked("", trains_after=True))]
    if not any(group["curves"].get(each.name) for group in groups for each in paid):
        return None
    drawing = Drawing("prices", 6.8, 4.0)
    texts: dict[float, list[str]] = {}
    for number, (group, label) in enumerate(zip(groups, _labels(document), strict=True)):
        paint = _paint(number)["color"]
        for row in paid:
            style = (0, (4, 2)) if row.is_alternative else "-"
            for run in group["runs"]:
                if curve := run["curves"].get(row.name):
                    drawing.axes.plot(*zip(*curve, strict=True), color=paint, linestyle=style, linewidth=0.8, alpha=0.5)
            if mean := group["curves"].get(row.name):
                words = f"{label}: {row.short}"
                drawing.axes.plot(*zip(*mean, strict=True), color=paint, linestyle=style, linewidth=2.4, label=words)
                for at, top1 in mean:
                    texts.setdefault(at, [f"after {at:,.0f} images"]).append(f"{words}: {percent(top1)}")
    drawing.columns(list(texts), ["\n".join(lines) for lines in texts.values()])
    drawing.axes.set_ylim(bottom=0)
    drawing.axes.set_xlabel("training images that went into gradients")
    drawing.axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    drawing.axes.set_ylabel("validation accuracy")
    drawing.percents()
    drawing.legend(2)
    return drawing.finish(
        "Validation accuracy over training images: fine-tuning after the port, and plain fine-tuning."
    )


def table_rows(document: Document) -> Sequence[tuple[str, ...]]:
    """One row for each run, for spreadsheets; the first names the columns."""
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
