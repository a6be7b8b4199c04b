"""Options of a recipe: type, default, help and limits, read from a dataclass, and validation of values."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_retarget.errors import RecipeError
from hf_retarget.words import nearest


@dataclass(frozen=True)
class Field:
    """One option, from which recipes, the command line and the documentation are derived.

    Example:
        >>> steps = Field("port", "steps", int, default=10, help="number of steps", least=1)
        >>> steps.key, steps.flag(), steps.read(5)
        ('port.steps', '--steps', 5)
        >>> steps.read("many")
        Traceback (most recent call last):
        hf_retarget.errors.RecipeError: port.steps is 'many', but must be a whole number, at least 1
    """

    section: str
    name: str
    type: type
    """str, int, float, bool, or tuple for a list of strings."""
    optional: bool = False
    """Whether null is allowed."""
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def key(self) -> str:
        """Section and name, as in `port.steps`."""
        return f"{self.section}.{self.name}"

    @property
    def words(self) -> str:
        """A description of valid values."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]
        words += "".join(f", {word} {limit:g}" for word, _, limit in self._limits() if limit < _MANY)
        return words + (", or null" if self.optional else "")

    def flag(self, plain: str = "port") -> str:
        """The option on the command line; the section `plain` has no prefix."""
        name = self.name if self.section == plain else f"{self.section}-{self.name}"
        return "--" + name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """Convert and validate a value; raise RecipeError if it is invalid."""
        if value is None and self.optional:
            return None
        read = None
        try:
            read = _convert(value, self.type)
            if self.choices and read not in self.choices:
                raise ValueError
            if not all(holds(read, limit) for _, holds, limit in self._limits()):
                raise ValueError
        except ValueError:
            hint = nearest(value, self.choices)
            if isinstance(read, int | float) and self.most is not None and read > self.most >= _MANY:
                hint = f", and at most {self.most:,}"
            if self.type in (str, tuple) and not self.choices and value is not None:
                hint = "; put it in quotes" if self.type is str else "; put each in quotes"
            raise RecipeError(f"{self.key} is {value!r:.200}, but must be {self.words}{hint}") from None
        if isinstance(read, str | tuple) and any("\0" in each for each in read):
            raise RecipeError(f"{self.key} is {read!r:.200}, and holds a zero byte, which no name has")
        return read

    def parse(self, text: str) -> Any:
        """Read a value from the command line, where `none` means null."""
        if self.optional and text.lower() == "none":
            return None
        if self.type is int and re.fullmatch("-?[0-9]{1,20}", text):
            return self.read(int(text))
        return self.read(text)

    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        limits = [(word, holds, getattr(self, name)) for name, (word, holds) in _LIMITS.items()]
        return [each for each in limits if each[2] is not None]


def fields_of(options: Any, section: str) -> tuple[Field, ...]:
    """The fields of an options dataclass, whose metadata contain `help` and optionally `choices` and limits."""
    hints = get_type_hints(options)
    found = []
    for each in fields(options):
        kind, optional, literals = _resolve(hints[each.name])
        limits = {name: each.metadata.get(name) for name in _LIMITS}
        choices = tuple(each.metadata.get("choices", literals))
        if kind is int and limits["most"] is None:
            limits["most"] = _MANY
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found.append(Field(section, each.name, kind, optional, default, each.metadata["help"], choices, **limits))
    return tuple(found)


def _resolve(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    # `int | None` → (int, True, ()); Literal["a", "b"] → (str, False, ("a", "b")); tuple[str, ...] → (tuple, False, ())
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        kind, _, choices = _resolve(inner)
        return kind, True, choices
    if origin is Literal:
        return str, False, arguments
    return origin or hint, False, ()


def _convert(value: Any, kind: type) -> Any:
    """Convert a value to the type of a field; raise ValueError if it has another type."""
    if kind is float:
        # In YAML 1.1, 1e-4 without a dot is a string.
        if type(value) in (int, float, str) and math.isfinite(float(value)):
            return float(value)
    elif kind is tuple:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
    elif type(value) is kind:  # not isinstance: True is not a number
        return value
    raise ValueError


_MANY = 999_999
"""The limit of integers that declare none: more steps or minibatches than any port needs."""
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}
_WORDS: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    float: "a number",
    tuple: "a list of strings",
}
