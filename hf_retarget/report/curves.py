"""Charts over steps: accuracy along the trajectory and at the same price, and how much the gradients agree."""

from __future__ import annotations

from hf_retarget.document import ContenderFigures, PortDocument
from hf_retarget.report.chart import COLOURS, Chart, Drawing
from hf_retarget.words import number, percent


def list_courses(document: PortDocument) -> list[ContenderFigures]:
    """The contenders that take steps, the winner first."""
    found = [each for each in reversed(document.table) if each.steps and each.row.drawn]
    return sorted(found, key=lambda each: each.name != document.winner)


def list_levels(document: PortDocument) -> list[ContenderFigures]:
    """The contenders whose validation accuracy does not change with the steps of the port."""
    return [each for each in document.table if not each.steps and each.row.drawn and each.role == "beside"]


def draw_curve(document: PortDocument) -> Chart:
    """Validation accuracy over the steps, for every contender that takes some."""
    drawing = Drawing("curve", 5.0, 3.7)
    axes, texts = drawing.axes, dict[int, list[str]]()
    courses, levels = list_courses(document), list_levels(document)
    for each in courses:
        row, over = each.row, 3 + (each.name == document.winner)
        xy = [step.step for step in each.steps], [step.top1 for step in each.steps]
        axes.plot(*xy, row.marker + row.line, color=row.colours[0], label=row.label, zorder=over)
        for step in each.steps:
            texts.setdefault(step.step, [f"step {step.step}"]).append(f"{row.label}: {percent(step.top1)}")
    if best := document.best:
        paint = document.port.row.colours[0]
        axes.plot([best.step], [best.top1], "*", color=paint, markersize=13, zorder=6, label="best step")
    for each in levels:
        style = {"color": each.row.colours[0], "linewidth": 1.4, "linestyle": (0, (6, 2))}
        axes.axhline(each.validation, **style, label=each.row.label, zorder=2)
    _mark_chance(drawing, document)
    same = [f"{each.row.label}: {percent(each.validation)}" for each in levels]
    same.append(f"chance: {percent(document.chance)}")
    last = max(texts, default=1)
    drawing.columns(list(texts), ["\n".join([*lines, *same]) for lines in texts.values()])
    axes.set_xlim(0.5, last + 0.5)
    values = [step.top1 for each in courses for step in each.steps]
    _show_percents(drawing, [*values, *(each.validation for each in levels), document.chance])
    axes.set_xlabel("step along the fine-tuning")
    axes.set_ylabel("validation accuracy")
    drawing.counts()
    drawing.legend()
    others = [f"{each.row.label}: at best {percent(each.validation)}" for each in courses]
    return drawing.finish(f"Validation accuracy over {last} steps. " + "; ".join([*others, *same]) + ".")


def list_paid(document: PortDocument) -> list[ContenderFigures]:
    """The result, what it came from, and its alternatives, where they took gradients."""
    return [
        each for each in document.table if each.curve and (each.role in ("port", "after") or each.row.is_alternative)
    ]


def draw_price(document: PortDocument) -> Chart | None:
    """Validation accuracy over the training images that went into gradients."""
    paid = list_paid(document)
    if len(paid) < 2:
        return None
    drawing = Drawing("price", 5.0, 3.7)
    texts: dict[float, list[str]] = {}
    for each in paid:
        row, over = each.row, 4 - (each.role == "beside")
        curve = each.curve
        drawing.axes.plot(
            *zip(*curve, strict=True), row.marker + row.line, color=row.colours[0], label=row.label, zorder=over
        )
        for spent, top1 in curve:
            texts.setdefault(spent, [f"after {spent:,.0f} images"]).append(f"{row.label}: {percent(top1)}")
    _mark_chance(drawing, document)
    drawing.columns(list(texts), ["\n".join(lines) for lines in texts.values()])
    most = max(texts) or 1.0
    drawing.axes.set_xlim(-0.02 * most, 1.02 * most)
    _show_percents(drawing, [top1 for each in paid for _, top1 in each.curve] + [document.chance])
    drawing.axes.set_xlabel("training images that went into gradients")
    drawing.axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    drawing.axes.set_ylabel("validation accuracy")
    drawing.legend()
    ends = "; ".join(f"{each.row.label} ends at {percent(each.curve[-1][1])}" for each in paid)
    return drawing.finish(f"Validation accuracy over the training images spent: {ends}.")


def draw_cosines(document: PortDocument) -> Chart | None:
    """How much the gradients of both sides agree, before and after matching: what the method assumes."""
    steps = [(each.step, each.cosines) for each in document.port.steps if each.cosines]
    if not steps:
        return None
    drawing = Drawing("gradients", 5.0, 3.5)
    kinds = {
        "after": ("neurons matched", "o-", "accent"),
        "unseen": ("matched without having seen them", "D:", "third"),
        "before": ("neurons as they are", "s--", "other"),
    }
    places = [step for step, _ in steps]
    for key, (words, style, paint) in kinds.items():
        values = [cosines.get(key) for _, cosines in steps]
        if any(value is not None for value in values):
            shown = [float("nan") if value is None else value for value in values]
            drawing.axes.plot(places, shown, style, color=COLOURS[paint], label=words)
    texts = [
        "\n".join([f"step {step}", *(f"{words}: {number(cosines.get(key))}" for key, (words, _, _) in kinds.items())])
        for step, cosines in steps
    ]
    drawing.axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
    drawing.columns(places, texts)
    drawing.axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    drawing.axes.set_xlabel("step along the fine-tuning")
    drawing.axes.set_ylabel("cosine of the gradients")
    drawing.counts()
    drawing.legend()
    last = steps[-1][1]
    return drawing.finish(
        f"Cosine of the gradients of old and new side over {len(steps)} steps; at the last step "
        f"{number(last.get('before'))} as they are and {number(last.get('after'))} matched."
    )


def _mark_chance(drawing: Drawing, document: PortDocument) -> None:
    style = {"color": COLOURS["muted"], "linewidth": 1.1, "linestyle": ":"}
    drawing.axes.axhline(document.chance, **style, label="chance", zorder=2)


def _show_percents(drawing: Drawing, values: list[float]) -> None:
    drawing.percents()
    drawing.axes.set_ylim(0, min(1.02, max(values) * 1.12 + 0.02))
