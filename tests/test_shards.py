"""`port-all --shard`: several machines share the models, any of them may die, and one page comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting.port_all import Shard, list_jobs, read_shard

NAMES = ("birds", "cars", "pets")
COMMAND = (sys.executable, "-m", "hf_retarget", "port-all")


def make(folder: Path, seed: int) -> Path:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return save_model(folder, model.state_dict(), load_checkpoint(model))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new", *NAMES)):
        make(folder / name, seed)
    return folder


def arguments(models: Path, out: Path, *more: object) -> list[str]:
    named = (models / name for name in NAMES)
    bases = ("--src-base", models / "old", "--new-base", models / "new", "--models", *named)
    return list(map(str, (*bases, "--data", "none", "--device", "cpu", "--out", out, *more)))


def run(*options: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["port-all", *map(str, options)], env=env)


def start(models: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *arguments(models, out, *more)], **pipes)


# ---- the division


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_model_is_in_one_part_whatever_their_order(count):
    jobs = list_jobs([f"me/{name}" for name in NAMES])
    parts = [Shard(number, count).choose(jobs) for number in range(count)]
    assert sorted(job.folder for part in parts for job in part) == sorted(NAMES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if count > 1:
        assert parts == [Shard(number, count).choose(jobs[::-1]) for number in range(count)]


def slurm(task: object, first: object = 0, count: object = 4, **more: str) -> dict[str, str]:
    found = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_COUNT": count}
    return {name: str(value) for name, value in found.items()} | more


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, Shard()),
        ("3/4", {}, Shard(3, 4)),
        (None, slurm(3), Shard(3, 4)),
        (None, slurm(1, first=1), Shard(0, 4)),
        (None, slurm(20, count=3, SLURM_ARRAY_TASK_STEP="10"), Shard(2, 3)),
        ("0/1", slurm(3), Shard(0, 1)),
    ],
)
def test_the_part_is_named_or_that_of_slurm(text, environment, expected):
    assert read_shard(text, environment) == expected


@pytest.mark.parametrize("text", ["4/4", "5/4", "0/0", "-1/4", "1", "a/b", "1/4/2", "", "1.5/3", "0/999999", "٣/٤"])
def test_a_part_out_of_range_is_one_line_before_anything_is_written(text, models, tmp_path):
    result = run(*arguments(models, tmp_path / "out", "--shard", text))
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1].startswith(f"Error: '{text}' is not a valid part; write --shard I/N")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "environment", [slurm(7, count=3), slurm(2, first=1, SLURM_ARRAY_TASK_STEP="3"), slurm("x"), slurm(0, count="")]
)
def test_an_array_that_is_no_range(environment, models, tmp_path):
    result = run(*arguments(models, tmp_path / "out"), env=environment)
    assert (result.exit_code, "is not a valid part" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


# ---- several processes


def test_two_processes_share_the_models_one_dies_and_is_started_again_and_one_page_comes_out(models, tmp_path):
    out = tmp_path / "ported"
    dying, other = (start(models, out, "--shard", f"{number}/2") for number in range(2))
    until = time.monotonic() + 200
    while not (out / "port-all-0-of-2.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(dying.pid, signal.SIGKILL)
    dying.communicate()
    printed = other.communicate(timeout=200)
    assert (dying.returncode, other.returncode) == (-signal.SIGKILL, 0), printed
    assert "part 1 of 2 (from 0): 1 of 3 models" in printed[1]
    assert printed[0].splitlines()[-1] == f"1 of 1 ported, in {out}"
    collected = run("--out", out, "--collect")
    assert collected.exit_code == 1
    assert "waiting" in collected.stdout
    again = run(*arguments(models, out, "--shard", "0/2"))
    assert again.exit_code == 0, again.output
    collected = run("--out", out, "--collect")
    assert collected.exit_code == 0, collected.output
    assert collected.stdout.splitlines()[-1] == f"3 of 3 ported, in {out}"
    summaries = {"port-all-0-of-2.json", "port-all-1-of-2.json", "port-all.json", "port-all.html"}
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {*NAMES, *summaries}
    alone = rt.port_all(models / "old", models / "new", [models / "cars"], "none", out=tmp_path / "alone")
    assert alone.failed == ()
    same = [(folder / "cars" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "alone")]
    assert same[0] == same[1], "how the models are divided changes nothing"


def test_a_part_runs_once_at_a_time(models, tmp_path):
    from hf_retarget.files import lock_folder

    out = tmp_path / "ported"
    with lock_folder(out / "port-all-0-of-2.json"):
        result = run(*arguments(models, out, "--shard", "0/2"))
        assert (result.exit_code, "another run is working on" in result.stderr) == (1, True)
        assert run(*arguments(models, out, "--shard", "1/2")).exit_code == 0, "another part is not kept waiting"


def test_more_parts_than_models(models, tmp_path):
    result = run(*arguments(models, tmp_path / "out", "--shard", "6/7"))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"0 of 0 ported, in {tmp_path / 'out'}")


def test_a_permutation_for_all_parts_has_to_be_there(models, tmp_path):
    result = run(*arguments(models, tmp_path / "out", "--shard", "0/2", "--reuse-permutation"))
    assert result.exit_code == 1
    assert "has no permutation yet" in result.stderr
    assert "without --shard" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_work_on_one_part_together(models, tmp_path):
    """Two agents of torchrun, as on two machines, each with one process."""
    out, port = tmp_path / "ported", 29500 + os.getpid() % 1000
    place = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *place, "--node-rank", str(rank), "-m", "hf_retarget",
             "port-all", *arguments(models, out, "--shard", "1/2")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [each.communicate(timeout=200) for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], printed
    assert printed[0][0].splitlines()[-1] == f"1 of 1 ported, in {out}"
    assert printed[1][0] == "", "one process of all prints and writes"
    document = json.loads((out / "cars" / "port.json").read_text())
    assert document["device"]["processes"] == 2
