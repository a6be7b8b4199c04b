"""The page of where a port pays, from the records that runs have left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from quality.pairs import PAIRS

RESULTS = Path(__file__).resolve().parents[1] / "results" / "pays"

_TOP = """# Where a port pays

Top-1 accuracy in per cent on test images; every choice (factor, step, head, contender, learning rate) was made on
validation images that the tuned model has not seen. Written by `python benchmarks/pays.py --write docs/pays.md` from
the records in `benchmarks/results/pays`; `python benchmarks/pays.py PAIR` makes one. Means over the seeds of the
fine-tuning that were run, whose number is in the column *n*. *d/τ* is the distance of the bases in lengths of the
fine-tuning. *auto* is `hf-retarget port` as it comes, with labels; *teacher*: the same without using a label.
"""

_LINEAGE = """
## Bases of one lineage

The new base is the old one, trained on: ResNet-20 on CIFAR-10 (*robust*: half of the images noisy), a small ViT on six
kinds of clothes, MobileNetV2 on its own answers to noisy photos. *plain-N*: the new base fine-tuned with N minibatches,
from a zero head, at the best of two to four rates. *plus-25*: auto, and 25 minibatches of fine-tuning at
the best of three rates. None of the other columns takes a gradient unless *matched* says so.
"""

_APART = """
## Independent bases

Bases that were trained apart; *head* is the new base with a closed-form head. *teacher-plus-50*: no labels, matching
and 50 minibatches of fine-tuning after the tuned model; *distil-50*: such minibatches from a zero head. *few*: 111
training images in all, with labels and teacher as validation chooses, with labels only, and with the teacher only.
"""


_SEEN = """
## Has the tuned model seen the images to choose by?

Its owner has usually trained on all images, so that whatever carries the fine-tuning looks better on them than it is.
The old base was fine-tuned at one rate *without* the validation images and *with* them. *chosen* is what validation
images chose, *lost* how far its test accuracy is behind the best of the contenders on test images.
"""


def write_tables() -> str:
    """The page, from the records."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in records:
        found.setdefault((each["pair"], each["situation"]), []).append(each)
    related = [name for name, pair in PAIRS.items() if not isinstance(pair.new, str) and (name, "labels") in found]
    apart = [name for name, pair in PAIRS.items() if isinstance(pair.new, str) and (name, "labels") in found]
    page = _TOP + _LINEAGE + "\n"
    columns = ("naive", "head", "plain-20", "plain-60", "plus-25", "teacher")
    page += _row("pair", "d/τ", "n", "tuned", "**auto**", "of tuned", "winner", "matched", *columns) + _rule(
        8 + len(columns)
    )
    for name in sorted(related, key=lambda name: _mean(found[name, "labels"], "drift")):
        runs = found[name, "labels"]
        page += _row(*_first(name, runs), *_others(name, found, columns))
    page += _APART + "\n"
    columns = (
        "naive",
        "head",
        "fgmt",
        "fgmt-sign",
        "teacher-plus-50",
        "distil-50",
        "plain-100",
        "few",
        "few-labels",
        "few-teacher",
    )
    page += _row("pair", "d/τ", "n", "tuned", "**auto**", "of tuned", "winner", "matched", *columns) + _rule(
        8 + len(columns)
    )
    for name in apart:
        page += _row(*_first(name, found[name, "labels"]), *_others(name, found, columns))
    seen = [name for name in PAIRS if (name, "seen") in found and (name, "unseen") in found]
    if seen:
        page += _SEEN + "\n"
        halves = ("tuned", "auto", "chosen", "lost")
        page += _row("pair", "n", *(f"{each}, {how}" for how in ("without", "with") for each in halves)) + _rule(10)
    for name in seen:
        page += _row(name, str(len(found[name, "seen"])), *_lost(found[name, "unseen"]), *_lost(found[name, "seen"]))
    return page


def _lost(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """What was chosen, and how far it is behind the best of the contenders on test images."""
    behind = mean(max(one["test"] for one in each["contenders"].values()) - each["test"] for each in runs)
    winners = ", ".join(sorted({each["winner"] for each in runs}))
    return _percent(runs, "tuned"), _percent(runs, "test"), winners, f"{100 * behind:.1f}"


def _first(name: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    kept = mean(each["test"] / each["tuned"] for each in runs)
    winners = ", ".join(sorted({each["winner"] for each in runs}))
    matched = (
        "yes" if all(each["matched"] for each in runs) else "some" if any(each["matched"] for each in runs) else "no"
    )
    figures = (f"{_mean(runs, 'drift'):.2f}", str(len(runs)), _percent(runs, "tuned"), f"**{_percent(runs, 'test')}**")
    return (name, *figures, f"{kept:.0%}", winners, matched)


def _others(name: str, found: Mapping[tuple[str, str], list[dict[str, Any]]], columns: tuple[str, ...]) -> list[str]:
    cells = []
    for column in columns:
        runs = found.get((name, column), [])
        if column == "head":
            made = [
                each["contenders"]["head"]["test"] for each in found[name, "labels"] if "head" in each["contenders"]
            ]
            cells.append(f"{100 * mean(made):.1f}" if made else "–")
        else:
            cells.append(_percent(runs, "test") if runs else "–")
    return cells


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return mean(each[key] for each in runs)


def _percent(runs: list[dict[str, Any]], key: str) -> str:
    return f"{100 * _mean(runs, key):.1f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _rule(count: int) -> str:
    return f"|{'---|' * count}\n"
