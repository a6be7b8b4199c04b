"""Machines on which something is missing: no temporary folder, places that cannot be written, a clock that jumps."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from tiny_lm import save_trio

from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--steps", "2", "--batch-size", "8", "--device", "cpu", "--quiet")
PORT = (*STEPS, "--grad-batches", "1", "--bn-batches", "1", "--control", "none", "--method", "naive")
NOWHERE = Path("/proc/ported")  # nobody may write there, whoever runs the tests

Commands = dict[str, tuple[object, ...]]


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Commands:
    place = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "tuned", "new")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        save_model(place / name, net.state_dict(), load_checkpoint(net))
    trio = ("--src-base", place / "old", "--src-ft", place / "tuned", "--new-base", place / "new")
    lms = [each for name, path in save_trio(place / "lm").items() for each in (f"--{name.replace('_', '-')}", path)]
    return {
        "port": ("port", *trio, *DATA, *PORT, "--out"),
        "finetune": ("finetune", place / "old", *DATA, *STEPS, "--out"),
        "streamed": ("port", *lms, "--data", "none", "--quiet", "--out"),
        "plane": ("plane", "--models", place / "old", place / "new", *DATA, "--grid", "2", "--limit", "9", "--out"),
        "port-all": ("port-all", *trio[:2], *trio[4:], "--models", place / "tuned", *DATA, *PORT, "--out"),
        "convert": ("convert", place / "old"),
    }


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def refused(result: Result, *words: str) -> None:
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: "), result.stderr
    assert all(word in last for word in words), last


@pytest.mark.parametrize("name", ["port", "finetune", "streamed", "plane", "port-all", "convert"])
def test_a_place_that_cannot_be_written(commands: Commands, tmp_path: Path, name: str):
    refused(run(*commands[name], NOWHERE / "deep"), "/proc/")
    (tmp_path / "file").write_text("mine")
    refused(run(*commands[name], tmp_path / "file" / "deep"), "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_cannot_be_written(commands: Commands, tmp_path: Path):
    ported = tmp_path / "ported"
    assert run(*commands["port"], ported).exit_code == 0
    for option in ("--html", "--csv"):
        refused(run("compare", ported, option, NOWHERE / "x.html"), "/proc/")
    for option in ("--svg", "--html", "--save"):
        refused(run("inspect", ported, option, NOWHERE / "x.svg"), "/proc/")


def test_a_cache_of_gradients_that_cannot_be_written(commands: Commands, tmp_path: Path):
    words = [*commands["port"][:-1], "--method", "fgmt", "--gradient-cache", NOWHERE, "--out"]
    refused(run(*words, tmp_path / "ported"), "/proc/")


@pytest.mark.parametrize("name", ["port", "finetune", "streamed", "plane"])
def test_without_a_temporary_folder(commands: Commands, tmp_path: Path, name: str, monkeypatch):
    """Python looks in TMPDIR, /tmp and the current folder: here, none of them can be written."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(NOWHERE)])
    done = run(*commands[name], tmp_path / "out")
    if done.exit_code != 0:
        refused(done, "No usable temporary directory")
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if done.exit_code == 0 else [])


@pytest.mark.parametrize("name", ["port", "finetune", "streamed"])
def test_a_clock_that_jumps(commands: Commands, tmp_path: Path, name: str, monkeypatch):
    assert run(*commands[name], tmp_path / "steady").exit_code == 0
    jumps = itertools.cycle([4e9, 0.0, 1e9, -1e9, 1e9 + 0.5])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    done = run(*commands[name], tmp_path / "jumping")
    assert done.exit_code == 0, done.output
    whole, found = ((tmp_path / each / "model.safetensors") for each in ("steady", "jumping"))
    if whole.exists():
        assert whole.read_bytes() == found.read_bytes()
    record = tmp_path / "jumping" / ("finetune.json" if name == "finetune" else "port.json")
    seconds = json.loads(record.read_text()).get("seconds", {})
    assert all(each >= 0 for each in seconds.values()), seconds
