"""Recipes: everything that defines a port, as a frozen value; their files and presets, and the meaning of `--data`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hf_retarget.errors import RecipeError, RetargetError
from hf_retarget.files import write_text
from hf_retarget.recipe.field import Field, fields_of
from hf_retarget.recipe.options import DataOptions, PortOptions, TrainOptions
from hf_retarget.untrusted import read_yaml
from hf_retarget.words import nearest

_PACKAGE = Path(__file__).parent.parent
SECTIONS: Mapping[str, type] = {each.section: each for each in (DataOptions, PortOptions, TrainOptions)}

_TEXTS = ("name", "description")
_LENGTHS = {"steps", "epochs"}
_SUFFIXES = (".yaml", ".yml")
_RENAMED = {"port.check": "verify"}  # in recipes of earlier ports


def fields() -> tuple[Field, ...]:
    """All options, by section.

    Example:
        >>> [field.flag() for field in fields() if field.name == "batch_size"]
        ['--batch-size', '--finetune-batch-size']
    """
    return tuple(each for section, options in SECTIONS.items() for each in fields_of(options, section))


@dataclass(frozen=True)
class Recipe:
    """The options of data, port, and fine-tuning after the port (none unless it has steps or epochs).

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
        """A copy with other values, named as in `port.steps`."""
        changes: dict[str, Any] = {}
        for key, value in values.items():
            section, dot, name = key.partition(".")
            if not dot:
                hint = nearest(key, [each.key for each in fields()])
                raise RecipeError(f"'{key}' has no section{hint}; write it like 'port.steps'")
            changes.setdefault(section, {})[name] = value
        return self.changed(changes)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with the changes of a document with sections, such as a preset."""
        parts: dict[str, Any] = {}
        for key, value in changes.items():
            if key in _TEXTS:
                parts[key] = Field("recipe", key, str).read(value)
            elif key in SECTIONS:
                parts[key] = _changed_section(getattr(self, key), key, value)
            else:
                known = (*_TEXTS, *SECTIONS)
                raise RecipeError(f"unknown section '{key}'{nearest(key, known)} (there are {', '.join(known)})")
        # The port's seed is also that of its fine-tuning, unless both are given.
        if "seed" in (changes.get("port") or ()) and "seed" not in (changes.get("finetune") or ()):
            parts["finetune"] = replace(parts.get("finetune", self.finetune), seed=parts["port"].seed)
        return replace(self, **parts)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Recipe:
        """The recipe of a document, with defaults for missing values."""
        return cls().changed(document)

    def to_dict(self) -> dict[str, Any]:
        """All fields, including defaults, in types of JSON and YAML."""
        document = asdict(self)
        for section in SECTIONS:
            for name, value in document[section].items():
                document[section][name] = list(value) if isinstance(value, tuple) else value
        return document

    def to_yaml(self) -> str:
        """All fields as YAML, for `load_recipe`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def save(self, path: str | Path) -> None:
        """Write it as YAML, atomically."""
        write_text(path, self.to_yaml())


def _changed_section(options: Any, section: str, changes: Any) -> Any:
    known = {each.name: each for each in fields_of(type(options), section)}
    if changes is None:  # a section whose lines are all comments
        return options
    if not isinstance(changes, Mapping):
        raise RecipeError(f"{section} is {changes!r}, but must be a section with fields like '{next(iter(known))}: …'")
    values: dict[str, Any] = {}
    for name, value in changes.items():
        name = _RENAMED.get(f"{section}.{name}", name)
        if name not in known:
            hint = nearest(name, known) or f" (there are {', '.join(known)})"
            raise RecipeError(f"unknown field '{section}.{name}'{hint}")
        values[name] = known[name].read(value)
    # Steps and epochs are alternatives, so setting one resets the other.
    if section == "finetune" and len(_LENGTHS & set(values)) == 1:
        values |= dict.fromkeys(_LENGTHS - set(values), 0)
    try:
        return replace(options, **values)
    except RetargetError as error:
        raise RecipeError(f"{section}: {error}") from error


# ---- finding and reading recipes


def recipe_names() -> tuple[str, ...]:
    """The recipes included in the package, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_recipe(reference: str | Path, preset: str | None = None) -> Recipe:
    """Load a recipe by name or file, optionally with one of its presets (also written `cub@released-code`).

    Example:
        >>> load_recipe("cub").port.grad_batches, load_recipe("cub", "released-code").port.grad_batches
        (5, 10)
    """
    path, preset = _locate(reference, preset)
    recipe, presets = _read(path)
    if preset is None:
        return recipe
    if preset not in presets:
        names = f" (it has {', '.join(presets)})" if presets else " (it has none)"
        raise RecipeError(f"recipe '{recipe.name}' has no preset '{preset}'{nearest(preset, presets)}{names}")
    return presets[preset]


def preset_names(reference: str | Path) -> tuple[str, ...]:
    """The presets of a recipe, in the order of its file.

    Example:
        >>> preset_names("cub")
        ('paper', 'released-code', 'source')
    """
    return tuple(_read(_locate(reference, None)[0])[1])


def choose_recipe(
    data: str | None = None,
    recipe: str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe for a user's request, where `data` is the name or file of a recipe or any other reference to data.

    Data that is not a recipe gets the defaults. With `recipe`, `data` replaces its whole data section; to keep splits
    and columns and change only the source of the images, override `data.reference`.

    Example:
        >>> choose_recipe("photos/", recipe="cub", overrides={"port.seed": 1}).data.reference
        'photos/'
    """
    if recipe is None and data is not None and _is_recipe(data):
        recipe, data = data, None
    if recipe is not None:
        chosen = load_recipe(recipe, preset)
    elif preset is not None:
        raise RecipeError(f"the preset '{preset}' needs a recipe; name one, such as '{recipe_names()[0]}'")
    else:
        chosen = Recipe()
    if data is not None:
        chosen = replace(chosen, data=_data_options(data))
    return chosen.override(**overrides or {})


def _data_options(data: str) -> DataOptions:
    if _is_recipe(data):
        return load_recipe(data).data
    near = [path.name for path in Path().iterdir() if path.is_dir()] if "/" not in data else []
    meant = nearest(data, [*recipe_names(), *near])
    if meant and data != "none" and "/" not in data and not Path(data).exists():
        raise RecipeError(
            f"no recipe or data '{data}'{meant} Write a dataset on the Hub as org/name, a folder as ./name"
        )
    return DataOptions(reference=data)


def _is_recipe(data: str) -> bool:
    name, at, _ = data.partition("@")
    return data.endswith(_SUFFIXES) or name in recipe_names() or (bool(at) and name.endswith(_SUFFIXES))


def _folder() -> Path:
    # A wheel has the recipes inside the package, a checkout beside it.
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parent / "recipes"


def _locate(reference: str | Path, preset: str | None) -> tuple[Path, str | None]:
    text, at, tail = str(reference).rpartition("@")
    if not at or "/" in tail or Path(reference).is_file():
        text = str(reference)
    elif preset not in (None, tail):
        raise RecipeError(f"'{reference}' names the preset '{tail}', but '{preset}' was asked for; give only one")
    else:
        preset = tail
    if isinstance(reference, Path) or text.endswith(_SUFFIXES):
        return Path(text), preset
    names = recipe_names()
    if text not in names:
        raise RecipeError(
            f"no recipe '{text}'{nearest(text, names)} (there are {', '.join(names)}; a file must end in .yaml)"
        )
    return _folder() / f"{text}.yaml", preset


def _read(path: Path) -> tuple[Recipe, dict[str, Recipe]]:
    """Read the recipe of a file and all its presets, so that errors in any of them are found."""
    if not os.path.exists(path):
        raise RecipeError(f"there is no recipe file '{path}'; 'hf-retarget recipes list' shows those included")
    document = load_yaml(path, "recipe")
    if not isinstance(document, dict):
        raise RecipeError(f"recipe '{path}' has no sections; see 'hf-retarget recipes show cub' for an example")
    presets = document.pop("presets", None) or {}
    where = f"recipe '{path}'"
    try:
        recipe = Recipe.from_dict({"name": path.stem} | document)
        if not isinstance(presets, dict):
            raise RecipeError(f"presets is {presets!r}, but must be a section of presets")
        found = {}
        for name, changes in presets.items():
            where = f"recipe '{path}', preset '{name}'"
            if not isinstance(changes, dict | None):
                raise RecipeError(f"is {changes!r}, but must have sections, such as 'port:'")
            found[str(name)] = recipe.changed((changes or {}) | {"name": f"{recipe.name}@{name}"})
        return recipe, found
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def load_yaml(path: str | Path, what: str) -> Any:
    """Read a file that a user wrote; RecipeError names the file and the line that is wrong."""
    try:
        return read_yaml(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the {what} '{path}': {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{what} '{path}'{line}: {getattr(error, 'problem', None) or error}") from error


def finish_recipe(
    data: Any = None,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Any]:
    """The recipe of a Python call, and the images if they are passed in memory (otherwise the recipe names them).

    Example:
        >>> finish_recipe("fashion-mnist", overrides={"port.steps": 3})[0].port.steps
        3
    """
    name, images = None, data
    if data is None or isinstance(data, str | Path):
        name, images = str(data or "") or None, ""
    if not isinstance(recipe, Recipe):
        return choose_recipe(name, recipe, preset, overrides), images
    if preset is not None:
        raise RecipeError(f"the preset '{preset}' needs the name of a recipe, not a Recipe")
    if name is not None:
        recipe = recipe.override(**{"data.reference": name})
    return recipe.override(**overrides or {}), images
