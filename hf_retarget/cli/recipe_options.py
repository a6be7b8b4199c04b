"""Command line options derived from the fields of a recipe, and help in sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from hf_retarget.cli.options import complete_paths
from hf_retarget.errors import RecipeError
from hf_retarget.recipe import Field, choose_recipe, fields, preset_names, recipe_names

_TITLES = {"data": "Data", "port": "Port", "finetune": "Fine-tuning"}


_HEADINGS = {
    "Models": "--arch --allow-pickle --preprocess --num-classes --token",
    "Result": "--out --dtype --dry-run --json --resume --overwrite --no-lock",
    "Hub": "--push-to-hub --private --hub-revision --commit-message --create-pr --replace-card",
    "Running": "--device --precision --num-workers --quiet --debug --help --help-all",
}
_ALL = "hf_retarget.help_all"  # key in `click.Context.meta`: whether to show all options


class SectionedCommand(click.Command):
    """A command whose help shows the options of a recipe in sections, after its own.

    With `common`, a list of the most used flags, ``--help`` shows only these and required options, and ``--help-all``
    shows everything.
    """

    def __init__(self, *arguments: Any, common: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.common = [*common.split(), "--help", "--help-all"] if common else []
        if common:
            add = click.option("--help-all", is_flag=True, expose_value=False, is_eager=True, callback=_show_all,
                               help="Show all options, group by group.")  # fmt: skip
            add(self)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        headings: dict[str, list[tuple[str, str]]] = {"Required": [], "Often used": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            heading = self._choose_heading(parameter, ctx)
            if record is not None and heading:
                headings.setdefault(heading, []).append((record[0], record[1].removesuffix("  [required]")))
        for heading, records in headings.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=26 if self.common else 30)

    def _choose_heading(self, parameter: click.Parameter, ctx: click.Context) -> str | None:
        if isinstance(parameter, click.Argument):
            return None
        if self.common and (parameter.required or isinstance(parameter, _NeededOption)):
            return "Required"
        if self.common and not ctx.meta.get(_ALL):
            return "Often used" if set(parameter.opts) & set(self.common) else None
        if isinstance(parameter, _FieldOption):
            return f"{_TITLES[parameter.field.section]} (defaults, unless set by the recipe)"
        found = (title for title, flags in _HEADINGS.items() if set(parameter.opts) & set(flags.split()))
        return next(found, "Options") if self.common else "Options"


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def recipe_options(
    *sections: str, plain: str = "port", required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--data`, `--recipe`, `--preset` and the fields of the given sections (default: all) to a command.

    The command receives them as one argument, the Recipe `recipe`. Fields of the section `plain` have no prefix:
    `--steps`, but `--finetune-steps`. Unless `required`, the defaults are used without data.

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
            overrides = _take_overrides(options)
            return command(*arguments, recipe=choose_recipe(data, recipe, preset, overrides), **options)

        for field in reversed(fields()):
            if not sections or field.section in sections:
                _add_field(with_recipe, field, plain)
        for add in reversed(_name_recipe(_NeededOption if required else click.Option)):
            add(with_recipe)
        return with_recipe

    return decorate


def _take_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a recipe from the options of a command, and return those given by the user."""
    ctx = click.get_current_context()
    overrides = {}
    for parameter in ctx.command.params:
        if isinstance(parameter, _FieldOption):
            name, field = str(parameter.name), parameter.field
            value = options.pop(name)
            # Checked by source, because the value of `--compress none` is None.
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
                overrides[field.key] = () if field.type is tuple and value == ("none",) else value
    return overrides


class RecipeName(click.ParamType[str]):
    """The name of a recipe, or another reference to data; shells complete both."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept any text."""
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete recipes with their presets, and files."""
        names = [word for name in recipe_names() for word in (name, *(f"{name}@{each}" for each in preset_names(name)))]
        # Paths first: click's script for bash forgets what precedes them.
        return [*complete_paths(ctx, param, incomplete), *_complete(names, incomplete)]


class _NeededOption(click.Option):
    """A required option; click's `required` could not be satisfied by --recipe."""


def _name_recipe(kind: type[click.Option]) -> tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...]:
    data = "Recipe (cub, cub@released-code, mine.yaml), Hub dataset, image folder, or parquet or arrow file."
    return (
        click.option("--data", cls=kind, type=RecipeName(), metavar="NAME", help=data),
        click.option("--recipe", type=RecipeName(), metavar="NAME", help="Recipe, if --data replaces the data in it."),
        click.option("--preset", metavar="NAME", help="Preset of the recipe (also: cub@released-code)."),
    )


class _FieldOption(click.Option):
    """An option for a field of a recipe."""

    def __init__(self, *names: Any, field: Field, **options: Any) -> None:
        super().__init__(*names, **options)
        self.field = field


class _FieldType(click.ParamType[Any]):
    """The click type of a field, with the checks of the recipe."""

    name = "text"

    def __init__(self, field: Field) -> None:
        self.field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a value like the recipe."""
        try:
            return self.field.parse(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the choices of the field."""
        return _complete(self.field.choices, incomplete)


def _complete(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _add_field(command: Callable[..., Any], field: Field, plain: str) -> None:
    flag, help = field.flag(plain), f"{field.help[0].upper()}{field.help[1:]}."
    many = len(field.choices) > 5  # too many for the column of flags
    help += f" One of {', '.join(field.choices)}." if many else ""
    options: dict[str, Any] = {"metavar": "NUMBER" if field.type in (int, float) else "TEXT"}
    if field.type is bool:
        help += " [on]" if field.default else " [off]"
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
        options = {}
    elif field.type is tuple:
        help += " May be repeated."
        options["multiple"] = True
    else:
        help += f" [{field.default}]" if field.default not in (None, "") else ""
        options["type"] = _FieldType(field)
    if field.choices:
        options["metavar"] = "NAME" if many else f"[{'|'.join(field.choices)}]"
    parameter = f"recipe_{field.section}_{field.name}"  # cannot clash with a command's own parameters, such as `data`
    click.option(flag, parameter, cls=_FieldOption, field=field, default=None, help=help, **options)(command)
