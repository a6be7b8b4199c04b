"""The charts of a report, each with a caption on what it shows and how to read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_retarget.contenders import contenders
from hf_retarget.document import ContenderFigures, PortDocument, StepFigures
from hf_retarget.report.chart import Chart, Drawing
from hf_retarget.report.page import COLOURS
from hf_retarget.words import duration, number, percent, size

_STAGES = {
    "loading": "loading models and images",
    "tracing": "tracing and checking the model",
    "images": "reading images",
    "gradients": "gradients",
    "matching": "search for permutations",
    "batchnorm": "BatchNorm reset",
    "evaluation": "evaluation",
}
_STEPS = "step along the fine-tuning"
_GROUPS = "groups of neurons, from input to output"


# ---- accuracy


def list_courses(document: PortDocument) -> list[ContenderFigures]:
    """The contenders that take steps, or else those that try factors, starting with the one that led to the winner."""
    found = [each for each in reversed(document.table) if each.steps and each.row.drawn]
    steps = any(each.row.axis == "step" for each in found)
    axis = document.trail.row.axis if document.trail.steps else "step" if steps else "factor"
    shown = [each for each in found if each.row.axis == axis]
    return sorted(shown, key=lambda each: each.name != document.trail.name)


def list_paid(document: PortDocument) -> list[ContenderFigures]:
    """The result, the winner and the alternatives, if they took gradients."""
    return [
        each for each in document.table if each.curve and (each.role in ("port", "after") or each.row.is_alternative)
    ]


def draw_curve(document: PortDocument) -> Chart | None:
    """Validation accuracy over steps or factors, for each contender that has them."""
    courses = list_courses(document)
    if not courses:
        return None
    drawing = Drawing("curve", 5.0, 3.7)
    axes, tips, axis = drawing.axes, dict[float, str](), courses[0].row.axis
    levels = [each for each in document.table if each not in courses and each.row.drawn and each.role != "after"]
    for each in courses:
        row, over = each.row, 3 + (each.name == document.trail.name)
        xy = [_place(step, axis) for step in each.steps], [step.top1 for step in each.steps]
        axes.plot(*xy, row.marker + row.line, color=row.colours[0], label=row.label, zorder=over)
        for place, top1 in zip(*xy, strict=True):
            tips[place] = f"{tips.get(place, f'{axis} {place:g}')}\n{row.label}: {percent(top1)}"
    if (best := document.best) and document.trail in courses:
        paint = document.trail.row.colours[0]
        star = [_place(best, axis)], [best.top1]
        axes.plot(*star, "*", color=paint, markersize=13, zorder=6, label=f"best {axis}")
    for each in levels:
        style = {"color": each.row.colours[0], "linewidth": 1.4, "linestyle": (0, (6, 2))}
        axes.axhline(each.validation, **style, label=each.row.label, zorder=2)
    same = [f"{each.row.label}: {percent(each.validation)}" for each in levels]
    same.append(f"chance: {percent(document.chance)}")
    drawing.columns({place: "\n".join([text, *same]) for place, text in tips.items()})
    gap = 0.5 if axis == "step" else 0.125
    axes.set_xlim(min(tips) - gap, max(tips) + gap)
    values = [step.top1 for each in courses for step in each.steps]
    _limit(drawing, document, [*values, *(each.validation for each in levels)])
    words = _STEPS if axis == "step" else "factor of the fine-tuning"
    drawing.label(words, f"validation {document.measure}", percents="y", counts="x" if axis == "step" else "")
    others = [f"{each.row.label}: at best {percent(each.validation)}" for each in courses]
    alt = f"Validation {document.measure} over {len(tips)} {axis}s. " + "; ".join([*others, *same]) + "."
    return drawing.finish(alt, _describe_curve(document))


def _describe_curve(document: PortDocument) -> str:
    best, port, chance = document.best, document.trail, percent(document.chance)
    if best is None:
        return ""
    if port.row.axis == "factor":
        return (
            f"The fine-tuning is added to the new base as it is, with several factors, without gradients. The best "
            f"factor is {best.far:g}: {percent(best.top1)}; guessing gives {chance}."
        )
    words = (
        f"Each step adds more of the fine-tuning to the new base. The port is best at step {best.step}: "
        f"{percent(best.top1)}; guessing gives {chance}."
    )
    if unmatched := document.unmatched:
        what, top = unmatched.row.label.partition(",")[0], percent(unmatched.validation)
        words += f" Without matching ({what}), it reaches {top}."
        if lead := document.matching_lead:
            words += f" On the test images, the matching is worth {lead.sentence}."
    last = port.steps[-1]
    if best.top1 > last.top1 + 0.02:
        words += f" Afterwards it falls to {percent(last.top1)}, so the port uses the best step."
    return words


def _place(step: StepFigures, axis: str) -> float:
    return step.step if axis == "step" or step.far is None else step.far


def draw_price(document: PortDocument) -> Chart | None:
    """Validation accuracy over the training images used for gradients."""
    paid = list_paid(document)
    if len(paid) < 2:
        return None
    drawing, tips = Drawing("price", 5.0, 3.7), dict[float, str]()
    for each in paid:
        row, xy = each.row, zip(*each.curve, strict=True)
        over = 4 - (each.role == "beside")
        drawing.axes.plot(*xy, row.marker + row.line, color=row.colours[0], label=row.label, zorder=over)
        for spent, top1 in each.curve:
            tips[spent] = f"{tips.get(spent, f'after {spent:,.0f} images')}\n{row.label}: {percent(top1)}"
    drawing.columns(tips)
    most = max(tips) or 1.0
    drawing.axes.set_xlim(-0.02 * most, 1.02 * most)
    _limit(drawing, document, [top1 for each in paid for _, top1 in each.curve])
    measure = f"validation {document.measure}"
    drawing.label("training images used for gradients", measure, percents="y", thousands="x")
    ends = {each.name: percent(each.curve[-1][1]) for each in paid}
    words = "; ".join(f"{each.row.label} ends at {ends[each.name]}" for each in paid)
    caption, ours, plain = (
        "At the same price means: with as many training images used for gradients. ",
        document.result,
        document.alternative,
    )
    if plain is None or plain.name not in ends:
        caption += "Plain fine-tuning was not run."
    else:
        what = "Port and fine-tuning" if ours.role == "after" else "The port"
        caption += (
            f"{what} ends at {ends.get(ours.name, percent(ours.validation))} of the validation images, plain "
            f"fine-tuning of the new base at {ends[plain.name]}. A port pays off where its line is higher."
            + (f" Its lead on the test images is {plain.lead.sentence}." if plain.lead else "")
        )
    return drawing.finish(f"{measure.capitalize()} over the training images spent: {words}.", caption)


def _limit(drawing: Drawing, document: PortDocument, values: Sequence[float]) -> None:
    """Mark the accuracy of guessing, and limit the y axis to just above the best."""
    style = {"color": COLOURS["muted"], "linewidth": 1.1, "linestyle": ":"}
    drawing.axes.axhline(document.chance, **style, label="chance", zorder=2)
    drawing.axes.set_ylim(0, min(1.02, max([*values, document.chance]) * 1.12 + 0.02))


# ---- does it fit?


def draw_gradients(document: PortDocument) -> Chart | None:
    """Cosine of the gradients of both sides, before and after matching, which tests the assumption of the method."""
    steps = {each.step: each.cosines for each in document.trail.steps if each.cosines}
    if not steps:
        return None
    drawing = Drawing("gradients", 5.0, 3.5)
    kinds = {
        "after": ("neurons matched", "o-", "accent"),
        "unseen": ("matched on earlier gradients", "D:", "third"),
        "before": ("neurons not matched", "s--", "other"),
    }
    places, tips = list(steps), {float(step): f"step {step}" for step in steps}
    for key, (words, style, paint) in kinds.items():
        values = [cosines.get(key) for cosines in steps.values()]
        if any(value is not None for value in values):
            shown = [math.nan if value is None else value for value in values]
            drawing.axes.plot(places, shown, style, color=COLOURS[paint], label=words)
        for step, value in zip(places, values, strict=True):
            tips[step] += f"\n{words}: {number(value)}"
    drawing.axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
    drawing.columns(tips)
    drawing.axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    drawing.label(_STEPS, "cosine of the gradients", counts="x")
    last = steps[places[-1]]
    return drawing.finish(
        f"Cosine of the gradients on the old and the new base over {len(steps)} steps; at the last step "
        f"{number(last.get('before'))} unmatched and {number(last.get('after'))} matched.",
        _describe_cosines(list(steps.values())),
    )


def _describe_cosines(steps: list[dict[str, float | None]]) -> str:
    means: dict[str, float | None] = {}
    for key in ("before", "unseen", "after"):
        known = [value for each in steps[1:] or steps if (value := each.get(key)) is not None]
        means[key] = sum(known) / len(known) if known else None
    words = (
        "The method assumes that, once neurons are matched, the gradients of both networks point in similar directions "
        "(cosine 1: the same direction, 0: orthogonal). On average, the cosine is "
        f"{number(means['before'], 2)} unmatched, {number(means['after'], 2)} matched"
    )
    if (unseen := means["unseen"]) is None:
        return f"{words}."
    words += f", and {number(unseen, 2)} on gradients not used for matching, the unbiased figure."
    if (before := means["before"]) is None:
        return words
    return words + (
        " Above the orange line is good." if unseen > before + 0.02 else " That is no better than unmatched."
    )


def draw_moved(document: PortDocument) -> Chart | None:
    """The share of neurons moved by the permutation in each group."""
    groups = document.matching.get("groups", ())
    if not any(group["moved"] for group in groups):
        return None
    drawing = Drawing("moved", 5.0, 3.2)
    places = range(1, len(groups) + 1)
    drawing.axes.bar(places, [group["moved"] for group in groups], color=COLOURS["accent"], width=0.75)
    drawing.columns({at: _describe_group(group) for at, group in enumerate(groups, 1)})
    drawing.axes.set_ylim(0, 1.02)
    _show_all(drawing, len(groups))
    drawing.label(_GROUPS, "share of neurons moved", percents="y", counts="x", legend=0)
    total = sum(group["neurons"] for group in groups)
    moved = sum(group["moved"] * group["neurons"] for group in groups) / total
    caption = "Independently trained networks keep similar features in different places, so most neurons usually move."
    if still := sum(not group["moved"] for group in groups):
        caption += f" {still} of {len(groups)} groups did not change."
    alt = f"Share of moved neurons in {len(groups)} groups; {percent(moved)} of all {total:,} neurons."
    return drawing.finish(alt, caption)


def draw_groups(document: PortDocument) -> Chart | None:
    """Cosine of the gradients of both sides in each group, before and after matching."""
    groups = document.matching.get("groups", ())
    known = {at: group for at, group in enumerate(groups, 1) if group.get("after") is not None}
    if not known:
        return None
    drawing, places = Drawing("groups", 5.0, 3.5), list(known)
    before, after = ([group[key] for group in known.values()] for key in ("before", "after"))
    drawing.axes.vlines(places, before, after, color=COLOURS["line"], linewidth=2.5, zorder=2)
    drawing.axes.plot(places, after, "o", color=COLOURS["accent"], label="neurons matched", zorder=4)
    drawing.axes.plot(places, before, "s", color=COLOURS["other"], label="neurons not matched", zorder=3)
    drawing.axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
    drawing.columns({at: _describe_group(group) for at, group in known.items()})
    _show_all(drawing, len(groups))
    drawing.label(_GROUPS, "cosine within the group", counts="x")
    means = [sum(values) / len(values) for values in (before, after)]
    best = max(known.values(), key=lambda group: group["after"] - group["before"])
    return drawing.finish(
        f"Cosine of the matched gradients in {len(known)} groups: on average {means[0]:.2f} before, "
        f"{means[1]:.2f} after.",
        "Where the blue dot is far above the orange square, matching found neurons with similar gradients. The "
        f"largest gain is in {best['name']}: {number(best['before'], 2)} → {number(best['after'], 2)}. "
        "Neighbouring groups share tensors, and so their gains.",
    )


def _describe_group(group: dict[str, Any]) -> str:
    lines = [group["name"], f"{group['neurons']:,} neurons, {percent(group['moved'], 0)} moved"]
    if group.get("after") is not None:
        lines.append(f"cosine {number(group['before'])} → {number(group['after'])}")
    return "\n".join(lines)


def _show_all(drawing: Drawing, count: int) -> None:
    drawing.axes.set_xlim(0.4, count + 0.6)
    drawing.axes.grid(visible=False, axis="x")


def draw_sweeps(document: PortDocument) -> Chart | None:
    """The objective of the search after each sweep at the best step, as a share of a perfect match."""
    fit, best = document.matching, document.best
    if best is None or not best.objectives or not fit.get("perfect"):
        return None
    shares = [value / fit["perfect"] for value in (fit["identity"], *best.objectives)]
    drawing = Drawing("sweeps", 5.0, 3.2)
    drawing.axes.plot(range(len(shares)), shares, "o-", color=COLOURS["accent"])
    words = ["before: no neuron moved", *(f"after sweep {sweep}" for sweep in range(1, len(shares)))]
    tips = [f"{what}\n{percent(share)} of a perfect match" for what, share in zip(words, shares, strict=True)]
    drawing.columns(dict(enumerate(tips)))
    drawing.axes.set_xlim(-0.5, len(shares) - 0.5)
    drawing.axes.set_ylim(min(0.0, *shares), max(shares) * 1.15 + 1e-3)
    sweep = "sweep of the search (0: no neuron moved)"
    drawing.label(sweep, "share of a perfect match", percents="y", counts="x", legend=0)
    return drawing.finish(
        f"The objective at step {best.step} rises from {percent(shares[0])} to {percent(shares[-1])} of a perfect "
        f"match in {len(best.objectives)} sweeps.",
        f"The search at step {best.step} swept over all groups until nothing improved, {best.sweeps} times. "
        "100% would mean that every neuron has an exact counterpart, which no two networks have.",
    )


def draw_batchnorm(document: PortDocument) -> Chart | None:
    """The average variance in each BatchNorm layer, before and after the reset."""
    layers = document.batchnorm.get("statistics")
    if not layers:
        return None
    drawing = Drawing("batchnorm", 5.0, 3.5)
    sides = {"before": ("in the new base", "s--", "other"), "after": ("after the reset", "o-", "accent")}
    for side, (words, style, paint) in sides.items():
        values = [each[side]["variance"] for each in layers.values()]
        drawing.axes.plot(range(1, len(layers) + 1), values, style, color=COLOURS[paint], label=words)
    if all(each[side]["variance"] > 0 for each in layers.values() for side in sides):
        drawing.axes.set_yscale("log")
        drawing.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        drawing.axes.yaxis.set_minor_formatter("")
    tips: dict[float, str] = {}
    for place, (name, each) in enumerate(layers.items(), 1):
        tips[place] = (
            f"{name}\nvariance {_figure(each['before']['variance'])} → {_figure(each['after']['variance'])}\n"
            f"length of the mean {_figure(each['before']['mean_norm'])} → {_figure(each['after']['mean_norm'])}"
        )
    drawing.columns(tips)
    _show_all(drawing, len(layers))
    drawing.label("BatchNorm layers, from input to output", "average variance", counts="x")
    return drawing.finish(
        f"Average variance of {len(layers)} BatchNorm layers before and after the reset.",
        f"The statistics of the ported network were estimated on {document.batchnorm['batches']} minibatches. Where "
        "the lines differ, which is normal, those of the new base no longer fit.",
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


# ---- time


def draw_time(document: PortDocument) -> Chart | None:
    """The time of each stage."""
    if not document.seconds:
        return None
    names = _STAGES | {each.name: each.label for each in contenders()}
    stages = sorted(document.seconds.items(), key=lambda each: -each[1])
    labels = [": ".join(names.get(part, part) for part in stage.split(": ")) for stage, _ in stages]
    drawing = Drawing("time", 5.0, 0.9 + 0.28 * len(stages))
    drawing.axes.barh(range(len(stages)), [spent for _, spent in stages], color=COLOURS["accent"], height=0.7)
    tips: dict[float, str] = {}
    for place, (stage, spent) in enumerate(stages):
        memory = document.memory.get(stage)
        tips[place] = f"{labels[place]}\n{duration(spent)}" + (f"\nmemory by then: {size(memory)}" if memory else "")
    drawing.rows(tips)
    drawing.axes.set_yticks(range(len(stages)), labels)
    drawing.axes.set_ylim(len(stages) - 0.5, -0.5)
    drawing.axes.grid(visible=False, axis="y")
    drawing.label("seconds", legend=0)
    total = duration(sum(document.seconds.values()))
    return drawing.finish(f"{total} in total, of which {duration(stages[0][1])} for {labels[0]}.")
