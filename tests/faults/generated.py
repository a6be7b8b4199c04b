"""Rows made from the fields that exist: every recipe field and every value that it cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from faults.bench import Bench, Row

from hf_retarget.recipe.field import Field
from hf_retarget.recipe.recipe import fields

# As YAML has them. A field takes those of its own type, and a text that is a number where it takes fractions.
VALUES: dict[str, tuple[type | None, str]] = {
    "nothing": (None, "null"),
    "true": (bool, "true"),
    "false": (bool, "false"),
    "yes": (bool, "yes"),
    "zero": (int, "0"),
    "one": (int, "1"),
    "minus one": (int, "-1"),
    "2^31": (int, str(2**31)),
    "2^63": (int, str(2**63)),
    "2^63 - 1": (int, str(2**63 - 1)),
    "-2^63": (int, str(-(2**63))),
    "200 digits": (int, "9" * 200),
    "half": (float, "0.5"),
    "minus half": (float, "-0.5"),
    "1e300": (float, "1.0e+300"),
    "-1e300": (float, "-1.0e+300"),
    "infinity": (float, ".inf"),
    "minus infinity": (float, "-.inf"),
    "not a number": (float, ".nan"),
    "word": (str, "nosuchword"),
    "empty text": (str, '""'),
    "zero byte": (str, '"a\\0b"'),
    "half a character": (str, '"\\uD800"'),
    "escape": (str, '"\\e[2J"'),
    "number in quotes": (str, '"3"'),
    "infinity in quotes": (str, '"inf"'),
    "long text": (str, "x" * 100_000),
    "list": (tuple, "[]"),
    "list of numbers": (tuple, "[1, 2]"),
    "list of lists": (tuple, "[[a]]"),
    "object": (dict, "{a: 1}"),
    "date": (dict, "2024-01-01"),
    "bytes": (dict, "!!binary aGk="),
    "set": (dict, "!!set {a}"),
}


def _show(field: Field, text: str, bench: Bench, folder: Path) -> tuple[object, ...]:
    (folder / "bad.yaml").write_text(f"{field.section}:\n  {field.name}: {text}\n")
    return ("recipes", "show", "bad.yaml")


def _flag(field: Field, text: str, bench: Bench, folder: Path) -> tuple[object, ...]:
    return ("port", "--src-base", "a", "--src-ft", "b", "--new-base", "c", "--data", "none", f"{field.flag()}={text}")


def accepts(field: Field, kind: type | None, text: str) -> bool:
    """Whether a field may have a value, told from its declaration and not by asking it."""
    if text in ('"\\uD800"', "9" * 200, str(2**63), str(-(2**63))) or "\\0" in text:
        return False
    if kind is None:
        return field.optional
    if kind is str and field.type is float:
        return text == '"3"' and _within(field, 3.0)
    if field.type is tuple:
        return kind is tuple and text == "[]"
    if field.type is str:
        return kind is str and not field.choices
    if field.type is bool or kind is bool:
        return field.type is kind
    if kind not in (int, float) or (field.type is int and kind is float):
        return False
    number: Any = {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}.get(text)
    number = float(text) if number is None else number
    return abs(number) < float("inf") and _within(field, int(text) if kind is int else number)


def _within(field: Field, number: float) -> bool:
    limits = (field.least, lambda a, b: a >= b), (field.most, lambda a, b: a <= b)
    strict = (field.above, lambda a, b: a > b), (field.below, lambda a, b: a < b)
    return all(limit is None or holds(number, limit) for limit, holds in (*limits, *strict))


_SHOWN = {"half a character": "surrogates", "200 digits": "too long", "2^63": "beyond", "-2^63": "beyond"}


def rows() -> Iterator[Row]:
    """One for each field and each value."""
    for field in fields():
        for name, (kind, text) in VALUES.items():
            make = partial(_show, field, text)
            alone = accepts(field, kind, text) and (
                kind is None or field.name not in ("rank", "energy")
            )  # need save_as
            says = () if alone else (_SHOWN.get(name, field.name),)
            yield Row("recipe fields", f"{field.key} is {name}", make, says, 0 if alone else 1)
