"""Accuracy along the trajectory and at the same price, and how much alike the gradients are: charts over steps."""

from __future__ import annotations

from typing import Any

from hf_retarget.report.chart import COLOURS, Chart, Drawing
from hf_retarget.report.page import percent

Document = dict[str, Any]
Points = list[tuple[float, float]]

WALKS = {"port": ("steps", "port", "o-"), "oracle": ("oracle_steps", "oracle's permutation", "^-.")} | {
    "masked": ("masked_steps", "mask alone", "P:"),
    "naive": ("naive_steps", "naive port", "s--"),
}
LEVELS = {
    "tuned": "tuned source, on the old base",
    "tuned_target": "real fine-tuning of the new base",
    "control": "plain fine-tuning, same price",
}


def chance(document: Document) -> float:
    """The accuracy of guessing."""
    return 1 / max(1, int(document["inputs"]["data"]["classes"]))


def list_walks(document: Document) -> dict[str, list[dict[str, Any]]]:
    """The steps of every method that was run; a port that is the naive one is listed once."""
    walks = {name: document.get(key) or [] for name, (key, _, _) in WALKS.items()}
    return {name: steps for name, steps in walks.items() if steps and not is_the_port(document, name)}


def is_the_port(document: Document, name: str) -> bool:
    """Whether what the port is compared with is the port itself, as when a naive port is compared with a naive one.

    Example:
        >>> is_the_port({"steps": [{"top1": 0.5}], "naive_steps": [{"top1": 0.5}]}, "naive")
        True
    """
    return name != "port" and bool(document["steps"]) and document.get(f"{name}_steps") == document["steps"]


def list_levels(document: Document) -> dict[str, float]:
    """Validation accuracies that do not change with the steps."""
    levels = {name: value for name, value in document.get("levels", {}).items() if name in LEVELS}
    if control := document["curves"].get("control"):
        levels["control"] = control[-1][1]
    return levels


def draw_curve(document: Document) -> Chart:
    """Validation accuracy over the steps, for every method that was run."""
    drawing = Drawing("curve", 5.0, 3.7)
    axes = drawing.axes
    walks, levels = list_walks(document), list_levels(document)
    texts: dict[int, list[str]] = {}
    for name, steps in walks.items():
        _, words, style = WALKS[name]
        axes.plot(*_xy(steps), style, color=COLOURS[name], label=words, zorder=3 + (name == "port"))
        for each in steps:
            texts.setdefault(each["step"], [f"step {each['step']}"]).append(f"{words}: {percent(each['top1'])}")
    best = document["steps"][document["best_step"] - 1]
    axes.plot([best["step"]], [best["top1"]], "*", color=COLOURS["port"], markersize=13, zorder=6, label="best step")
    for name, value in levels.items():
        paint = COLOURS["oracle" if name == "tuned_target" else name]
        axes.axhline(value, color=paint, linewidth=1.4, linestyle=(0, (6, 2)), label=LEVELS[name], zorder=2)
    guess = chance(document)
    axes.axhline(guess, color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance", zorder=2)
    same = [f"{LEVELS[name]}: {percent(value)}" for name, value in levels.items()] + [f"chance: {percent(guess)}"]
    last = max(texts)
    drawing.columns(list(texts), ["\n".join([*lines, *same]) for lines in texts.values()])
    axes.set_xlim(0.5, last + 0.5)
    _percents(drawing, [each["top1"] for steps in walks.values() for each in steps] + [*levels.values(), guess])
    axes.set_xlabel("step along the fine-tuning")
    axes.set_ylabel("validation accuracy")
    drawing.counts()
    drawing.legend()
    others = [
        f"{WALKS[name][1]}: at best {percent(max(each['top1'] for each in steps))}"
        for name, steps in walks.items()
        if name != "port"
    ]
    return drawing.finish(
        f"Validation accuracy over {last} steps. The port is best at step {best['step']} with {percent(best['top1'])}. "
        + "; ".join([*others, *same])
        + "."
    )


def draw_price(document: Document) -> Chart | None:
    """Validation accuracy over the training images that were paid for: port and fine-tuning on, against plain."""
    paid = list_paid(document)
    if not paid.keys() & {"control", "finetuned"}:
        return None
    drawing = Drawing("price", 5.0, 3.7)
    styles = {"port": ("o-", "port"), "finetuned": ("D-", "port, fine-tuned on"), "control": ("v--", LEVELS["control"])}
    texts: dict[float, list[str]] = {}
    for name, points in paid.items():
        style, words = styles[name]
        drawing.axes.plot(*zip(*points, strict=True), style, color=COLOURS[name], label=words.partition(",")[0]
                          if name == "control" else words, zorder=4 - (name == "control"))  # fmt: skip
        for spent, top1 in points:
            texts.setdefault(spent, [f"after {spent:,.0f} images"]).append(f"{words}: {percent(top1)}")
    guess = chance(document)
    drawing.axes.axhline(guess, color=COLOURS["muted"], linewidth=1.1, linestyle=":", label="chance", zorder=2)
    drawing.columns(list(texts), ["\n".join(lines) for lines in texts.values()])
    most = max(texts) or 1.0
    drawing.axes.set_xlim(-0.02 * most, 1.02 * most)
    _percents(drawing, [top1 for points in paid.values() for _, top1 in points] + [guess])
    drawing.axes.set_xlabel("training images that went into gradients")
    drawing.axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    drawing.axes.set_ylabel("validation accuracy")
    drawing.legend()
    ends = "; ".join(f"{styles[name][1]} ends at {percent(points[-1][1])}" for name, points in paid.items())
    return drawing.finish(f"Validation accuracy over the training images spent: {ends}.")


def list_paid(document: Document) -> dict[str, Points]:
    """For each way: training images spent so far, and the accuracy on validation."""
    recipe, spent = document["recipe"], document["gradients"]["port"]
    size, after = recipe["port"]["batch_size"], recipe["finetune"]["batch_size"]
    steps = document["steps"]
    made = len(steps)

    def price(step: int) -> float:
        quadratic = recipe["port"]["method"] == "gmt"  # which takes all gradients anew at every step
        return float(size * spent) * (step * (step + 1) / (made * (made + 1)) if quadratic else step / made)

    paid: dict[str, Points] = {"port": [(price(each["step"]), each["top1"]) for each in steps]}
    if curve := document["curves"].get("finetuned"):
        # From the best step on; the steps after it were paid for, too.
        paid["finetuned"] = [(size * spent + after * (at - spent), top1) for at, top1 in curve]
    if curve := document["curves"].get("control"):
        paid["control"] = [(size * at, top1) for at, top1 in curve]
    return paid


def draw_cosines(document: Document) -> Chart | None:
    """How much alike the gradients of both sides are, before and after matching: what the method assumes."""
    steps = [each for each in document["steps"] if each.get("cosines")]
    if not steps:
        return None
    drawing = Drawing("gradients", 5.0, 3.5)
    kinds = {
        "after": ("neurons matched", "o-", "port"),
        "unseen": ("matched without having seen them", "D:", "finetuned"),
        "before": ("neurons as they are", "s--", "naive"),
    }
    places = [each["step"] for each in steps]
    for key, (words, style, paint) in kinds.items():
        values = [each["cosines"].get(key) for each in steps]
        if any(value is not None for value in values):
            shown = [float("nan") if value is None else value for value in values]
            drawing.axes.plot(places, shown, style, color=COLOURS[paint], label=words)
    texts = [
        "\n".join([f"step {each['step']}", *(f"{words}: {_number(each['cosines'].get(key))}"
                                             for key, (words, _, _) in kinds.items())])
        for each in steps
    ]  # fmt: skip
    drawing.axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
    drawing.columns(places, texts)
    drawing.axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    drawing.axes.set_xlabel("step along the fine-tuning")
    drawing.axes.set_ylabel("cosine of the gradients")
    drawing.counts()
    drawing.legend()
    last = steps[-1]["cosines"]
    return drawing.finish(
        f"Cosine of the gradients of old and new side over {len(steps)} steps; at the last step "
        f"{_number(last['before'])} as they are and {_number(last['after'])} matched."
    )


def _xy(steps: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [each["step"] for each in steps], [each["top1"] for each in steps]


def _percents(drawing: Drawing, values: list[float]) -> None:
    drawing.percents()
    drawing.axes.set_ylim(0, min(1.02, max(values) * 1.12 + 0.02))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
