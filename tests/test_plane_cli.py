"""`hf-retarget plane`: output, exit codes, messages, and a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result

from hf_retarget.cli import main
from hf_retarget.cli.plane import read_models, read_permutations
from hf_retarget.files import load_record
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--device", "cpu")
SHORT = (*DATA, "--limit", "12", "--bn-batches", "1", "--batch-size", "8", "--grid", "5")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plane", *map(str, arguments)])


def start(*arguments: object) -> subprocess.Popen[str]:
    # As many threads as here: sums that are divided otherwise differ in their last bits.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", "from hf_retarget.cli import main; main()", "plane", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def make(folder: Path, seed: int, classes: int = 10, name: str = "test_resnet") -> Path:
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, in_chans=1)
    return save_model(folder, model.state_dict(), load_checkpoint(model))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        make(folder / name, seed)
    make(folder / "five", 3, classes=5)
    make(folder / "other", 4, name="test_efficientnet")
    return folder


def test_a_line_prints_its_barrier(models, tmp_path, monkeypatch):
    out = tmp_path / "line"
    monkeypatch.setattr(sys, "argv", ["hf-retarget", "plane", "--token", "hf_secret"])
    result = run("--models", models / "a", models / "b", *SHORT, "--out", out, "--token", "hf_secret")
    assert result.exit_code == 0, result.output
    figures = json.loads((out / "plane.json").read_text())
    table, barrier, end = result.stdout.rstrip().split("\n\n")
    assert table.splitlines()[0].split()[-2:] == ["TOP-1", "LOSS"]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["a", "b"]
    assert f"loss {figures['barrier']['loss']:.3f} at" in barrier
    assert end == f"5 points; pictures and figures in {out}"
    assert (figures["kind"], figures["data"]["images"], len(figures["points"])) == ("line", 12, 5)
    assert not any(b"hf_secret" in path.read_bytes() for path in out.iterdir())
    assert figures["command"] == "hf-retarget plane"


def test_three_models_make_a_plane_in_one_document(models, tmp_path):
    sides = (f"first={models / 'a'}", models / "b", f"third={models / 'c'}")
    permuted = ("--permute", "third=match")
    result = run(*sides, *SHORT, *permuted, "--grid", "2", "--margin", "0", "--json", "-q", "--out", tmp_path / "plane")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["folder"] == str(tmp_path / "plane")
    assert [each["name"] for each in document["models"]] == ["first", "b", "third"]
    assert [bool(each["permuted"]) for each in document["models"]] == [False, False, True]
    assert len(document["points"]) in (5, 6, 7), "a corner may lie on the grid"


def test_a_killed_run_goes_on_to_the_same_figures(models, tmp_path):
    trio = [models / name for name in "abc"]
    whole = start("--models", *trio, *SHORT, "--out", tmp_path / "whole")
    out = tmp_path / "plane"
    killed = start("--models", *trio, *SHORT, "--out", out)
    kept = out / "points.json"
    deadline = time.monotonic() + 120
    while killed.poll() is None and time.monotonic() < deadline:
        with suppress(OSError, ValueError):  # not there yet
            if len(load_record(kept)["points"]) > 4:
                break
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    assert "--resume" in run("--models", *trio, *SHORT, "--out", out).stderr
    resumed = run("--models", *trio, *SHORT, "--out", out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "points are known" in resumed.stderr
    text, errors = whole.communicate(timeout=120)
    assert whole.returncode == 0, errors
    assert text.splitlines()[0].split()[-2:] == ["TOP-1", "LOSS"]
    one, two = (json.loads((folder / "plane.json").read_text()) for folder in (tmp_path / "whole", out))
    assert one["points"] == two["points"]
    assert (out / "plane.csv").read_bytes() == (tmp_path / "whole" / "plane.csv").read_bytes()
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A", "OTHER"), "only models of one architecture have weights between them"),
        (("A", "FIVE"), "differ in size: 10 classes and 5"),
        (("A", "B", "A"), "have the same weights"),
        (("A",), "1 models were given; give two for a line or three for a plane"),
        (("A", "./missing"), "there is no file or folder"),
        (("A", "B", "--permute", "b=nowhere"), "there is no permutation 'nowhere'"),
        (("A", "B", "--permute", "x=match"), "there is no model 'x' to permute; the models are a, b"),
        (("A", "B", "--data", "fashion-mnits"), "did you mean 'fashion-mnist'?"),
        (("A", "B", "--report", "."), "there is no report.html in '.'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(arguments, message, models, tmp_path):
    given = [str(models / each.lower()) if each in ("A", "B", "FIVE", "OTHER") else each for each in arguments]
    result = run(*SHORT, *given, "--out", tmp_path / "plane")
    assert result.exit_code == 1, result.output
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b", "--out", "x"),
        (*DATA, "--out", "x"),
        ("a", "b", *DATA),
        ("a", "b", *DATA, "--out", "x", "--grid", "1"),
        ("a", "b", *DATA, "--out", "x", "--permute", "ported/"),
        ("n=a", "n=b", *DATA, "--out", "x"),
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_names_and_permutations_are_read():
    assert read_models(("a=x/m", "y/m")) == {"a": "x/m", "y/m": "y/m"}
    assert read_models(("runs/lr=0.1/m", "b")) == {"m": "runs/lr=0.1/m", "b": "b"}
    assert read_permutations(("b=match", "c=x=y")) == {"b": "match", "c": "x=y"}


def test_help_ends_with_an_example():
    assert run("--help").stdout.rstrip().splitlines()[-1].strip().startswith("hf-retarget plane ")
