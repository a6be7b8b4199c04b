"""Finished ports, as far as one compares them: read from their port.json, checked, and taken apart into fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

PORT = "port.json"
FORMAT = "hf-retarget/port/1"
"""As in `hf_retarget.pipeline.document`, which would import torch; a test compares them."""

SCORES = ("port", "naive", "masked", "oracle", "control", "finetuned", "tuned", "tuned_target", "base")
"""Test accuracies that a port.json may have, the most telling first."""

SEEDS = ("port.seed", "finetune.seed")
"""Fields that make a run a repetition of another."""

BESIDES = ("port.check", "port.control", "port.samples")
"""Fields that decide how a port is checked, compared and shown, not what it is."""

_SIDES = ("source", "tuned", "target", "tuned_target")

Curve = tuple[tuple[float, float], ...]
"""(step or training images, validation accuracy)."""


class Damaged(Exception):
    """A port.json that cannot be used; the message is the fact."""


@dataclass(frozen=True)
class Run:
    """One port."""

    name: str
    """Its folder, as short as it tells it from the others."""
    folder: str
    fields: Mapping[str, Any] = field(repr=False)
    """All that decided about it: recipe fields, models, data, by names such as `port.method` and `target`."""
    top1: Mapping[str, float]
    """Test accuracies by name: `port`, `naive`, `control` …; those that there are."""
    loss: Mapping[str, float | None]
    best_step: int
    steps: int
    """Planned ones."""
    minibatches: int
    """Gradients of a minibatch that the port took."""
    control_minibatches: int
    """Those of the control."""
    seconds: float
    curve: Curve = field(repr=False)
    curves: Mapping[str, Curve] = field(repr=False)
    """`finetuned` and `control` over the training images they have seen, where there are such."""
    chance: float = 0.0
    verdict: str = ""


def read_runs(places: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The ports in some folders, in folders of folders, or given as port.json; and one line for each that is none.

    Example:
        >>> read_runs(["nowhere"])
        ([], ["'nowhere' is not there"])
    """
    documents: dict[Path, dict[str, Any]] = {}
    problems = []
    for place in places:
        found, words = _find(Path(place))
        problems += words
        for path in found:
            try:
                documents.setdefault(path, _load(path))
            except Damaged as error:
                problems.append(f"'{path}' {error}")
    runs = []
    names = _short_names([path.parent for path in documents])
    for (path, document), name in zip(documents.items(), names, strict=True):
        try:
            runs.append(_take_apart(name, path.parent, document))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            problems.append(f"'{path}' is damaged: {type(error).__name__}: {error}; make the port again")
    return runs, problems


def _find(place: Path) -> tuple[list[Path], list[str]]:
    if place.is_file():
        return [place], []
    if not place.is_dir():
        return [], [f"'{place}' is not there"]
    if (place / PORT).is_file():
        return [place / PORT], []
    inside = sorted(place.glob(f"*/{PORT}"))
    return inside, [] if inside else [f"'{place}' has no {PORT}, nor have the folders in it; is it a finished port?"]


def _load(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, MAX_DOCUMENT_BYTES)
    except (OSError, ValueError) as error:
        raise Damaged(f"cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        kind = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise Damaged(f"is no port: its format is {kind!r}, not {FORMAT!r}")
    return document


def _take_apart(name: str, folder: Path, document: Mapping[str, Any]) -> Run:
    test = document["test"]
    top1 = {each: _share(test[each]["top1"]) for each in SCORES if each in test}
    if "port" not in top1:
        raise KeyError("test.port")
    return Run(
        name=name,
        folder=str(folder),
        fields=_fields(document),
        top1=top1,
        loss={each: test[each]["loss"] for each in top1},
        best_step=int(document["best_step"]),
        steps=int(document["steps_planned"]),
        minibatches=int(document["gradients"]["port"]),
        control_minibatches=int(document["gradients"]["control"]),
        seconds=_finite(math.fsum(document["seconds"].values())),
        curve=_curve((each["step"], each["top1"]) for each in document["steps"]),
        curves=_price_curves(document),
        chance=1 / int(document["inputs"]["data"]["classes"]),
        verdict=str(document.get("verdict", "")),
    )


def _price_curves(document: Mapping[str, Any]) -> dict[str, Curve]:
    """In images, because minibatches before and after the port may differ in size."""
    spent, recipe = document["gradients"]["port"], document["recipe"]
    size, after = recipe["port"]["batch_size"], recipe["finetune"]["batch_size"]
    curves = document["curves"]
    prices = {
        "finetuned": [(size * spent + after * (at - spent), top1) for at, top1 in curves.get("finetuned") or ()],
        "control": [(size * at, top1) for at, top1 in curves.get("control") or ()],
    }
    return {name: _curve(points) for name, points in prices.items() if points}


def _fields(document: Mapping[str, Any]) -> dict[str, Any]:
    recipe, inputs = document["recipe"], document["inputs"]
    fields = {
        f"{section}.{key}": _plain(value)
        for section in ("port", "finetune", "data")
        for key, value in recipe[section].items()
    }
    fields.pop("data.reference", None)  # where the images lie does not count, only what they are
    for side in _SIDES:
        if side in inputs:
            fields[side] = _identify(inputs[side])
    return fields | {
        "architecture": str(inputs["target"]["architecture"]),
        "data": f"{inputs['data']['name']} ({inputs['data']['fingerprint'][:8]})",
        "head": str(document["head"]["policy"]),
        "permutation": "given" if document["permutation"]["given"] else "found",
        "precision": str(document.get("device", {}).get("precision", "no")),
    }


def _identify(side: Mapping[str, Any]) -> str:
    """The end of the reference for people, and the beginning of a hash for certainty."""
    hashes = "".join(str(side["hashes"][key]) for key in sorted(side["hashes"]))
    return f"{Path(str(side['reference'])).name} ({hashes[:8]})"


def _plain(value: Any) -> Any:
    """A value of a recipe, which can be compared and counted: a list as a tuple, what no recipe holds as text."""
    if isinstance(value, list):
        return tuple(map(str, value))
    return str(value) if isinstance(value, dict) else value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a number is {value}")
    return value


def _share(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"an accuracy is {value!r}")
    return float(value)


def _curve(points: Iterable[Any]) -> Curve:
    return tuple((_finite(float(at)), _share(top1)) for at, top1 in points)


def _short_names(folders: list[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while length < max(map(len, parts), default=1) and len({each[-length:] for each in parts}) < len(parts):
        length += 1
    return ["/".join(each[-length:]) for each in parts]
