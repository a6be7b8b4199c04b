"""What README.md prints works as printed: every command and all Python run, in its order, with small stand-ins."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from loopback_hub import Hub

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.contenders import contenders
from hf_retarget.models import load_checkpoint, save_model

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text() if README.is_file() else ""

pytestmark = pytest.mark.skipif(not TEXT, reason="an installed package has no README.md")

# Runs steps in one process, as one shell would: what failed, and what inspect printed, comes back.
RUN = """
import json, shutil, sys, tempfile, traceback
from click.testing import CliRunner
from hf_retarget.cli import main
import timm, torch
import hf_retarget as rt

torch.set_num_threads(1)
model = timm.create_model("test_resnet", num_classes=3)
gradients = [{name: value for name, value in model.named_parameters()} for _ in range(2)]
known = {"timm": timm, "model": model, "loader": [None] * 3}
failed, printed = [], {}
for step in json.loads(sys.argv[1]):
    try:
        if "runs/" in step:
            shutil.copytree("ported", "runs/one")
        if isinstance(step, str):
            exec(step, known)
        else:
            sys.argv = ["hf-retarget", *step]
            result = CliRunner().invoke(main, [*step, *(("--grid", "3") if step[0] == "plane" else ())])  # not 17
            if result.exit_code and step[0] != "outdated":
                failed.append([step, result.output])
            printed[" ".join(step)] = result.stdout
    except Exception:
        failed.append([step, traceback.format_exc()])
print("ANSWER" + json.dumps([failed, printed]))
"""


def code_blocks() -> list[tuple[str, str]]:
    """Language and text of each block of code, also of indented ones."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    indented = re.findall(
        r"(?:^    .*\n)+", re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return [*fenced, *(("", re.sub("^    ", "", each, flags=re.MULTILINE)) for each in indented)]


def shell_commands() -> list[list[str]]:
    """Every command in a block of code, and every complete one in the text."""
    lines = [
        line for language, text in code_blocks() if not language for line in text.replace("\\\n", " ").splitlines()
    ]
    quoted = [" ".join(each.split()) for each in re.findall(r"`((?:hf-retarget|pip|make) [^`]+)`", TEXT)]
    found = [shlex.split(line.removeprefix("$ "), comments=True) for line in (*lines, *quoted)
             if re.match(r"(\$ )?(hf-retarget|pip|make) ", line)]  # fmt: skip
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def test_there_are_no_blanks_in_commands():
    assert [each for each in shell_commands() if any("…" in word or word.isupper() for word in each)] == []


def test_targets_and_extras_exist():
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for program, *words in shell_commands():
        if program == "make":
            assert all(f"\n{target}: " in makefile for target in words)
        if program == "pip":
            assert words[0] == "install"
            for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
                assert f"\n{extra} = [" in project
    kept = set(re.findall(r"--[a-z][a-z-]+", " ".join(re.findall(r"`((?!python )[^`\n]+)`", TEXT))))
    known = {option for command in main.commands.values() for each in command.params for option in each.opts}
    assert kept - known <= {"--nproc-per-node", "--index-url", "--help", "--version", "--epochs"}


def test_scripts_have_the_options_with_which_they_are_called():
    text = " ".join("".join(path.read_text() for path in (README, *(ROOT / "docs").glob("*.md"))).split())
    calls = re.findall(r"python ((?:benchmarks|docs)/[\w/]+\.py)([^`|;)&]*)", text)
    assert {"benchmarks/port.py", "docs/pictures.py"} <= {path for path, _ in calls}
    for path, words in calls:
        parts = [ROOT / path, *(ROOT / path).with_suffix("").glob("*.py")]
        source = "".join(part.read_text() for part in parts)
        assert [each for each in re.findall(r"(?<!\S)--[a-z][a-z-]+", words) if f'"{each}' not in source] == [], path


def test_the_table_of_the_demo_has_rows_that_there_are():
    (table,) = (text for _, text in code_blocks() if text.startswith("ON THE TEST IMAGES"))
    rows = table.partition("\n\n")[0].splitlines()[1:]
    labels = {each.label for each in contenders()}
    assert [row for row in rows if re.split(r" \(|  ", row)[0] not in labels] == []


@pytest.fixture
def lab(hub: Hub, colours: Path, tmp_path: Path) -> tuple[Hub, Path]:
    """A folder with old, new and plain models, photos and a checkpoint of timm's train.py; a Hub with the same."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "photos").symlink_to(colours)
    torch.manual_seed(0)
    images = {"input_size": (3, 32, 32), "crop_pct": 1.0}
    recipe = rt.load_recipe("digits").override(
        **{"finetune.steps": 12, "finetune.batch_size": 20, "data.image_size": 32}
    )
    rt.finetune(
        timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay=images), colours, recipe=recipe,
        out=folder / "old", quiet=True,
    )  # fmt: skip
    rt.finetune(folder / "old", colours, recipe=recipe, out=folder / "tuned", quiet=True)
    for name in ("new", "plain"):
        checkpoint = load_checkpoint(folder / "tuned" if name == "plain" else folder / "old")
        moved = {key: each * 1.001 if each.is_floating_point() else each for key, each in checkpoint.weights.items()}
        save_model(folder / name, moved, checkpoint, labels=checkpoint.labels)
    args = Namespace(model="test_resnet", gp=None, in_chans=None, img_size=32, model_kwargs={}, mean=None, opt="sgd")
    weights = load_checkpoint(folder / "tuned").weights
    torch.save({"arch": "test_resnet", "state_dict": dict(weights), "args": args}, folder / "model_best.pth.tar")
    hub.add_user("me")
    sides = {"timm/resnet18.tv_in1k": "old", "timm/resnet18.a1_in1k": "new"}
    for id, side in (sides | dict.fromkeys(("me/resnet18-birds", "me/birds", "me/more-birds"), "tuned")).items():
        hub.repository(id, {name: folder / side / name for name in ("config.json", "model.safetensors")})
    pictures = {path.relative_to(colours).as_posix(): path for path in colours.rglob("*.png")}
    hub.repository("bentrevett/caltech-ucsd-birds-200-2011", pictures, kind="dataset")
    return hub, folder


def test_everything_printed_runs(lab: tuple[Hub, Path]):
    hub, folder = lab
    user = next(user for user in hub.accounts if user.name == "me")
    commands = [words for program, *words in shell_commands() if program == "hf-retarget" and words != ["demo"]]
    commands.sort(key=lambda words: (words[0] != "convert", "check ported/" in " ".join(words)))
    (folder / "tuned").rename(folder / "trained")  # `convert` makes it, of the checkpoint
    steps: list[Any] = [*commands, *(text for language, text in code_blocks() if language == "python")]
    done = hub.client(token=user.token).run(sys.executable, "-c", RUN, json.dumps(steps), cwd=folder, timeout=280)
    assert "ANSWER" in done.stdout, done.stderr
    failed, printed = json.loads(done.stdout.rpartition("ANSWER")[2])
    assert failed == []
    assert {"convert", "port", "finetune", "evaluate", "check", "push", "port-all", "plane", "compare"} <= {
        words[0] for words in commands}  # fmt: skip
    (shown,) = (text for _, text in code_blocks() if text.startswith("$ hf-retarget inspect"))
    first, *lines = shown.splitlines()
    assert [line for line in lines if line != "…" and line not in printed[first.removeprefix("$ hf-retarget ")]] == []
