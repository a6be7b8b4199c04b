"""Recipes: one YAML file defines one port. Each option is declared once; the command line is derived from it."""

from hf_retarget.recipe.field import Field
from hf_retarget.recipe.options import DataOptions, PortOptions, TrainOptions
from hf_retarget.recipe.recipe import (
    SECTIONS,
    Recipe,
    choose_recipe,
    fields,
    finish_recipe,
    load_recipe,
    load_yaml,
    preset_names,
    recipe_names,
)
