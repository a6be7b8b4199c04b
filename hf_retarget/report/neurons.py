"""Charts over groups of neurons, layers and stages: what moved, what it was good for, and where the time went."""

from __future__ import annotations

from typing import Any

from hf_retarget.contenders import contenders
from hf_retarget.document import PortDocument
from hf_retarget.report.chart import COLOURS, Chart, Drawing
from hf_retarget.words import duration, number, percent, size


def list_groups(document: PortDocument) -> list[dict[str, Any]]:
    """The groups of the permutation that was used, from the input to the output; none in reports of old."""
    return list(document.matching.get("groups", ()))


def draw_moved(document: PortDocument) -> Chart | None:
    """The share of neurons in each group that the permutation puts elsewhere."""
    groups = list_groups(document)
    if not groups or not any(group["moved"] for group in groups):
        return None
    drawing = Drawing("moved", 5.0, 3.2)
    places = list(range(1, len(groups) + 1))
    drawing.axes.bar(places, [group["moved"] for group in groups], color=COLOURS["accent"], width=0.75)
    drawing.columns(places, [_describe(group) for group in groups])
    _over_groups(drawing, len(groups), "groups of neurons, from input to output")
    drawing.percents()
    drawing.axes.set_ylabel("share of neurons moved")
    drawing.axes.set_ylim(0, 1.02)
    total = sum(group["neurons"] for group in groups)
    moved = sum(group["moved"] * group["neurons"] for group in groups) / total
    return drawing.finish(f"Share of moved neurons in {len(groups)} groups; {percent(moved)} of all {total:,} neurons.")


def draw_groups(document: PortDocument) -> Chart | None:
    """How well the gradients of both sides agree in each group, before and after matching."""
    groups = list_groups(document)
    known = [(at, group) for at, group in enumerate(groups, start=1) if group.get("after") is not None]
    if not known:
        return None
    drawing = Drawing("groups", 5.0, 3.5)
    places, fits = [at for at, _ in known], [group for _, group in known]
    before, after = ([group[key] for group in fits] for key in ("before", "after"))
    drawing.axes.vlines(places, before, after, color=COLOURS["line"], linewidth=2.5, zorder=2)
    drawing.axes.plot(places, after, "o", color=COLOURS["accent"], label="neurons matched", zorder=4)
    drawing.axes.plot(places, before, "s", color=COLOURS["other"], label="neurons as they are", zorder=3)
    drawing.axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
    drawing.columns(places, [_describe(group) for group in fits])
    _over_groups(drawing, len(groups), "groups of neurons, from input to output")
    drawing.axes.set_ylabel("cosine within the group")
    drawing.legend()
    mean = [sum(values) / len(values) for values in (before, after)]
    return drawing.finish(
        f"Cosine of the matched gradients in {len(fits)} groups: on average {mean[0]:.2f} before, {mean[1]:.2f} after."
    )


def draw_sweeps(document: PortDocument) -> Chart | None:
    """The objective of the search after each sweep at the best step, as a share of a perfect match."""
    fit, best = document.matching, document.best
    objectives = best.objectives if best else ()
    if best is None or not objectives or not fit.get("perfect"):
        return None
    shares = [value / fit["perfect"] for value in (fit["identity"], *objectives)]
    drawing = Drawing("sweeps", 5.0, 3.2)
    places = list(range(len(shares)))
    drawing.axes.plot(places, shares, "o-", color=COLOURS["accent"])
    words = ["before: no neuron moved", *(f"after sweep {place}" for place in places[1:])]
    drawing.columns(places, [f"{what}\n{percent(share)} of a perfect match" for what, share in
                             zip(words, shares, strict=True)])  # fmt: skip
    drawing.axes.set_xlim(-0.5, len(shares) - 0.5)
    drawing.axes.set_ylim(min(0.0, *shares), max(shares) * 1.15 + 1e-3)
    drawing.percents()
    drawing.counts()
    drawing.axes.set_xlabel("sweep of the search (0: no neuron moved)")
    drawing.axes.set_ylabel("share of a perfect match")
    return drawing.finish(
        f"The objective at step {best.step} rises from {percent(shares[0])} to {percent(shares[-1])} of a perfect "
        f"match in {len(objectives)} sweeps."
    )


def draw_batchnorm(document: PortDocument) -> Chart | None:
    """The average variance that each BatchNorm layer expects, before and after the reset."""
    layers = document.batchnorm.get("statistics")
    if not layers:
        return None
    drawing = Drawing("batchnorm", 5.0, 3.5)
    places = list(range(1, len(layers) + 1))
    sides = {"before": ("as the new base had it", "s--", "other"), "after": ("after the reset", "o-", "accent")}
    for side, (words, style, paint) in sides.items():
        values = [each[side]["variance"] for each in layers.values()]
        drawing.axes.plot(places, values, style, color=COLOURS[paint], label=words)
    positive = all(each[side]["variance"] > 0 for each in layers.values() for side in sides)
    if positive:
        drawing.axes.set_yscale("log")
        drawing.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        drawing.axes.yaxis.set_minor_formatter("")
    drawing.columns(
        places,
        [
            f"{name}\nvariance {_figure(each['before']['variance'])} → {_figure(each['after']['variance'])}\n"
            f"length of the mean {_figure(each['before']['mean_norm'])} → {_figure(each['after']['mean_norm'])}"
            for name, each in layers.items()
        ],
    )
    _over_groups(drawing, len(layers), "BatchNorm layers, from input to output")
    drawing.axes.set_ylabel("average variance")
    drawing.legend()
    return drawing.finish(f"Average variance of {len(layers)} BatchNorm layers before and after the reset.")


def _describe(group: dict[str, Any]) -> str:
    lines = [group["name"], f"{group['neurons']:,} neurons, {percent(group['moved'], 0)} moved"]
    if group.get("after") is not None:
        lines.append(f"cosine {number(group['before'])} → {number(group['after'])}")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _over_groups(drawing: Drawing, count: int, words: str) -> None:
    drawing.axes.set_xlim(0.4, count + 0.6)
    drawing.counts()
    drawing.axes.set_xlabel(words)
    drawing.axes.grid(visible=False, axis="x")


STAGES = {
    "loading": "loading models and images",
    "tracing": "tracing and checking the model",
    "images": "reading images",
    "gradients": "gradients",
    "matching": "search for permutations",
    "batchnorm": "BatchNorm reset",
    "evaluation": "evaluation",
}


def list_stages(document: PortDocument) -> list[tuple[str, float, int | None]]:
    """Each stage: its name in words, its seconds, and the most memory that had been needed by its end."""
    words = STAGES | {each.name: each.label for each in contenders()}
    return [
        (words.get(name, name), seconds, document.memory.get(name))
        for name, seconds in sorted(document.seconds.items(), key=lambda each: -each[1])
    ]


def draw_time(document: PortDocument) -> Chart | None:
    """Seconds by stage."""
    stages = list_stages(document)
    if not stages:
        return None
    drawing = Drawing("time", 5.0, 0.9 + 0.28 * len(stages))
    places = list(range(len(stages)))
    drawing.axes.barh(places, [seconds for _, seconds, _ in stages], color=COLOURS["accent"], height=0.7)
    drawing.rows(
        places,
        [
            f"{words}\n{duration(seconds)}" + (f"\nmemory by then: {size(memory)}" if memory else "")
            for words, seconds, memory in stages
        ],
    )
    drawing.axes.set_yticks(places, [words for words, _, _ in stages])
    drawing.axes.set_ylim(len(stages) - 0.5, -0.5)
    drawing.axes.grid(visible=False, axis="y")
    drawing.axes.set_xlabel("seconds")
    total = sum(seconds for _, seconds, _ in stages)
    return drawing.finish(f"{duration(total)} in all; most of it, {duration(stages[0][1])}, for {stages[0][0]}.")
