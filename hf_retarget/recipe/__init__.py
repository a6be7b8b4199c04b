"""Recipes: one YAML file fixes one port. Every option is declared once; the command line derives from it."""

from hf_retarget.recipe.field import Field
from hf_retarget.recipe.options import DataOptions, PortOptions, TrainOptions
from hf_retarget.recipe.recipe import (
    SECTIONS,
    Recipe,
    choose_recipe,
    fields,
    finish_recipe,
    load_recipe,
    preset_names,
    recipe_names,
)
