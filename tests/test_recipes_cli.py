"""Recipes on the command line: the list, one recipe, and the options that come from the fields."""

from __future__ import annotations

import json

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.recipes import recipes
from hf_retarget.errors import RecipeError
from hf_retarget.recipe import Recipe, fields, load_recipe, preset_names, recipe_names


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def make(*sections: str, **how: object) -> tuple[click.Command, list[Recipe]]:
    """A command with the options of a recipe, and the recipes it was given."""
    given: list[Recipe] = []

    @click.command(cls=SectionedCommand)
    @click.argument("model")
    @click.option("--out", help="Where to.")
    @recipe_options(*sections, **how)
    def port(model: str, out: str | None, recipe: Recipe) -> None:
        given.append(recipe)

    return port, given


def recipe_of(*arguments: str, sections: tuple[str, ...] = (), **how: object) -> Recipe:
    command, given = make(*sections, **how)
    result = run(command, "model", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return given[0]


# ---- hf-retarget recipes


def test_list_shows_every_recipe_and_its_presets():
    result = run(recipes, "list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if "presets:" not in line] == list(recipe_names())
    assert "cub@released-code" in result.stdout
    entries = json.loads(run(recipes, "list", "--json").stdout)
    assert [(entry["name"], tuple(entry["presets"])) for entry in entries] == [
        (name, preset_names(name)) for name in recipe_names()
    ]


@pytest.mark.parametrize(
    "arguments", [["cub@released-code"], ["cub", "--preset", "released-code"], ["cub@released-code", "--json"]]
)
def test_show_prints_what_will_be_used(arguments):
    result = run(recipes, "show", *arguments)
    assert result.exit_code == 0
    document = json.loads(result.stdout) if "--json" in arguments else yaml.safe_load(result.stdout)
    assert Recipe.from_dict(document) == load_recipe("cub@released-code")


def test_what_show_prints_is_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(run(recipes, "show", "mnist").stdout, encoding="utf-8")
    assert load_recipe(path) == load_recipe("mnist")
    assert yaml.safe_load(run(recipes, "show", str(path)).stdout)["name"] == "mnist"


def test_an_unknown_recipe_is_a_known_error():
    result = run(recipes, "show", "cubb")
    assert isinstance(result.exception, RecipeError)  # the group `hf-retarget` makes one line of it
    assert "did you mean 'cub'?" in str(result.exception)


@pytest.mark.parametrize("command", [(), ("list",), ("show",)])
def test_help_has_an_example(command):
    result = run(recipes, *command, "--help")
    assert result.exit_code == 0
    assert "hf-retarget recipes" in result.stdout.split("Example")[1]


# ---- options from fields


def value_for(field) -> tuple[list[str], object]:
    """Arguments that set a field to something else than its default, and that value."""
    flag = field.flag()
    if field.type is bool:
        return [f"--no-{flag[2:]}" if field.default else flag], not field.default
    if field.type is tuple:
        return [flag, "a, b", flag, "c"], ("a, b", "c")
    if field.choices:
        other = next(choice for choice in field.choices if choice != field.default)
        return [flag, other], other
    value = {int: 7, float: 0.25, str: "7"}[field.type]
    return [flag, str(value)], value


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.key)
def test_every_field_has_an_option_that_sets_it_alone(field):
    arguments, value = value_for(field)
    common = ["--data", "org/name", *(("--save-as", "lora") if field.key in ("port.rank", "port.energy") else ())]
    plain = recipe_of(*common)
    recipe = recipe_of(*common, *arguments)
    assert getattr(getattr(recipe, field.section), field.name) == value != field.default
    assert recipe == plain.override(**{field.key: value})


def test_what_is_not_given_is_left_to_the_recipe():
    assert recipe_of("--data", "cub@paper") == load_recipe("cub@paper")
    assert recipe_of("--data", "cub", "--preset", "paper") == load_recipe("cub@paper")
    assert recipe_of("--recipe", "cub", "--data", "org/name").port == load_recipe("cub").port
    assert recipe_of("--recipe", "cub") == load_recipe("cub")


def test_none_takes_a_value_away(tmp_path):
    path = tmp_path / "mine.yaml"
    Recipe().override(**{"port.compress": 0.9, "data.classes": ["a"], "data.config": "x"}).save(path)
    recipe = recipe_of("--data", str(path), "--compress", "none", "--data-classes", "none", "--data-config", "none")
    assert (recipe.port.compress, recipe.data.classes, recipe.data.config) == (None, (), None)


def test_a_command_may_take_some_sections_and_choose_the_plain_one():
    recipe = recipe_of("--data", "x/y", "--lr", "1e-3", "--steps", "4", sections=("data", "finetune"), plain="finetune")
    assert (recipe.finetune.lr, recipe.finetune.steps, recipe.port.steps) == (0.001, 4, 10)
    command, _ = make("data")
    assert run(command, "model", "--data", "x/y", "--steps", "3").exit_code == 2


def test_data_is_needed_unless_it_is_not():
    command, _ = make()
    result = run(command, "model")
    assert result.exit_code == 2
    assert "--data" in result.stderr
    assert recipe_of(required=False) == Recipe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "at least 1"),
        (("--steps", "many"), "a whole number"),
        (("--steps", "none"), "a whole number"),
        (("--head", "zeroo"), "did you mean 'zero'?"),
        (("--compress", "1.5"), "at most 1"),
        (("--finetune-lr", "fast"), "a number"),
        (("--stpes", "3"), "--steps"),
    ],
)
def test_a_wrong_value_is_wrong_usage(arguments, message):
    command, given = make()
    result = run(command, "model", "--data", "cub", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not given


def test_two_runs_in_one_process_share_nothing():
    command, given = make()
    run(command, "model", "--data", "cub", "--steps", "3")
    run(command, "model", "--data", "cub")
    assert [recipe.port.steps for recipe in given] == [3, 15]


def test_help_is_in_sections_with_defaults():
    command, _ = make()
    text = run(command, "--help").stdout
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [heading.split(" ")[0].rstrip(":") for heading in headings] == ["Options", "Data", "Port", "Fine-tuning"]
    own, data, port, train = text.split("Options:")[1].split("(defaults, unless set by the recipe):")
    assert all(flag in own for flag in ("--out", "--data NAME", "--recipe", "--preset", "--help"))
    assert "--data-reference" in data
    assert "--steps NUMBER" in port
    assert "[warm|restart]" in port
    assert "[10]" in port
    assert "--finetune-lr" in train
