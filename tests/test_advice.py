"""The last line of a port is one complete command that follows the verdict; each of them runs as printed."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner

import hf_retarget as rt
from hf_retarget import advice
from hf_retarget.advice import advise, compare_times
from hf_retarget.cli import main
from hf_retarget.document import Lead, read_document
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.report import compose_report

SMALL = ("--steps", "2", "--batch-size", "16", "--grad-batches", "1", "--bn-batches", "1", "--device", "cpu")
DATA = ("--data", "fashion-mnist", "--data-limit", "80", "--data-image-size", "28", "--data-validation", "0.2")
BEHIND = Lead(-0.2, 0.01)


def run(command: str):
    return CliRunner().invoke(main, shlex.split(command)[1:])


def make(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    return save_model(folder, model.state_dict(), load_checkpoint(model))


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a space in its name, three models, one of them a weights file, and a port that was printed."""
    folder = tmp_path_factory.mktemp("what next")
    for seed, name in enumerate(("old", "tuned", "new base")):
        make(folder / name, seed)
    shutil.copy(folder / "tuned" / "model.safetensors", folder / "weights.safetensors")
    return folder


OPTIONS = {"src_base": "old", "src_ft": "weights.safetensors", "new_base": "new base", "arch": "test_resnet"}


@pytest.fixture(scope="module")
def ported(here):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        sides = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
        result = CliRunner().invoke(main, ["port", *sides, *DATA, *SMALL, "--method", "naive", "--out", "my port"])
        assert result.exit_code == 0, result.output
        return result, read_document(here / "my port" / "port.json")


@pytest.fixture(autouse=True)
def _in(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr(advice, "_STEPS", 2)


def with_leads(document, **leads):
    """The same port, had others been ahead of it, and all the rest been behind."""
    ahead = Lead(0.2, 0.01)
    contenders = [replace(each, lead=leads.get(each.name, ahead)) for each in document.contenders]
    return replace(document, contenders=tuple(contenders))


def test_the_last_line_follows_the_verdict_and_is_in_the_report(ported, here):
    result, document = ported
    last = result.stderr.splitlines()[-1]
    assert last == f"Next: {advise_long(document)}"
    page = (here / "my port" / "report.html").read_text()
    assert unescape(re.search("Next: <code>(.*?)</code>", page)[1]) == document.next_step == advise_long(document)
    assert shlex.split(document.next_step)[0] == "hf-retarget"


def advise_long(document):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "_STEPS", 200)
        return advise(document, "my port", OPTIONS)


def without_plain(document):
    changed = {**document.recipe, "port": {**document.recipe["port"], "control": "none"}}
    left = tuple(each for each in document.contenders if not each.row.is_alternative)
    return replace(document, contenders=left, recipe=changed)


@pytest.mark.parametrize(
    ("change", "words", "folder"),
    [
        (with_leads, "finetune 'my port' --data 'my port/recipe.yaml' --arch test_resnet --steps 2", "finetuned"),
        (lambda each: with_leads(each, head=BEHIND), "--new-base 'new base' .* --method head", "head"),
        (lambda each: with_leads(each, plain=BEHIND), "finetune .new base. .* --batch-size 16 --lr", "plain"),
        (lambda each: with_leads(without_plain(each)), "port --src-base old .* --control full", "compared"),
        (lambda each: replace(with_leads(each), labelled=False), "finetune .* --teacher weights.s", "finetuned"),
    ],
)  # fmt: skip
def test_every_next_command_runs_as_printed(ported, here, change, words, folder):
    command = advise(change(ported[1]), "my port", OPTIONS)
    assert re.match(f"hf-retarget {words}" if words[0] != "-" else f"hf-retarget port .*{words}", command), command
    assert command.endswith(f"--out 'my port-{folder}'")
    result = run(command)
    assert result.exit_code == 0, f"{command}\n{result.output}"
    made = here / f"my port-{folder}"
    assert (made / "model.safetensors").is_file()
    shutil.rmtree(made)


def test_a_tuned_model_that_is_clearly_ahead_of_all_is_kept(ported):
    document = with_leads(ported[1], head=BEHIND, tuned=Lead(-0.5, 0.01))
    command = advise(document, "my port", OPTIONS)
    assert command.startswith("hf-retarget evaluate weights.safetensors --data 'my port/recipe.yaml'")
    result = run(command)
    assert result.exit_code == 0, result.output
    assert "Keep the tuned model" in compose_report(document).html


def test_the_better_of_two_alternatives_is_advised(ported):
    document = with_leads(ported[1], head=BEHIND, plain=BEHIND)
    scores = {"head": 0.9, "plain": 0.8}
    contenders = [
        replace(each, test=replace(each.test, top1=scores.get(each.name, 0.1))) for each in document.contenders
    ]
    assert "--method head" in advise(replace(document, contenders=tuple(contenders)), "x", OPTIONS)


def test_data_elsewhere_and_given_files_are_named(ported):
    document = with_leads(ported[1], head=BEHIND)
    given = {"allow_pickle": True, "checkpoints": ("a", "b c"), "token": "hf_secret", "initial_head": Path("h.st")}
    words = shlex.split(advise(document, "x/", {**OPTIONS, **given}, "/my photos"))
    assert [words[place + 1] for place, word in enumerate(words) if word == "--checkpoints"] == ["a", "b c"]
    for flag, value in (("--data-reference", "/my photos"), ("--initial-head", "h.st"), ("--data", "x/recipe.yaml")):
        assert words[words.index(flag) + 1] == value
    assert "--allow-pickle" in words
    assert "hf_secret" not in " ".join(words)


def test_from_python_there_is_a_command_only_if_all_was_text(ported, here):
    document = ported[1]
    assert advise(document, "x", {**OPTIONS, "new_base": timm.create_model("test_resnet")}) == ""
    nowhere = {**document.recipe, "data": {**document.recipe["data"], "reference": ""}}
    assert advise(replace(document, recipe=nowhere), "x", OPTIONS) == ""
    quick = {"port.steps": 1, "port.batch_size": 16, "port.bn_batches": 1, "data.limit": 60, "data.image_size": 28}
    recipe = rt.load_recipe("fashion-mnist").override(**quick, **{"port.method": "naive", "port.control": "none"})
    made = rt.port("old", "tuned", "new base", recipe=recipe, out="from python").document
    assert "hf-retarget port --src-base old --src-ft tuned --new-base 'new base'" in made.next_step
    private = rt.port(here / "old", here / "tuned", here / "new base", recipe=recipe).document
    assert str(here) not in private.next_step, "a document may be published"
    assert "--src-base old" in private.next_step


def test_times_are_side_by_side(ported):
    _, document = ported
    assert all(each.seconds > 0 for each in document.contenders)
    assert "for plain fine-tuning" in compare_times(document)
    assert compare_times(without_plain(document)) == ""
