"""Where the time went: a chart over the stages of a port."""

from __future__ import annotations

from typing import Any

from hf_retarget.report.chart import COLOURS, Chart, Drawing
from hf_retarget.report.page import duration, size

STAGES = {
    "loading": "loading models and images",
    "tracing": "tracing and checking the model",
    "images": "reading images",
    "gradients": "gradients",
    "matching": "search for permutations",
    "batchnorm": "BatchNorm reset",
    "evaluation": "evaluation",
    "finetuned": "fine-tuning after the port",
    "control": "plain fine-tuning (to compare)",
}


def list_stages(document: dict[str, Any]) -> list[tuple[str, float, int | None]]:
    """Each stage: its name in words, its seconds, and the most memory that had been needed by its end."""
    memory = document.get("memory") or {}
    return [
        (STAGES.get(name, name), seconds, memory.get(name))
        for name, seconds in sorted(document["seconds"].items(), key=lambda each: -each[1])
    ]


def draw_time(document: dict[str, Any]) -> Chart | None:
    """Seconds by stage."""
    stages = list_stages(document)
    if not stages:
        return None
    drawing = Drawing("time", 5.0, 0.9 + 0.28 * len(stages))
    places = list(range(len(stages)))
    drawing.axes.barh(places, [seconds for _, seconds, _ in stages], color=COLOURS["port"], height=0.7)
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
