"""The same inputs make the same bytes, wherever and however often a run is interrupted; else the record says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner
from tiny_lm import save_trio

from hf_retarget import training
from hf_retarget.cli import main
from hf_retarget.files import load_tensors, save_tensors
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting import resume

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--steps", "3", "--batch-size", "8", "--device", "cpu", "--quiet")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, tuple[str, ...]]:
    """A port with gradients, a fine-tuning, and a port without images; what they make in one process and thread."""
    place = tmp_path_factory.mktemp("same")
    for seed, name in enumerate(("src-base", "src-ft", "new-base")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        save_model(place / name, net.state_dict(), load_checkpoint(net))
    lms = save_trio(place / "lm", max_shard_size="20KB")
    trio = [word for name in ("src-base", "src-ft", "new-base") for word in (f"--{name}", str(place / name))]
    streamed = [word for name, path in lms.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    method = ("--method", "fgmt", "--grad-batches", "1", "--bn-batches", "1", "--control", "none")
    return {
        "port": ("port", *trio, *DATA, *STEPS, *method),
        "finetune": ("finetune", str(place / "src-base"), *DATA, *STEPS, "--checkpoint-every", "1"),
        "streamed": ("port", *streamed, "--data", "none", "--quiet"),
    }


def run(arguments: tuple[str, ...], out: str | Path, *more: str) -> int:
    return CliRunner().invoke(main, [*arguments, "--out", str(out), *more]).exit_code


def read(out: Path) -> dict[str, bytes]:
    """Weights, permutation and recipe."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".safetensors", ".yaml")}


def environment(out: Path) -> dict[str, object]:
    record = out / "port.json" if (out / "port.json").exists() else out / "finetune.json"
    return json.loads(record.read_text())["run"]["environment"]


@pytest.mark.parametrize("kind", ["port", "finetune", "streamed"])
def test_another_folder_and_more_threads(commands, tmp_path, monkeypatch, kind):
    found = {}
    for name, threads in (("one", 1), ("elsewhere", 1), ("more", 2)):
        (tmp_path / name / "deep").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name / ("deep" if name == "elsewhere" else ""))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert run(commands[kind], "out") == 0
        finally:
            torch.set_num_threads(before)
        found[name] = Path("out").resolve()
    one, elsewhere, more = found.values()
    assert read(elsewhere) == read(one)
    assert environment(elsewhere) == environment(one)
    assert environment(more) == {**environment(one), "threads": 2}
    assert {"torch", "threads", "device", "processor"} <= environment(one).keys()
    assert read(more).keys() == read(one).keys()
    if kind == "streamed":  # a sum of three numbers has one order
        assert read(more) == read(one)
    if kind == "port":
        assert read(more)["permutation.safetensors"] == read(one)["permutation.safetensors"]


def test_two_processes_fine_tune_to_the_same_bytes(commands, tmp_path):
    command = [sys.executable, *TWO, "-m", "hf_retarget", *commands["finetune"], "--out", tmp_path / "two"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert run(commands["finetune"], tmp_path / "one") == 0
    assert read(tmp_path / "two") == read(tmp_path / "one")


@pytest.mark.parametrize("kind", ["port", "finetune", "streamed"])
def test_a_run_that_is_interrupted_at_every_step(commands, tmp_path, monkeypatch, kind):
    """Each run makes one step, and is then interrupted."""
    owner, name = {
        "port": (resume.StepDiary, "write"),
        "finetune": (training._Training, "_save"),
        "streamed": ("hf_retarget.porting.streamed", "save_record"),
    }[kind]
    owner = sys.modules[owner] if isinstance(owner, str) else owner
    keep, steps = getattr(owner, name), 0

    def keep_and_stop(*arguments, **options) -> None:
        nonlocal steps
        keep(*arguments, **options)
        steps += 1
        raise KeyboardInterrupt

    out, whole = tmp_path / "out", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, keep_and_stop)
        codes = [run(commands[kind], out)]
        while codes[-1] == 130 and len(codes) < 9:
            codes.append(run(commands[kind], out, "--resume"))
    assert codes == [130] * steps + [0]
    assert steps >= 2
    assert run(commands[kind], whole) == 0
    assert read(out) == read(whole)


def test_tensors_from_a_file_are_aligned_as_those_of_torch(tmp_path):
    """Else the last digits of products differ after `--resume`."""
    save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1), "b": torch.ones(5, 7), "c": torch.ones(3)}, {})
    tensors, _ = load_tensors(tmp_path / "a.safetensors")
    assert [each.data_ptr() % 64 for each in tensors.values()] == [0, 0, 0]
