"""Recipes: one YAML file fixes one port. Every option is declared once; the command line derives from it."""

from hf_retarget.recipe.field import Field
from hf_retarget.recipe.load import choose_recipe, load_recipe, preset_names, recipe_names
from hf_retarget.recipe.options import PortOptions
from hf_retarget.recipe.recipe import SECTIONS, Recipe, fields

__all__ = [
    "SECTIONS",
    "Field",
    "PortOptions",
    "Recipe",
    "choose_recipe",
    "fields",
    "load_recipe",
    "preset_names",
    "recipe_names",
]
