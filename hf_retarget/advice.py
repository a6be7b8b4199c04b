"""What to do after a port: the command that follows from its verdict, with the inputs as they were given."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_retarget.document import ContenderFigures, Lead, PortDocument
from hf_retarget.names import RECIPE
from hf_retarget.words import duration

_MODELS = ("src_base", "src_ft", "new_base")
_READING = ("arch", "allow_pickle", "preprocess")
_GIVEN = ("initial_head", "checkpoints", "permutation", "tuned_target")
PORTED, HEAD, RETRAIN, KEEP, UNSCORED = "port", "fit a head", "retrain", "keep", "port, not scored"
RIGHT = 0.95
"""How often the advice of `check` was right, within a point of accuracy, in the cases of docs/pays.md."""

_STEPS = 200
"""Steps of a suggested further fine-tuning."""


def advise(document: PortDocument, out: str, options: Mapping[str, Any], data: str = "") -> str:
    """The command that follows from the verdict; empty for adapters, and if a model or the data were Python objects.

    `options` are the arguments of the port; `data` is the location of its images, if its saved recipe lacks it.
    """
    models = {name: str(options.get(name) or "") for name in _MODELS}
    texts = all(isinstance(options.get(name), (str, Path)) for name in _MODELS)
    if not texts or not document.contenders or not document.recipe.get("data", {}).get("reference"):
        return ""
    images = ["--data", f"{out.rstrip('/')}/{RECIPE}", *(["--data-reference", data] if data else [])]
    teacher = [] if document.labelled else ["--teacher", models["src_ft"]]
    reading = _flags(options, _READING)
    again = ["port", *_flags(models, _MODELS), *images, *reading, *_flags(options, _GIVEN)]
    if choose_action(document) == KEEP:
        return shlex.join(["hf-retarget", "evaluate", models["src_ft"], *images, *reading])
    better = find_better(document)
    if document.adapter and not (better and better.row.is_alternative):
        return ""  # no command continues from an adapter
    port, row = document.recipe["port"], document.port.row
    suffices = row.instead and not row.step  # a head, say: no port was needed
    if better is None and document.alternative is None and not suffices and port["control"] != "full":
        return _join(again, ["--control", "full"], out, "compared")
    if better is None:
        return _join(["finetune", out, *images, *reading, *teacher], ["--steps", str(_STEPS)], out, "finetuned")
    if not better.row.is_alternative:
        return _join(again, ["--method", better.name], out, better.name)
    rate = re.search(r"\blr ([0-9.e-]+)", better.detail)  # the best of those tried
    ways = ["--steps", str(max(_STEPS, better.gradients)), "--batch-size", str(port["batch_size"])]
    ways += ["--lr", rate[1]] if rate else []
    return _join(["finetune", models["new_base"], *images, *reading, *teacher], ways, out, "plain")


def choose_action(document: PortDocument) -> str:
    """The recommended action: what the verdict says, or `keep` if that is behind the tuned model.

    A port that is not clearly worse than its alternatives stays `port`.
    """
    if not document.contenders:
        return UNSCORED
    best, tuned = find_better(document) or document.result, document.original
    action = RETRAIN if best.row.is_alternative else HEAD if best.row.stands_alone else PORTED
    behind = action != PORTED and tuned is not None and _is_clearly_better(tuned, best)
    return KEEP if behind else action


def find_better(document: PortDocument) -> ContenderFigures | None:
    """The best alternative on the new base that is clearly ahead of the result, if any."""
    ahead = [
        each
        for each in document.contenders
        if each.row.instead and each.row.may_replace and each.lead and each.lead.is_behind
    ]
    return max(ahead, key=lambda each: each.test.top1, default=None)


def compare_times(document: PortDocument) -> str:
    """The time of the port, including all contenders that could win, and of plain fine-tuning; empty if unknown."""
    plain = document.alternative
    spent = sum(each.seconds for each in document.contenders if each.role != "beside")
    if plain is None or not plain.seconds or not spent:
        return ""
    return f"{duration(spent)} for the port, {duration(plain.seconds)} for plain fine-tuning, each including its search"


def _is_clearly_better(one: ContenderFigures, other: ContenderFigures) -> bool:
    """Compare two contenders by their leads; on a second set of images, if any, the first must be ahead as well."""
    mine, theirs = (each.lead or Lead(0.0, 0.0) for each in (one, other))  # the result has no lead over itself
    ahead = Lead(theirs.value - mine.value, math.hypot(mine.error, theirs.error))
    also = one.also is None or other.also is None or one.also.top1 > other.also.top1
    return ahead.value > 0 and ahead.is_clear and also


def _flags(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The given options as words of a command; Python objects are left out."""
    words: list[str] = []
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", options.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if value is True:
            words.append(flag)
        for each in values:
            words += [flag, str(each)] if isinstance(each, (str, Path)) else []
    return words


def _join(command: Sequence[str], ways: Sequence[str], out: str, suffix: str) -> str:
    return shlex.join(["hf-retarget", *command, *ways, "--out", f"{out.rstrip('/')}-{suffix}"])
