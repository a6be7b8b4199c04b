"""The options of a recipe on the command line, one derived from each field, and help in sections."""

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
_ALL = "hf_retarget.help_all"  # the key in `click.Context.meta` that says whether all options are wanted


class SectionedCommand(click.Command):
    """A command whose help shows the options of a recipe section by section, after its own.

    With `common`, the flags that are used most, ``--help`` shows only those, the required ones first, and
    ``--help-all`` shows everything.
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
            return f"{_TITLES[parameter.field.section]} (defaults; a recipe may say otherwise)"
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
    """Move the values of fields out of the options of a command; those that were given are returned."""
    ctx = click.get_current_context()
    overrides = {}
    for parameter in ctx.command.params:
        if isinstance(parameter, _FieldOption):
            name, field = str(parameter.name), parameter.field
            value = options.pop(name)
            # By its source, not by its value: `--compress none` was given, and is None.
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
                overrides[field.key] = () if field.type is tuple and value == ("none",) else value
    return overrides


class RecipeName(click.ParamType[str]):
    """The name of a recipe, or anything else that data may be; a shell completes both."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Any text; what it is, is found out later."""
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The recipes, each with its presets, and files."""
        names = [word for name in recipe_names() for word in (name, *(f"{name}@{each}" for each in preset_names(name)))]
        return [*_complete(names, incomplete), *complete_paths(ctx, param, incomplete)]


class _NeededOption(click.Option):
    """An option without which a command says what to give; click's own `required` would not know of the recipe."""


def _name_recipe(kind: type[click.Option]) -> tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...]:
    data = "Recipe (cub, cub@released-code, mine.yaml), dataset of the Hub, image folder, or parquet or arrow file."
    return (
        click.option("--data", cls=kind, type=RecipeName(), metavar="NAME", help=data),
        click.option(
            "--recipe", type=RecipeName(), metavar="NAME", help="Recipe, if --data is to replace the data in it."
        ),
        click.option("--preset", metavar="NAME", help="Preset of the recipe (also: cub@released-code)."),
    )


class _FieldOption(click.Option):
    """An option that stands for a field of a recipe."""

    def __init__(self, *names: Any, field: Field, **options: Any) -> None:
        super().__init__(*names, **options)
        self.field = field


class _FieldType(click.ParamType[Any]):
    """The type of a field: what a recipe refuses is wrong usage here."""

    name = "text"

    def __init__(self, field: Field) -> None:
        self.field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a value as a recipe would."""
        try:
            return self.field.parse(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The choices, if there are any."""
        return _complete(self.field.choices, incomplete)


def _complete(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _add_field(command: Callable[..., Any], field: Field, plain: str) -> None:
    flag, help = field.flag(plain), f"{field.help[0].upper()}{field.help[1:]}."
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
        options["metavar"] = f"[{'|'.join(field.choices)}]"
    parameter = f"recipe_{field.section}_{field.name}"  # never a command's own parameter, such as `data` or `recipe`
    click.option(flag, parameter, cls=_FieldOption, field=field, default=None, help=help, **options)(command)
