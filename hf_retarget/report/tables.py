"""The words and figures of a report that are no picture: verdict, test scores, steps, inputs, options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_retarget.report.curves import is_the_port, list_walks
from hf_retarget.report.page import duration, number, percent, size

Document = dict[str, Any]

WORDS = {
    "port": "port",
    "finetuned": "port, fine-tuned on",
    "control": "plain fine-tuning of the new base, same price",
    "naive": "naive port, no neuron matched",
    "masked": "mask alone, no neuron matched",
    "oracle": "port with the oracle's permutation",
    "tuned_target": "real fine-tuning of the new base",
    "tuned": "the fine-tuning on the old base",
    "base": "new base as it is",
}
_SHORT = {"naive": "naive", "masked": "mask alone", "oracle": "oracle"}
_KINDS = {"tuned_target": "oracle", "base": ""}


def split_verdict(verdict: str) -> tuple[str, str, str]:
    """The verdict as a mark, the rest of the sentence, and whether it is good, bad or open.

    Example:
        >>> split_verdict("Not worth it: 60.0% of 400 test images.")
        ('Not worth it', '60.0% of 400 test images.', 'bad')
    """
    mark, _, rest = verdict.partition(": ")
    kind = "good" if mark.startswith("Worth it") else "bad" if mark.startswith("Not") else "open"
    return mark, rest, kind


def list_facts(document: Document) -> list[tuple[str, str, str]]:
    """The test accuracies that one should see first: figure, words, and what colour they have."""
    test = document["test"]
    first = ("finetuned", "port", "control", "naive", "masked", "oracle", "tuned")
    shown = [name for name in first if name in test and not is_the_port(document, name)]
    return [(percent(test[name]["top1"]), WORDS[name], _KINDS.get(name, name)) for name in shown]


def list_tests(document: Document) -> list[tuple[str, ...]]:
    """All test scores."""
    return [
        (words, percent(each["top1"]), percent(each["top5"]), number(each["loss"]), f"{each['images']:,}")
        for name, words in WORDS.items()
        if (each := document["test"].get(name))
    ]


def list_step_columns(document: Document) -> tuple[str, ...]:
    """The headings of the steps.

    Example:
        >>> list_step_columns({"steps": [{"step": 1, "top1": 0.5}]})
        ('step', 'way', 'port', 'loss', 'moved', 'sweeps', 'time')
    """
    return ("step", "way", "port", "loss", *(_SHORT[name] for name in _others(document)), "moved", "sweeps", "time")


def list_steps(document: Document) -> list[tuple[str, ...]]:
    """All steps of the port, and of what it is compared with."""
    walks = {name: {each["step"]: each for each in steps} for name, steps in list_walks(document).items()}
    rows = []
    for each in document["steps"]:
        others = [percent(walks[name][each["step"]]["top1"]) if each["step"] in walks[name] else "–"
                  for name in _others(document)]  # fmt: skip
        rows.append(
            (
                f"{each['step']}{' ★' if each['step'] == document['best_step'] else ''}",
                percent(each["far"], 0),
                percent(each["top1"]),
                number(each["loss"]),
                *others,
                percent(each["moved"], 0),
                str(each["sweeps"]),
                duration(sum(each["seconds"].values())),
            )
        )
    return rows


def _others(document: Document) -> list[str]:
    walks = list_walks(document)
    return [name for name in _SHORT if name in walks]


def name_input(side: dict[str, Any]) -> str:
    """What a model is called. A report may be read by anybody: of a local path it tells the last part only.

    Example:
        >>> name_input({"reference": "/home/me/tuned", "revision": None})
        'tuned'
    """
    reference = str(side["reference"])
    return reference if side["revision"] else Path(reference).name


def list_inputs(document: Document) -> list[tuple[str, str]]:
    """What went in: models, their revisions and hashes, images; and what made the result."""
    inputs, rows = document["inputs"], []
    sides = {"source": "old base", "tuned": "its fine-tuning", "target": "new base", "tuned_target": "real fine-tuning"}
    for side, words in sides.items():
        if each := inputs.get(side):
            lines = [name_input(each), each["architecture"]]
            lines += [f"revision {each['revision']}"] if each["revision"] else []
            lines += [f"{file} sha256 {value}" for file, value in each["hashes"].items()]
            rows.append((words, "\n".join(lines)))
    data = inputs["data"]
    images = ", ".join(f"{count:,} {split}" for split, count in data["images"].items())
    told = [data["name"], f"{data['classes']} classes; images: {images}", f"fingerprint {data['fingerprint']}"]
    rows.append(("images", "\n".join([*told, *([f"revision {data['revision']}"] if data["revision"] else [])])))
    rows.append(("head", f"{document['head']['policy']} ({document['head']['why']})"))
    graph = document["graph"]
    checked = (graph.get("check") or {}).get("verdict", "not checked")
    rows.append(("permutation graph", f"{graph['groups']} groups; {checked}\nfingerprint {graph['fingerprint']}"))
    device = document["device"]
    rows.append(
        ("computed on", f"{device['type']}, {device['processes']} process(es), precision {device['precision']}")
    )
    rows.append(("peak memory", size(document["peak_memory"])))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())))
    return rows


def list_options(document: Document) -> list[tuple[str, str]]:
    """Every field of the recipe.

    Example:
        >>> list_options({"recipe": {"port": {"steps": 3}, "name": "short"}})
        [('port.steps', '3'), ('name', 'short')]
    """
    return [(name, value) for name, value in _flat(document["recipe"], "") if value not in ("null", "[]", "")]


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, each in value.items() for row in _flat(each, f"{name}.{key}" if name else str(key))]
    return [(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]
