"""The registry of contenders: their roles and prices, their import paths, and a new one that appears everywhere."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle

import hf_retarget as rt
from hf_retarget import contenders as registry
from hf_retarget.cli import main
from hf_retarget.contenders import (
    AFTER,
    AUTO,
    BESIDE,
    PORT,
    Asked,
    Contender,
    Sizes,
    choose_contenders,
    contenders,
    find_contender,
)
from hf_retarget.document import read_document
from hf_retarget.matching import methods
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting.contest import Contest, Declined, Made
from hf_retarget.porting.makers import keep_base
from hf_retarget.report.comparison import draw_comparison_page
from hf_retarget.report.page import COLOURS

# name: the roles that it can have, gradients for 3 steps, whether it is a method
TABLE = {
    "tuned": ({BESIDE}, 0, False),
    "tuned-head": ({BESIDE}, 0, False),
    "old-head": ({BESIDE}, 0, False),
    "base": ({BESIDE}, 0, False),
    "naive": ({PORT, BESIDE}, 0, True),
    "naive-line": ({PORT}, 0, False),
    "naive-head": ({PORT}, 0, False),
    "head": ({PORT, BESIDE}, 0, True),
    "matched": ({PORT}, 6, False),
    "matched-head": ({PORT}, 0, False),
    "whole": ({PORT}, 6, False),
    "whole-head": ({PORT}, 0, False),
    "naive-sign": ({PORT, BESIDE}, 3, True),
    "oracle": ({PORT, BESIDE}, 0, True),
    "plain": ({BESIDE}, 0, False),
    "tuned-target": ({BESIDE}, 0, False),
    "rebasin": ({PORT}, 0, True),
    "permuted-source": ({PORT}, 6, True),
    "given": ({PORT}, 0, False),
    "gmt": ({PORT}, 12, True),
    "fgmt": ({PORT}, 6, True),
    "fgmt-sign": ({PORT}, 6, True),
    "finetuned": ({AFTER}, 0, False),
}
ALL = [pytest.param(each, id=each.name) for each in contenders()]
ASKED = [
    Asked(method, control, has_tuned_target, trains_after)
    for method, control, has_tuned_target, trains_after in itertools.product(
        (*registry.method_names(), "given"), ("full", "naive", "none"), (False, True), (False, True)
    )
]


# ---- the table


def test_every_contender_has_a_row_here():
    assert [each.name for each in contenders()] == list(TABLE), "a contender was added or removed: update TABLE"


@pytest.mark.parametrize("contender", ALL)
def test_contenders_agree_with_the_table(contender):
    roles, gradients, is_method = TABLE[contender.name]
    entered = [role for asked in ASKED for each, role in choose_contenders(asked) if each is contender]
    assert set(entered) == roles
    assert contender.gradients(3) == gradients
    assert contender.gradients(0) == 0
    few, many = (contender.forwards(Sizes(steps, 10, 0, 10)) for steps in (1, 2))
    assert not contender.step or many > few, "each step is scored"
    assert contender.is_method is is_method
    assert (contender.name in registry.method_names()) is is_method


@pytest.mark.parametrize("contender", ALL)
def test_import_paths_resolve(contender):
    for path in filter(None, (contender.step, contender.make)):
        assert callable(contender.resolve(path)), path


# ---- how it looks


def test_contenders_and_page_colours_have_different_names():
    assert not {each.name for each in contenders()} & set(COLOURS), "both become variables of a style sheet"


def test_contenders_have_distinct_colours_and_labels():
    colours = [colour for each in contenders() for colour in each.colours]
    assert len(colours) == len(set(colours)) == 2 * len(contenders())
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    for words in ("name", "label", "short"):
        assert len({getattr(each, words) for each in contenders()}) == len(contenders()), words


@pytest.mark.parametrize("contender", ALL)
def test_matplotlib_draws_its_marker_and_line(contender):
    MarkerStyle(contender.marker)
    (line,) = Figure().subplots().plot([0, 1], [0, 1], contender.marker + contender.line)
    assert (line.get_marker(), line.get_linestyle()) == (contender.marker, contender.line)


# ---- who enters


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_contest_has_a_port_and_no_duplicates(asked):
    chosen = choose_contenders(asked)
    names, roles = [each.name for each, _ in chosen], [role for _, role in chosen]
    assert len(names) == len(set(names))
    if asked.method == AUTO:
        assert {name for name, role in zip(names, roles, strict=True) if role == PORT} == {
            each.name for each in contenders() if each.place
        }
    else:
        assert (names[0], roles[0], roles.count(PORT)) == (asked.method, PORT, 1)
    assert roles == sorted(roles, key=(PORT, AFTER, BESIDE).index), (
        "who continues from the winner comes before the rest"
    )
    assert (AFTER in roles) is asked.trains_after
    assert sum(each.is_alternative for each, _ in chosen) == (asked.control == "full")
    unmatched = find_contender(asked.method).without_matching
    assert not unmatched or (unmatched in names) is asked.compared


def test_places_rank_simplicity_and_refits_come_later():
    places = [each.place for each in contenders() if each.place]
    assert sorted(places) == list(range(1, len(places) + 1))
    names = [each.name for each in contenders()]
    for each in contenders():
        if each.refits:
            assert names.index(each.refits) < names.index(each.name)
            assert find_contender(each.refits).place < each.place, "on a tie, the one with its own head wins"
            assert find_contender(each.refits).course == each.course


def test_a_name_is_registered_once():
    with pytest.raises(rt.RetargetError, match="'naive' already"):
        registry.register(find_contender("naive"))


def test_an_unknown_contender_has_a_generic_row():
    row = find_contender("of-the-future")
    assert (row.label, row.short, row.is_method, row.gradients(3)) == ("of-the-future", "of-the-future", False, 0)


# ---- one more


def test_the_contender_in_contributing_is_a_method(monkeypatch):
    contributing = Path(__file__).parents[2] / "CONTRIBUTING.md"
    blocks = re.findall("```python\n(.*?)```", contributing.read_text(encoding="utf-8"), re.DOTALL)
    method, row = (block for block in blocks if "random" in block)
    monkeypatch.setattr(registry, "_CONTENDERS", dict(registry._CONTENDERS))
    contender = registry.register(eval(row, vars(registry)))
    exec(method, names := dict(vars(methods)))
    assert contender.step == f"{methods.__name__}:{names['random'].__name__}"
    assert contender.is_method
    assert contender.forwards(Sizes(2, 10, 0, 10)) > contender.forwards(Sizes(1, 10, 0, 10)), "each step is scored"
    test_contenders_have_distinct_colours_and_labels()


LABEL, SHORT = "a coin thrown for everything", "coin"


def throw(contest: Contest, contender: Contender) -> Made:
    """Keeps the new base."""
    return keep_base(contest, contender)


def decline(contest: Contest, contender: Contender) -> Made:
    raise Declined("it stood on its edge")


def lose(contest: Contest, contender: Contender) -> Made:
    raise rt.PortError("it rolled away")


@pytest.fixture
def register_coin(monkeypatch) -> Callable[[str], Contender]:
    """Registers, for one test, a contender made by one of the functions above."""
    monkeypatch.setattr(registry, "_CONTENDERS", dict(registry._CONTENDERS))

    def register(make: str) -> Contender:
        return registry.register(
            Contender(
                "coin",
                label=LABEL,
                short=SHORT,
                colours=("#123456", "#654321"),
                marker="h",
                make=f"{__name__}:{make}",
                beside=lambda asked: asked.compared,
            )
        )

    return register


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> list[Path]:
    folder, made = tmp_path_factory.mktemp("sides"), []
    for seed, name in enumerate(("old", "tuned", "new")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        made.append(save_model(folder / name, net.state_dict(), load_checkpoint(net)))
    return made


DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
TINY = (*DATA, "--method", "naive", "--steps", "1", "--batch-size", "16", "--bn-batches", "1", "--control", "naive")


def run(command: str, *arguments: object) -> str:
    done = CliRunner().invoke(main, [command, *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_registered_contender_appears_everywhere(register_coin, sides, tmp_path):
    register_coin("throw")
    old, tuned, new = sides
    out = tmp_path / "ported"
    bases = ("--src-base", old, "--new-base", new)
    terminal = run("port", *bases, "--src-ft", tuned, *TINY, "--no-verify", "--out", out)
    assert any(line.startswith(LABEL) for line in terminal.splitlines())
    found = read_document(out / "port.json").find("coin")
    base = read_document(out / "port.json").find("base")
    assert (found.role, found.gradients, found.validation, found.test) == (BESIDE, 0, base.validation, base.test)
    (written,) = (each for each in json.loads((out / "port.json").read_text())["contenders"] if each["name"] == "coin")
    assert written["test"]["top1"] == found.test.top1
    for name in ("report.html", "README.md"):
        assert LABEL in (out / name).read_text(), name
    compared = rt.compare([out])
    assert "coin" in compared.scores
    assert compared.groups[0].top1["coin"].mean == found.test.top1
    assert compared.to_json()["groups"][0]["top1"]["coin"]["mean"] == found.test.top1
    assert SHORT in draw_comparison_page(compared.to_json())
    assert SHORT.upper() in run("compare", out).splitlines()[0]
    table = run("port-all", *bases, "--models", tuned, *TINY, "--no-verify", "--out", tmp_path / "all")
    assert SHORT.upper() in table.splitlines()[0]
    summary = json.loads((tmp_path / "all" / "port-all.json").read_text())
    assert summary["models"][0]["top1"]["coin"] == found.test.top1


@pytest.mark.parametrize(("make", "words"), [("decline", "it stood on its edge"), ("lose", "it rolled away")])
def test_a_contender_that_declines_or_fails_is_a_note(make, words, register_coin, sides):
    register_coin(make)
    recipe = rt.load_recipe("fashion-mnist").override(
        **{"data.limit": 60, "data.image_size": 28, "data.validation": 0.2},
        **{"port.method": "naive", "port.steps": 1, "port.batch_size": 16, "port.control": "naive"},
        **{"port.verify": False, "port.bn_batches": 1},
    )
    document = rt.port(*sides, recipe=recipe).document
    assert document.find("coin") is None
    assert document.find("tuned") is not None
    assert [note for note in document.notes if words in note]
