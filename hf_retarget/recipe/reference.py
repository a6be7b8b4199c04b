"""Generates the tables of docs/recipes.md from the recipes and their fields: python -m hf_retarget.recipe.reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hf_retarget.files import write_text
from hf_retarget.recipe.field import Field
from hf_retarget.recipe.recipe import SECTIONS, fields, load_recipe, preset_names, recipe_names

_LINKS = {"port.method": "`auto`, `head` or [a method](matching.md#methods)"}  # a new method changes no table
_BETWEEN = re.compile(r"(<!-- tables -->\n).*(<!-- end of tables -->\n)", re.DOTALL)


def describe_recipes() -> str:
    """The recipes included in the package and all fields, as Markdown.

    Example:
        >>> "| `port.steps` | `--steps` |" in describe_recipes()
        True
    """
    lines = ["## Recipes", "", "| recipe | what it is | presets |", "|---|---|---|"]
    for name in recipe_names():
        presets = ", ".join(f"`{preset}`" for preset in preset_names(name)) or "–"
        lines.append(f"| `{name}` | {load_recipe(name).description} | {presets} |")
    for section in SECTIONS:
        lines += ["", f"## `{section}:`", "", "| field | option | value | default | meaning |", "|---|---|---|---|---|"]
        lines += [_row(field) for field in fields() if field.section == section]
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    flag = field.flag()
    option = f"`{flag}`, `--no-{flag.removeprefix('--')}`" if field.type is bool else f"`{flag}`"
    default = "–" if field.default in (None, "", ()) else f"`{str(field.default).lower()}`"
    return f"| `{field.key}` | {option} | {_LINKS.get(field.key, field.words)} | {default} | {field.help} |"


def renew(page: str) -> str:
    """Update the tables of a page.

    Example:
        >>> "rusty" in renew("<!-- tables -->\\nrusty\\n<!-- end of tables -->\\n")
        False
    """
    return _BETWEEN.sub(lambda found: f"{found[1]}\n{describe_recipes()}\n{found[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/recipes.md")
    write_text(path, renew(path.read_text(encoding="utf-8")))
