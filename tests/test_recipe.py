"""Recipes: what they say, what they refuse and in which words, and that nothing is lost when one is written down."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from dataclasses import fields as dataclass_fields
from pathlib import Path

import pytest
import yaml

from hf_retarget.contenders import contenders
from hf_retarget.errors import RecipeError
from hf_retarget.matching.trajectory import SCHEDULES
from hf_retarget.names import PORT_HEADS
from hf_retarget.recipe import (
    SECTIONS,
    Field,
    PortOptions,
    Recipe,
    choose_recipe,
    fields,
    load_recipe,
    preset_names,
    recipe_names,
)
from hf_retarget.recipe import recipe as recipe_module
from hf_retarget.recipe.reference import renew

ROOT = Path(__file__).parent.parent
PAPER = ("cars", "cifar10", "cifar100", "cub", "imagenet", "mnist")


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- the recipes we ship


def test_all_that_were_promised_are_there():
    assert recipe_names() == tuple(sorted((*PAPER, "pets", "flowers", "digits", "fashion-mnist")))
    assert all({"paper", "released-code"} <= set(preset_names(name)) for name in PAPER)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_has_a_name_words_and_data(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert recipe.data.reference == "fashion-mnist" if name == "fashion-mnist" else "/" in recipe.data.reference
    assert recipe.finetune.steps == recipe.finetune.epochs == 0, "nobody trains unasked"


# METHOD.md: T, gradient minibatches, BatchNorm minibatches (None: the net has no BatchNorm)
@pytest.mark.parametrize(
    ("name", "steps", "gradients", "batchnorm"),
    [
        ("mnist", 5, 1, None),
        ("cifar10", 30, 2, None),
        ("imagenet", 40, 100, 20),
        ("cars", 15, 5, 2),
        ("cub", 15, 5, 2),
        ("cifar100", 15, 2, None),
    ],
)
@pytest.mark.parametrize("preset", [None, "paper"])
def test_the_hyperparameters_of_the_paper(name, steps, gradients, batchnorm, preset):
    port = load_recipe(name, preset).port
    assert port.method == ("fgmt" if preset else "auto")
    assert (port.schedule, port.batch_size, port.augment) == ("uniform", 128, False)
    assert (port.steps, port.grad_batches) == (steps, gradients)
    assert batchnorm is None or port.bn_batches == batchnorm


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mnist", {"steps": 10}),
        ("cifar10", {}),
        ("imagenet", {"steps": 30}),
        ("cars", {"method": "gmt", "grad_batches": 10}),
        ("cub", {"method": "gmt", "grad_batches": 10}),
        ("cifar100", {"grad_batches": 1}),
    ],
)
def test_what_the_released_code_does_differently(name, changes):
    paper, code = load_recipe(f"{name}@paper").to_dict()["port"], load_recipe(f"{name}@released-code").to_dict()["port"]
    assert code == paper | {"schedule": "cosine", "augment": True} | changes


@pytest.mark.parametrize(
    ("name", "source", "after"),
    [
        ("mnist", (15, 0.01, 0.0, "constant"), None),
        ("cifar10", (60, 0.05, 1e-4, "cosine"), (60, 0.01)),
        ("cifar100", (30, 0.05, 1e-4, "cosine"), (30, 0.05)),
        ("imagenet", (100, 0.1, 1e-4, "cosine"), None),
        ("cars", (30, 0.1, 1e-4, "cosine"), (30, 0.05)),
        ("cub", (30, 0.1, 1e-4, "cosine"), (30, 0.01)),
    ],
)
def test_how_the_paper_trains_before_and_after(name, source, after):
    train = load_recipe(name, "source").finetune
    assert (train.epochs, train.lr, train.weight_decay, train.schedule) == source
    assert (train.optimizer, train.momentum, train.batch_size) == ("sgd", 0.9, 128)
    paper, code = load_recipe(name, "paper").finetune, load_recipe(name, "released-code").finetune
    if after is None:
        assert paper.epochs == code.epochs == 0
    else:
        assert (paper.epochs, paper.lr, paper.optimizer) == (*after, "sgd")
        assert (code.epochs, code.lr, code.optimizer) == (10, 1e-4, "adamw")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_how_long_to_fine_tune_and_does_so_after_a_port_only_if_asked(name):
    plain, source = load_recipe(name).finetune, load_recipe(name, "source").finetune
    assert (plain.steps, plain.epochs) == (0, 0)
    assert 1 <= source.epochs <= 100


def test_five_epochs_of_imagenet_warm_up():
    train = load_recipe("imagenet@source").finetune
    assert train.warmup == pytest.approx(5 * train.total_steps(round(1_281_167 * 0.9)) / train.epochs, abs=100)


# ---- fields


def test_every_field_is_described_once():
    described = fields()
    assert [field.key for field in described] == [
        f"{section}.{field.name}" for section, options in SECTIONS.items() for field in dataclass_fields(options)
    ]
    assert all(field.help and field.type in (str, int, float, bool, tuple) for field in described)
    assert len({field.flag() for field in described}) == len(described)


def test_every_default_is_a_value_of_its_field():
    for field in fields():
        assert field.read(field.default) == field.default, field.key


def test_methods_heads_and_schedules_are_those_that_there_are():
    choices = {field.key: set(field.choices) for field in fields()}
    assert choices["port.method"] == {"auto", *(each.name for each in contenders() if each.is_method)}
    assert choices["port.head"] == set(PORT_HEADS)
    assert choices["port.schedule"] == set(SCHEDULES)


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, "1e-4", 1e-4),
        (bool, True, True),
        (str, "", ""),
        (tuple, ["a", "b"], ("a", "b")),
    ],
)
def test_values_are_read(kind, value, read):
    result = Field("port", "x", kind).read(value)
    assert result == read
    assert type(result) is kind


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, 3.0, "a whole number"),
        (int, True, "a whole number"),
        (int, None, "a whole number"),
        (int, "3", "a whole number"),
        (float, "much", "a number"),
        (float, False, "a number"),
        (float, float("nan"), "a number"),
        (float, float("inf"), "a number"),
        (bool, 1, "true or false"),
        (str, 5, "a string; put it in quotes"),
        (tuple, "ab", "a list of strings"),
        (tuple, ["a", 1], "a list of strings; put each in quotes"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(kind, value, words):
    with pytest.raises(RecipeError, match=re.escape(f"port.x is {value!r}, but must be {words}")):
        Field("port", "x", kind).read(value)


@pytest.mark.parametrize(
    ("limit", "good", "bad"), [("least", 1.0, 0.9), ("most", 1.0, 1.1), ("above", 1.1, 1.0), ("below", 0.9, 1.0)]
)
def test_limits_hold(limit, good, bad):
    field = Field("port", "x", float, **{limit: 1.0})
    assert field.read(good) == good
    with pytest.raises(RecipeError, match="1"):
        field.read(bad)


def test_options_made_in_python_are_checked_too():
    assert PortOptions(compress=None, steps=1).steps == 1
    with pytest.raises(RecipeError, match=r"port\.steps is 0.*at least 1"):
        PortOptions(steps=0)
    with pytest.raises(RecipeError, match="did you mean 'shared'"):
        PortOptions(head="shard")


# ---- changing and writing down


def test_an_override_changes_one_thing_and_leaves_the_recipe():
    recipe = load_recipe("cub")
    changed = recipe.override(**{"port.steps": 3, "data.classes": ["a"], "finetune.lr": "5e-2"})
    assert (changed.port.steps, changed.data.classes, changed.finetune.lr) == (3, ("a",), 0.05)
    assert recipe.port.steps == 15
    back = {"port.steps": 15, "data.classes": [], "finetune.lr": 0.01}
    assert changed.override(**back) == recipe
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"


def test_a_recipe_of_an_earlier_port_keeps_its_meaning():
    assert Recipe.from_dict({"port": {"check": False}}).port.verify is False


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("port.stpes", "unknown field 'port.stpes'; did you mean 'steps'?"),
        ("prot.steps", "unknown section 'prot'; did you mean 'port'?"),
        ("port.zzzzzz", "there are method, targets"),
        ("steps", "'steps' has no section; did you mean 'port.steps'?"),
    ],
)
def test_a_wrong_key_names_the_right_one(key, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        Recipe().override(**{key: 1})


def test_who_names_steps_has_done_with_epochs():
    recipe = load_recipe("cub@paper")
    assert recipe.override(**{"finetune.steps": 7}).finetune.epochs == 0
    assert recipe.override(**{"finetune.steps": 0}).finetune.epochs == 0, "0 steps means none"
    assert recipe.override(**{"finetune.lr": 0.1}).finetune.epochs == 30
    with pytest.raises(RecipeError, match=r"finetune: .*not both"):
        recipe.override(**{"finetune.steps": 7, "finetune.epochs": 1})


@pytest.mark.parametrize("name", [*recipe_names(), *(f"{name}@{p}" for name in PAPER for p in preset_names(name))])
def test_a_saved_recipe_is_the_same_recipe(name, tmp_path):
    recipe = load_recipe(name)
    recipe.save(tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe
    assert recipe.name == name


def test_awkward_values_survive(tmp_path):
    recipe = Recipe("yes", "ünï: #cöde").override(
        **{
            "data.classes": ["no", "1", "null", "a, b", "é", " "],
            "data.revision": "1234567",
            "data.limit": 5,
            "finetune.lr": 1.23e-7,
            "finetune.weight_decay": 0.1 + 0.2,
            "port.compress": 0.999,
        }
    )
    recipe.save(tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe
    assert recipe.finetune.weight_decay == 0.1 + 0.2


def test_a_saved_recipe_holds_the_defaults_too():
    document = yaml.safe_load(Recipe().to_yaml())
    assert {f"{section}.{name}" for section in SECTIONS for name in document[section]} == {f.key for f in fields()}


# ---- files, presets, and what a user may say

MINE = """
port: {steps: 3}
presets:
  quick:
    description: in a hurry
    port: {steps: 1}
  same:
"""


def test_a_file_works_like_a_name(tmp_path):
    path = write(tmp_path, MINE)
    assert load_recipe(path) == load_recipe(str(path)) == Recipe("mine").override(**{"port.steps": 3})
    quick = load_recipe(f"{path}@quick")
    assert quick == load_recipe(path, "quick")
    assert (quick.name, quick.description, quick.port.steps) == ("mine@quick", "in a hurry", 1)
    assert load_recipe(path, "same").port == load_recipe(path).port
    assert preset_names(path) == ("quick", "same")


def test_a_path_may_hold_an_at(tmp_path):
    folder = tmp_path / "me@home"
    folder.mkdir()
    assert load_recipe(str(write(folder, MINE))).port.steps == 3
    assert load_recipe(str(write(folder, MINE)) + "@quick").port.steps == 1
    assert load_recipe(str(write(folder, MINE, "a@b.yaml"))).name == "a@b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: {stpes: 3}", "mine.yaml': unknown field 'port.stpes'; did you mean 'steps'?"),
        ("prot: {steps: 3}", "mine.yaml': unknown section 'prot'; did you mean 'port'?"),
        ("port: {head: zeroo}", "port.head is 'zeroo', but must be one of auto, zero"),
        ("port: {head: zeroo}", "did you mean 'zero'?"),
        ("port: {steps: many}", "port.steps is 'many', but must be a whole number, at least 1"),
        ("port: 5", "port is 5, but must be a section"),
        ("data: {revision: 123}", "data.revision is 123, but must be a string, or null; put it in quotes"),
        ("finetune: {optimizer: adam}", "did you mean 'adamw'?"),
        ("finetune: {steps: 1, epochs: 1}", "mine.yaml': finetune: "),
        ("name: 3", "recipe.name is 3"),
        ("presets: {quick: {port: {stpes: 3}}}", "mine.yaml', preset 'quick': unknown field 'port.stpes'"),
        ("presets: {quick: fast}", "preset 'quick': is 'fast'"),
        ("presets: [quick]", "presets is ['quick']"),
        ("port:\n  steps: 3\n  steps: 4", "line 2: the key 'steps' appears twice"),
        ("port: {steps: 3", "mine.yaml', line 1"),
        ("a: !!python/object:os.system x", "mine.yaml', line 1"),
        ("", "has no sections"),
        ("- port", "has no sections"),
    ],
)
def test_a_mistake_is_named_with_its_place(text, message, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_or_not_there(tmp_path):
    path = tmp_path / "mine.yaml"
    with pytest.raises(RecipeError, match=r"no recipe file '.*mine\.yaml'"):
        load_recipe(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"cannot read the recipe '.*mine\.yaml'"):
        load_recipe(path)


def test_an_unknown_name_or_preset_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match="no recipe 'cifar-100'; did you mean 'cifar100'"):
        load_recipe("cifar-100")
    with pytest.raises(RecipeError, match=r"'cub' has no preset 'papper'; did you mean 'paper'\? \(it has paper, "):
        load_recipe("cub@papper")
    with pytest.raises(RecipeError, match="it has source"):
        load_recipe("pets", "paper")
    (tmp_path / "bare.yaml").write_text("data: {reference: photos}")
    with pytest.raises(RecipeError, match="it has none"):
        load_recipe(tmp_path / "bare.yaml", "paper")
    with pytest.raises(RecipeError, match="give only one"):
        load_recipe("cub@paper", "source")


def test_a_wheel_has_its_recipes_inside(tmp_path, monkeypatch):
    (tmp_path / "package" / "recipes").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", "description: beside", "birds.yaml")
    write(tmp_path / "package" / "recipes", "description: inside", "birds.yaml")
    monkeypatch.setattr(recipe_module, "_PACKAGE", tmp_path / "package")
    assert load_recipe("birds").description == "inside"
    (tmp_path / "package" / "recipes" / "birds.yaml").unlink()
    (tmp_path / "package" / "recipes").rmdir()
    assert load_recipe("birds").description == "beside"


@pytest.mark.parametrize("data", ["org/name", "org/name@rev", "./cub", "photos/", "beans", "x.parquet"])
def test_data_that_is_no_recipe_gets_the_defaults(data):
    recipe = choose_recipe(data)
    assert recipe == Recipe().override(**{"data.reference": data})


def test_data_may_be_a_recipe(tmp_path):
    assert choose_recipe("cub") == load_recipe("cub")
    assert choose_recipe("cub@paper") == choose_recipe("cub", preset="paper") == load_recipe("cub@paper")
    path = str(write(tmp_path, MINE))
    assert choose_recipe(path + "@quick").port.steps == 1
    assert choose_recipe("cub", overrides={"port.steps": 2}).port.steps == 2


def test_data_beside_a_recipe_replaces_its_data_section():
    cifar = load_recipe("cifar100")
    moved = choose_recipe("photos/", recipe="cifar100")
    assert moved.port == cifar.port
    assert moved.data == choose_recipe("photos/").data
    assert choose_recipe("pets", recipe="cub").data == load_recipe("pets").data
    kept = choose_recipe("cifar100", overrides={"data.reference": "org/copy"})
    assert (kept.data.reference, kept.data.label_column) == ("org/copy", "fine_label")


def test_a_misspelt_recipe_is_not_taken_for_data(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"'cifar01'; did you mean 'cifar10'\? Write a dataset on the Hub"):
        choose_recipe("cifar01")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar01").mkdir()
    assert choose_recipe("cifar01").data.reference == "cifar01"
    with pytest.raises(RecipeError, match="'paper' needs a recipe"):
        choose_recipe("photos/", preset="paper")


# ---- the rest


def test_the_documentation_is_current():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert renew(page) == page, "run: python -m hf_retarget.recipe.reference"
    assert all(f"| `{field.key}` | `{field.flag()}`" in page for field in fields())


def test_the_recipe_in_the_documentation_is_one(tmp_path):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = write(tmp_path, example)
    assert (load_recipe(path).port.grad_batches, load_recipe(path, "quick").port.control) == (10, "none")


def test_recipes_load_no_torch():
    code = "import sys, hf_retarget.recipe; sys.exit(bool({'torch', 'timm', 'datasets', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
