"""The options of a recipe on the command line: one for each field, derived from it, and help in sections."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from hf_retarget.errors import RecipeError
from hf_retarget.recipe import Field, choose_recipe, fields

_OVERRIDES = "hf_retarget.overrides"
_TITLES = {"data": "Data", "port": "Port", "finetune": "Fine-tuning"}
_NOTE = "(defaults; a recipe may say otherwise)"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command whose help shows the options of a recipe section by section, after its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        headings: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                heading = parameter.heading if isinstance(parameter, _RecipeOption) else "Options"
                headings.setdefault(heading, []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def recipe_options(
    *sections: str, plain: str = "port", required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--data`, `--recipe`, `--preset` and the fields of some sections (all if none is named).

    The command receives one argument for all of them: `recipe`, a Recipe. The fields of the section `plain` go without
    a prefix: `--steps`, but `--finetune-steps`. Unless `required`, a command without data gets the defaults.

    Example:
        >>> @click.command(cls=SectionedCommand)
        ... @recipe_options("data", "finetune", plain="finetune")
        ... def train(recipe):
        ...     click.echo(f"{recipe.data.reference} {recipe.finetune.lr}")
        >>> train(["--data", "photos/", "--lr", "0.1"], standalone_mode=False)
        photos/ 0.1
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_recipe(
            *arguments: Any, data: str | None, recipe: str | None, preset: str | None, **options: Any
        ) -> Any:
            if required and data is None and recipe is None:
                raise click.UsageError("Missing option '--data'; 'hf-retarget recipes list' shows the recipes.")
            overrides = click.get_current_context().meta.get(_OVERRIDES, {})
            return command(*arguments, recipe=choose_recipe(data, recipe, preset, overrides), **options)

        for field in reversed(fields()):
            if not sections or field.section in sections:
                _add_field(with_recipe, field, plain)
        for add in reversed(_NAMED):
            add(with_recipe)
        return with_recipe

    return decorate


_NAMED = (
    click.option(
        "--data",
        metavar="NAME",
        help="Recipe (cub, cub@released-code, mine.yaml), dataset of the Hub, image folder, or parquet or arrow file.",
    ),
    click.option("--recipe", metavar="NAME", help="Recipe, if --data is to replace the data in it."),
    click.option("--preset", metavar="NAME", help="Preset of the recipe (also: cub@released-code)."),
)


class _RecipeOption(click.Option):
    """An option that stands for a field of a recipe and knows its heading."""

    def __init__(self, *names: Any, field: Field, **options: Any) -> None:
        super().__init__(*names, **options)
        self.field = field

    @property
    def heading(self) -> str:
        return f"{_TITLES[self.field.section]} {_NOTE}"


class _FieldType(click.ParamType[Any]):
    """The type of a field: what a recipe refuses is wrong usage here."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.name = {int: "number", float: "number"}.get(field.type, "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The choices if there are any, else the kind of value."""
        return f"[{'|'.join(self.field.choices)}]" if self.field.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a value as a recipe would."""
        try:
            return self.field.parse(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)


def _add_field(command: _Function, field: Field, plain: str) -> _Function:
    flag = field.flag(plain)
    default = "" if field.default in (None, "", ()) or field.type is bool else f" [{field.default}]"
    options: dict[str, Any] = {"help": _sentence(field.help) + default, "expose_value": False, "callback": _note}
    if field.type is bool:
        options["help"] += " [on]" if field.default else " [off]"
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    elif field.type is tuple:
        options |= {"multiple": True, "metavar": "TEXT", "help": f"{options['help']} May be repeated."}
    else:
        options["type"] = _FieldType(field)
    return click.option(flag, _parameter(field), cls=_RecipeOption, field=field, default=None, **options)(command)


def _parameter(field: Field) -> str:
    # Never the name of a command's own parameter, such as `data` or `recipe`.
    return f"recipe_{field.section}_{field.name}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    # By its source, not by its value: `--compress none` was given, and is None.
    given = ctx.get_parameter_source(str(parameter.name)) not in (None, ParameterSource.DEFAULT)
    if given and isinstance(parameter, _RecipeOption):
        value = () if parameter.field.type is tuple and value == ("none",) else value
        ctx.meta.setdefault(_OVERRIDES, {})[parameter.field.key] = value
