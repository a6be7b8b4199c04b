"""``hf-retarget recipes``: list recipes and show their fields."""

from __future__ import annotations

import click

from hf_retarget.cli.options import debug_option
from hf_retarget.cli.recipe_options import RecipeName
from hf_retarget.cli.show import echo, echo_json
from hf_retarget.recipe import load_recipe, preset_names, recipe_names


@click.group(epilog="Example: hf-retarget recipes show cub")
def recipes() -> None:
    """List the recipes, or show one."""


@recipes.command("list", epilog="Example: hf-retarget recipes list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@debug_option
def list_recipes(as_json: bool) -> None:
    """List the built-in recipes and their presets."""
    rows = [(name, load_recipe(name).description, preset_names(name)) for name in recipe_names()]
    if as_json:
        echo_json([{"name": name, "description": words, "presets": presets} for name, words, presets in rows])
        return
    width = max(len(name) for name, *_ in rows)
    for name, words, presets in rows:
        echo(f"{name:<{width}}  {words}")
        if presets:
            echo(f"{'':<{width}}  presets: {', '.join(f'{name}@{preset}' for preset in presets)}")


_EXAMPLE = """\b
Examples:
  hf-retarget recipes show cub
  hf-retarget recipes show cub@released-code
  hf-retarget recipes show cub > mine.yaml
"""


@recipes.command("show", epilog=_EXAMPLE)
@click.argument("name", type=RecipeName())
@click.option("--preset", metavar="NAME", help="Apply this preset (also: cub@released-code).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
@debug_option
def show_recipe(name: str, preset: str | None, as_json: bool) -> None:
    """Show all fields of a recipe.

    NAME is a built-in recipe or a .yaml file. The output is itself a recipe.
    """
    recipe = load_recipe(name, preset)
    if as_json:
        echo_json(recipe.to_dict())
    else:
        echo(recipe.to_yaml(), nl=False)
