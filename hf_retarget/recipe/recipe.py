"""A recipe: everything that fixes one port, as a frozen value that can be changed, written down and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_retarget.data.options import DataOptions
from hf_retarget.errors import RecipeError, RetargetError
from hf_retarget.files import write_text
from hf_retarget.recipe.field import Field, fields_of, nearest
from hf_retarget.recipe.options import PortOptions
from hf_retarget.training.options import TrainOptions

SECTIONS: Mapping[str, type] = {"data": DataOptions, "port": PortOptions, "finetune": TrainOptions}

_TEXTS = ("name", "description")
_LENGTHS = {"steps", "epochs"}


def fields() -> tuple[Field, ...]:
    """Every option there is, section by section.

    Example:
        >>> [field.flag() for field in fields() if field.name == "batch_size"]
        ['--batch-size', '--finetune-batch-size']
    """
    return tuple(each for section, options in SECTIONS.items() for each in fields_of(options, section))


@dataclass(frozen=True)
class Recipe:
    """Data, port, and the fine-tuning after the port (none unless it has steps or epochs).

    Example:
        >>> recipe = Recipe("mine").override(**{"port.steps": 5, "data.reference": "photos/"})
        >>> recipe.port.steps, recipe.data.reference
        (5, 'photos/')
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    name: str = "custom"
    description: str = ""
    data: DataOptions = field(default_factory=DataOptions)
    port: PortOptions = field(default_factory=PortOptions)
    finetune: TrainOptions = field(default_factory=TrainOptions)

    def override(self, **values: Any) -> Recipe:
        """The same recipe with other values, named as in `port.steps`."""
        changes: dict[str, Any] = {}
        for key, value in values.items():
            section, dot, name = key.partition(".")
            if not dot:
                raise RecipeError(
                    f"'{key}' does not say its section{nearest(key, _keys())}; write it like 'port.steps'"
                )
            changes.setdefault(section, {})[name] = value
        return self.changed(changes)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """The same recipe after the changes of a document with sections, as a preset has them."""
        parts: dict[str, Any] = {}
        for key, value in changes.items():
            if key in _TEXTS:
                parts[key] = Field("recipe", key, str).read(value)
            elif key in SECTIONS:
                parts[key] = _changed_section(getattr(self, key), key, value)
            else:
                known = (*_TEXTS, *SECTIONS)
                raise RecipeError(f"unknown section '{key}'{nearest(key, known)} (there are {', '.join(known)})")
        return replace(self, **parts)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Recipe:
        """The recipe of a document; what it does not say has its default."""
        return cls().changed(document)

    def to_dict(self) -> dict[str, Any]:
        """All fields, those with their defaults included, as JSON and YAML know them."""
        return {
            key: {name: list(v) if isinstance(v, tuple) else v for name, v in value.items()}
            if key in SECTIONS
            else value
            for key, value in asdict(self).items()
        }

    def to_yaml(self) -> str:
        """All fields as YAML; `load_recipe` reads it back to the same recipe."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def save(self, path: str | Path) -> None:
        """Write it as YAML, wholly or not at all."""
        write_text(path, self.to_yaml())


def _keys() -> list[str]:
    return [each.key for each in fields()]


def _changed_section(options: Any, section: str, changes: Any) -> Any:
    known = {each.name: each for each in fields_of(type(options), section)}
    if changes is None:  # a section whose lines are all comments
        return options
    if not isinstance(changes, Mapping):
        raise RecipeError(f"{section} is {changes!r}, but must be a section of fields such as '{next(iter(known))}: …'")
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            hint = nearest(name, known) or f" (there are {', '.join(known)})"
            raise RecipeError(f"unknown field '{section}.{name}'{hint}")
        values[name] = known[name].read(value)
    # Steps and epochs both say how long to train: who names one has done with the other.
    if section == "finetune" and len(_LENGTHS & set(values)) == 1:
        values |= dict.fromkeys(_LENGTHS - set(values), 0)
    try:
        return replace(options, **values)
    except RetargetError as error:
        raise RecipeError(f"{section}: {error}") from error
