"""From a name or a file to a recipe: where recipes are, what presets change, and what `--data` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_retarget.errors import RecipeError
from hf_retarget.recipe.field import nearest
from hf_retarget.recipe.recipe import Recipe
from hf_retarget.untrusted import read_yaml

_PACKAGE = Path(__file__).parent.parent
_SUFFIXES = (".yaml", ".yml")


def recipe_names() -> tuple[str, ...]:
    """The recipes that come with the package, sorted.

    Example:
        >>> "cub" in recipe_names()
        True
    """
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_recipe(reference: str | Path, preset: str | None = None) -> Recipe:
    """A recipe by its name or its file, as it is or with one of its presets (also `cub@released-code`).

    Example:
        >>> load_recipe("cub").port.grad_batches, load_recipe("cub", "released-code").port.grad_batches
        (5, 10)
    """
    path, preset = _locate(reference, preset)
    recipe, presets = _read(path)
    if preset is None:
        return recipe
    if preset not in presets:
        names = f" (there are {', '.join(presets)})" if presets else " (it has none)"
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
    """The recipe for what a user said: `data` is a recipe's name or file, or any other reference to data.

    Data that is no recipe gets the defaults. With `recipe`, `data` replaces its whole data section; to keep splits and
    columns and change only where the images come from, override `data.reference`.

    Example:
        >>> choose_recipe("photos/", recipe="cub", overrides={"port.seed": 1}).data.reference
        'photos/'
    """
    if recipe is not None:
        chosen = load_recipe(recipe, preset)
        if data is not None:
            chosen = _with_data(chosen, data)
    elif data is not None and _is_recipe(data):
        chosen = load_recipe(data, preset)
    elif preset is not None:
        raise RecipeError(f"the preset '{preset}' belongs to no recipe; name one, such as '{recipe_names()[0]}'")
    else:
        chosen = _with_data(Recipe(), data) if data is not None else Recipe()
    return chosen.override(**overrides or {})


def _with_data(recipe: Recipe, data: str) -> Recipe:
    if _is_recipe(data):
        return recipe.changed({"data": load_recipe(data).to_dict()["data"]})
    meant = nearest(data, recipe_names())
    if meant and "/" not in data and not Path(data).exists():
        raise RecipeError(
            f"no recipe or data '{data}'{meant} A dataset of the Hub is written org/name, a folder ./name"
        )
    fresh = Recipe().to_dict()["data"] | {"reference": data}
    return recipe.changed({"data": fresh})


def _is_recipe(data: str) -> bool:
    name, at, _ = data.partition("@")
    return data.endswith(_SUFFIXES) or name in recipe_names() or (bool(at) and name.endswith(_SUFFIXES))


def _folder() -> Path:
    # A wheel has the recipes inside the package; a checkout has them beside it, where a newcomer finds them.
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parent / "recipes"


def _locate(reference: str | Path, preset: str | None) -> tuple[Path, str | None]:
    text, at, tail = str(reference).rpartition("@")
    if not at or "/" in tail or Path(reference).is_file():
        text = str(reference)
    elif preset not in (None, tail):
        raise RecipeError(f"'{reference}' names the preset '{tail}', but '{preset}' was asked for; say one of them")
    else:
        preset = tail
    if isinstance(reference, Path) or text.endswith(_SUFFIXES):
        return Path(text), preset
    names = recipe_names()
    if text not in names:
        raise RecipeError(
            f"no recipe '{text}'{nearest(text, names)} (there are {', '.join(names)}; a file ends in .yaml)"
        )
    return _folder() / f"{text}.yaml", preset


def _read(path: Path) -> tuple[Recipe, dict[str, Recipe]]:
    """The recipe of a file and all its presets; every one is read, so that a typo shows whichever is used."""
    try:
        document = read_yaml(path)
    except FileNotFoundError:
        raise RecipeError(
            f"there is no recipe file '{path}'; see 'hf-retarget recipes list' for those we have"
        ) from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the recipe '{path}': {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"recipe '{path}'{line}: {getattr(error, 'problem', None) or error}") from error
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
            found[str(name)] = _apply(recipe, str(name), changes)
        return recipe, found
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _apply(recipe: Recipe, preset: str, changes: Any) -> Recipe:
    if not isinstance(changes, dict | None):
        raise RecipeError(f"is {changes!r}, but must have sections, such as 'port:'")
    return recipe.changed((changes or {}) | {"name": f"{recipe.name}@{preset}"})
