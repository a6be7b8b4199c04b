"""Results that would go where something is read: refused before any work, or right."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from tiny_lm import save_trio

from hf_retarget.cli import main
from hf_retarget.files import hash_file
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--steps", "2", "--batch-size", "8", "--device", "cpu")
PORT = (*DATA, *STEPS, "--grad-batches", "1", "--bn-batches", "1", "--control", "none", "--method", "naive")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hash_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path) -> Path:
    """Three models, each with images, a text, a permutation and checkpoints inside; nothing of it is ever read."""
    for seed, name in enumerate(("old", "tuned", "new")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        save_model(tmp_path / name, net.state_dict(), load_checkpoint(net))
        for inner in ("photos/train/a/1.png", "text.txt", "permutation.safetensors", "step-1.safetensors"):
            (tmp_path / name / inner).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / inner).write_bytes(b"mine")
    shutil.copytree(tmp_path / "new", tmp_path / "else")
    (tmp_path / "link").symlink_to(tmp_path / "else")
    return tmp_path


BASES = ("--src-base", "old", "--src-ft", "tuned", "--new-base", "new")
ELSEWHERE = {
    "permutation": ("--permutation", "else"),
    "permutation file": ("--permutation", "else/permutation.safetensors"),
    "tuned target": ("--tuned-target", "else"),
    "initial head": ("--initial-head", "else/model.safetensors"),
    "checkpoints": ("--checkpoints", "else/step-1.safetensors"),
    "gradient cache": ("--gradient-cache", "else/gradients"),
    "second data": ("--also-data", "else/photos"),
}
COMMANDS = {
    **{f"port {each}": ("port", *BASES, *PORT, "--out", each) for each in ("old", "tuned", "new", "./new/../new")},
    **{f"port {name}": ("port", *BASES, *more, *PORT, "--out", "else") for name, more in ELSEWHERE.items()},
    "port data": ("port", *BASES, *PORT[2:], "--data", "else/photos", "--out", "else"),
    "port data by a pattern": ("port", *BASES, *PORT[2:], "--data", "else/photos/*.parquet", "--out", "else"),
    "port through a link": ("port", *BASES[:5], "else", *PORT, "--out", "link"),
    "port of a link": ("port", *BASES[:5], "link", *PORT, "--out", "else"),
    "port, resumed": ("port", *BASES, *PORT, "--out", "new", "--resume"),
    **{f"streamed {each}": ("port", *BASES, "--data", "none", "--out", each) for each in ("old", "tuned", "new")},
    "streamed text": ("port", *BASES, "--data", "none", "--text", "else/text.txt", "--out", "else"),
    "finetune": ("finetune", "old", *DATA, *STEPS, "--out", "old"),
    "finetune teacher": ("finetune", "old", "--teacher", "tuned", *DATA, *STEPS, "--out", "tuned"),
    "finetune data": ("finetune", "old", "--data", "else/photos", *STEPS, "--out", "else"),
    "plane": ("plane", "--models", "old", "new", *DATA, "--out", "new"),
    "plane data": ("plane", "--models", "old", "new", "--data", "else/photos", "--out", "else/photos"),
    "port-all": ("port-all", *BASES[:2], *BASES[4:], "--models", "tuned", *PORT, "--out", "."),
}


@pytest.mark.parametrize("name", [*COMMANDS])
def test_what_is_read_is_not_overwritten(place, monkeypatch, name):
    monkeypatch.chdir(place)
    words = COMMANDS[name]
    if name == "port-all":
        (place / "work").mkdir()
        monkeypatch.chdir(place / "work")
        words = [str(place / word) if word in ("old", "tuned", "new", ".") else word for word in words]
    (place / "else" / "gradients").mkdir(exist_ok=True)
    before = contents(place)
    for module in ("inputs", "finetune", "streamed"):
        for reader in ("load_checkpoint", "open_repository"):
            monkeypatch.setattr(f"hf_retarget.porting.{module}.{reader}", pytest.fail, raising=False)
    done = run(*words, "--overwrite")
    assert done.exit_code == 1, done.output
    if name == "port-all":
        assert "which this run reads" in done.output
        before |= {each: hashed for each, hashed in contents(place).items() if each.startswith("port-all")}
    else:
        assert [line for line in done.stderr.splitlines() if "Error: " in line] == [done.stderr.splitlines()[-1]]
        assert any(words in done.stderr for words in ("this run reads", "holds other files"))
    assert contents(place) == before


def test_convert_does_not_write_where_anything_is(place):
    before = contents(place)
    for out in ("old", "old/model.safetensors", "link"):
        done = run("convert", place / "old", place / out)
        assert (done.exit_code, "exists already" in done.stderr) == (1, True), done.output
    assert contents(place) == before


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_folder_of_links_to_inputs_is_replaced_and_the_inputs_stay(place, link):
    lms = save_trio(place / "lm")
    streamed = ("port", *(word for side, folder in lms.items() for word in (f"--{side.replace('_', '-')}", folder)))
    bases = [place / each if each in ("old", "tuned", "new") else each for each in BASES]
    commands = {
        "ported": (("port", *bases, *PORT), place / "new"),
        "finetuned": (("finetune", place / "new", *DATA, *STEPS), place / "new"),
        "streamed": ((*streamed, "--data", "none"), lms["new_base"]),
        "drawn": (("plane", "--models", place / "old", place / "new", *DATA, "--grid", "2"), None),
    }
    for name, (command, read) in commands.items():
        linked, whole = place / f"{name}-linked", place / name
        assert run(*command, "--out", whole).exit_code == 0
        linked.mkdir()
        files = ("model.safetensors", "config.json") if read else ("plane.json", "plane.html")
        for file in files:
            link((read or place / "old") / (file if read else "model.safetensors"), linked / file)
        before = contents(place / "old") | contents(place / "new") | contents(place / "lm")
        done = run(*command, "--out", linked, "--overwrite")
        assert done.exit_code == 0, done.output
        assert contents(place / "old") | contents(place / "new") | contents(place / "lm") == before
        weights = [path.name for path in whole.glob("*model*.safetensors")]
        assert all(hash_file(whole / each) == hash_file(linked / each) for each in weights)
        assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in linked.iterdir() if path.is_file())
