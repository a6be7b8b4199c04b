"""`hf-retarget port`: output, exit codes, messages, a run that is killed, and two processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from PIL import Image

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.contenders import find_contender
from hf_retarget.data import Split
from hf_retarget.document import read_document
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "80", "--data-image-size", "28", "--data-validation", "0.2")
SMALL = ("--steps", "3", "--batch-size", "16", "--grad-batches", "2", "--bn-batches", "2", "--device", "cpu")
SHORT = ("--method", "fgmt", *SMALL)
SAME = ("model.safetensors", "permutation.safetensors", "config.json", "graph.json", "recipe.yaml")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def start(*arguments: object, module: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    # As many threads as here: sums that are divided otherwise differ in their last bits.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, *(module or ("-m", "hf_retarget")), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # What a shell starts in the background ignores SIGINT, and so would its children; ours should heed it.
    return subprocess.Popen(command, text=True, env=environment, preexec_fn=heed_interrupts, **pipes)


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(path: Path, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def make(folder: Path, seed: int, classes: int, **options: object) -> Path:
    torch.manual_seed(seed)
    model = timm.create_model(options.pop("name", "test_resnet"), num_classes=classes, in_chans=1)
    return save_model(folder, model.state_dict(), load_checkpoint(model), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Old, tuned and new: the bases have 5 classes and 7, the tuned model those of the clothes."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "old", 0, 5)
    make(folder / "new", 1, 7)
    old = load_checkpoint(folder / "old")
    tuned = old.build(10, seed=3)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_model(folder / "tuned", tuned.state_dict(), old, num_classes=10)
    return folder


@pytest.fixture(scope="module")
def trio(models) -> tuple[str, ...]:
    sides = zip(("--src-base", "--src-ft", "--new-base"), ("old", "tuned", "new"), strict=True)
    return tuple(each for flag, name in sides for each in (flag, str(models / name)))


@pytest.fixture(scope="module")
def whole(trio, tmp_path_factory) -> tuple[str, str, Path]:
    """A port in a process of its own, from beginning to end."""
    out = tmp_path_factory.mktemp("whole") / "ported"
    running = start("port", *trio, *DATA, *SHORT, "--out", out, "--token", "hf_secret")
    text, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    return text, errors, out


def test_the_table_the_verdict_and_the_folder_are_on_stdout(whole):
    text, errors, out = whole
    table, rest = text.split("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["ON", "THE", "TEST", "IMAGES", "TOP-1", "TOP-5", "LOSS", "FLIPS", "−/+", "PRICE"]
    order = ("tuned", "tuned-head", "old-head", "base", "naive", "head", "plain", "fgmt")
    names = [find_contender(name).label for name in order]
    assert [line.startswith(name) for line, name in zip(lines[1:], names, strict=True)] == [True] * 8
    document = read_document(out / "port.json")
    assert f"{document.port.test.top1:.1%}" in lines[-1]
    assert f"(best step {document.port.best_step} of 3)" in lines[-1]
    assert f"({document.alternative.gradients} minibatches" in lines[-2]
    assert rest.splitlines() == [document.verdict, f"Saved to {out}"]
    told = errors.splitlines()
    assert any(line.startswith("head: zero (the heads differ in size") for line in told)
    assert sum(line.startswith("step ") for line in told) == 3
    assert told[-2] == f"Look: {out}/report.html"
    assert [line.split()[0] for line in told[-5:-3]] == ["naive", "fgmt"], "the curves in a line each"
    assert told[-1].startswith("Next: hf-retarget ")
    assert sum("plain fine-tuning, each including" in line for line in told) == 1, "seconds side by side"
    assert not any("Warning" in line or "\r" in line for line in told)


def test_the_mask_alone_stands_beside_masked_steps(trio, tmp_path):
    masked = ("--method", "fgmt-sign", "--no-verify", "-q")
    result = run("port", *trio, *DATA, *SMALL, *masked, "--out", str(tmp_path / "ported"))
    assert result.exit_code == 0, result.output
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert any(row.startswith("mask alone, no matching") for row in rows)


def test_the_command_is_kept_without_the_token(whole):
    _, _, out = whole
    command = json.loads((out / "port.json").read_text())["command"]
    assert command.startswith("hf-retarget port --src-base ")
    assert not any(b"hf_secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())
    card = (out / "README.md").read_text()
    assert "hf-retarget port --src-base old --src-ft tuned --new-base new " in card, "others need not know the folders"
    assert str(out.parent) not in card


def test_python_makes_the_same_files(whole, models, tmp_path):
    _, _, out = whole
    sides = [models / name for name in ("old", "tuned", "new")]
    again = rt.port(*sides, recipe=out / "recipe.yaml", overrides={"port.control": "none"}, device="cpu")
    again.save(tmp_path / "again")
    for name in SAME[:-1]:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes(), name


def test_a_killed_port_goes_on_to_the_same_bytes(whole, trio, tmp_path):
    _, _, complete = whole
    out, state = tmp_path / "ported", tmp_path / ".ported.work" / "fgmt.state-2.safetensors"
    arguments = ("port", *trio, *DATA, *SHORT, "--out", out)
    running = start(*arguments)
    wait_for(state, running)
    running.send_signal(signal.SIGKILL)
    _, errors = running.communicate()
    assert running.returncode == -signal.SIGKILL, errors
    assert not out.exists()
    resumed = run(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "continuing the port after step" in resumed.stderr
    for name in SAME:
        assert (out / name).read_bytes() == (complete / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["ported"]


def test_two_processes_make_the_same_files_as_one(whole, trio, tmp_path):
    _, _, complete = whole
    out = tmp_path / "ported"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_retarget")
    running = start("port", *trio, *DATA, *SHORT, "--out", out, module=torchrun)
    text, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors[-2000:]
    assert text.count("Saved to") == 1, "one of them prints"
    for name in SAME:
        assert (out / name).read_bytes() == (complete / name).read_bytes(), name
    one, two = (read_document(folder / "port.json") for folder in (complete, out))
    assert two.device["processes"] == 2
    assert [(each.name, each.validation, each.test) for each in two.contenders] == [
        (each.name, each.validation, each.test) for each in one.contenders
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ported"]


def test_two_processes_choose_the_same_contender_as_one(trio, tmp_path):
    quick = (*DATA, *SMALL, "--no-verify", "--control", "none", "-q")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_retarget")
    for name, how in (("one", {}), ("two", {"module": torchrun})):
        running = start("port", *trio, *quick, "--out", tmp_path / name, **how)
        _, errors = running.communicate(timeout=200)
        assert running.returncode == 0, errors[-2000:]
    one, two = (read_document(tmp_path / name / "port.json") for name in ("one", "two"))
    assert one.find("matched") is not None, "a course was shared"
    assert [(each.name, each.validation, each.test) for each in one.contenders] == [
        (each.name, each.validation, each.test) for each in two.contenders
    ]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


def test_what_comes_next_without_labels_names_the_teacher(trio, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(24):
        Image.new("L", (28, 28), 10 * number).save(flat / f"{number:02}.png")
    arguments = ("--data", flat, "--data-image-size", "28", "--method", "head", "--control", "none")
    result = run("port", *trio, *arguments, "--bn-batches", "1", "--batch-size", "8", "--out", tmp_path / "ported")
    assert result.exit_code == 0, result.output
    tuned = trio[3]
    assert f"--teacher {tuned} --steps" in result.stderr.splitlines()[-1]
    assert "AGREEMENT" in result.stdout.splitlines()[0]


def test_json_is_one_document(trio, tmp_path):
    out = tmp_path / "ported"
    result = run("port", *trio, *DATA, *SHORT, "--control", "none", "--method", "naive", "--json", "-q", "--out", out)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["folder"] == str(out)
    assert document["recipe"]["port"]["method"] == "naive"


def test_a_dry_run_says_what_would_happen_and_writes_nothing(trio, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("port", *trio, *DATA, *SHORT, "--finetune-steps", "10", "--dry-run")
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["port"] == "fgmt, 3 steps, 12 gradients of a minibatch"
    assert rows["then"] == "fine-tuning, 10 steps"
    assert rows["control"] == "plain fine-tuning, 95 steps", "those of port and fine-tuning, and the forward passes"
    assert rows["data"] == "fashion-mnist (64 train, 16 validation, 80 test)"
    assert rows["memory"].endswith("GB, with all gradients kept")
    assert rows["time"].startswith("about ")
    assert list(tmp_path.iterdir()) == []
    document = json.loads(run("port", *trio, *DATA, *SHORT, "--dry-run", "--json", "-q").stdout)
    assert (document["format"], document["gradients"]) == ("hf-retarget/plan/1", 12)


def test_a_dry_run_takes_one_minibatch_however_many_the_port_would(trio, monkeypatch):
    drawn = []
    original = Split.batches
    monkeypatch.setattr(Split, "batches", lambda *a, **k: drawn.append(k.get("count")) or original(*a, **k))
    plans = [
        json.loads(run("port", *trio, *DATA, *SHORT, "--grad-batches", count, "--dry-run", "--json", "-q").stdout)
        for count in ("2", "200")
    ]
    assert drawn == [1, 1]
    assert plans[1]["gradients"] == 100 * plans[0]["gradients"]
    assert plans[1]["memory"] > plans[0]["memory"], "the images of a step are kept for both sides"


def test_on_a_terminal_there_is_a_table(trio, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    naive = ("--control", "none", "--method", "naive", "--no-verify", "--out", str(tmp_path / "ported"))
    main(["port", *trio, *DATA, *SHORT, *naive], standalone_mode=False)
    text = capsys.readouterr().out
    assert "───" in text
    assert find_contender("naive").label in text


# ---- what can go wrong


def refused(arguments: tuple[object, ...], message: str) -> None:
    result = run("port", *arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.exit_code == 1, result.output
    assert len(errors) == 1
    assert result.stderr.splitlines()[-1] == errors[0]
    assert message in errors[0]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--new-base", "OTHER"), "A port needs one architecture on all three sides"),
        (("--new-base", "./missing"), "there is no file or folder"),
        (("--new-base", "BROKEN"), "BROKEN"),
        (("--new-base", "WEIGHTS"), "--arch"),
        (("--new-base", "WEIGHTS", "--arch", "test_vit"), "is 'test_vit' the right --arch?"),
        (("--new-base", "resnet9000"), "not a file, folder, Hub id (org/name) or timm model; did you mean"),
        (("--new-base", "PICKLE", "--arch", "test_resnet"), "--allow-pickle"),
        (("--new-base", "EMPTY"), "is empty"),
        (("--src-ft", "OLD"), "10 classes, but"),
        (("--data", "fashion-mnits"), "did you mean 'fashion-mnist'?"),
        (("--data", "EMPTY"), "EMPTY"),
        (("--data", "TEXTS"), "cannot be read"),
        (("--data", "NUMBERS"), "'numbers.parquet' has 13 classes"),
        (("--data-classes", "Bag"), "only one class"),
        (("--method", "oracle"), "--tuned-target"),
        (("--trajectory", "actual"), "--checkpoints"),
        (("--permutation", "WEIGHTS"), "is not a permutation"),
        (("--initial-head", "WEIGHTS"), "[5, 96]"),
        (("--device", "abacus"), "abacus"),
        (("--out", "EXISTS"), "is not empty"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(changes, message, models, trio, tmp_path):
    places = {name: tmp_path / name.lower() for name in ("OTHER", "BROKEN", "EMPTY", "EXISTS", "TEXTS")}
    places |= {"PICKLE": tmp_path / "weights.pth", "NUMBERS": tmp_path / "numbers.parquet"}
    places |= {"OLD": models / "old", "WEIGHTS": models / "old" / "model.safetensors"}
    make(places["OTHER"], 0, 5, name="test_efficientnet")
    shutil.copytree(models / "new", places["BROKEN"])
    with open(places["BROKEN"] / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    places["EMPTY"].mkdir()
    torch.save({"w": torch.zeros(1)}, places["PICKLE"])
    for name in (f"{label}/{number}.png" for label in "abcdefghij" for number in range(4)):
        (places["TEXTS"] / name).parent.mkdir(parents=True, exist_ok=True)
        (places["TEXTS"] / name).write_text("no picture")
    table = rows_of([*range(10), 12])
    table.to_parquet(places["NUMBERS"])
    places["EXISTS"].mkdir()
    (places["EXISTS"] / "thesis.tex").write_text("precious")
    there = sorted(tmp_path.rglob("*"))
    given = [str(places.get(each, each)) for each in changes]
    refused((*trio, *DATA, *SHORT, "--out", tmp_path / "ported", *given), message.replace(*_named(places, message)))
    assert sorted(tmp_path.rglob("*")) == there


def rows_of(labels: list[int]) -> datasets.Dataset:
    """Two gray pictures for each label, which has no name."""
    pictures = [Image.new("L", (28, 28), 20 * label) for label in labels for _ in range(2)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    labels = [label for label in labels for _ in range(2)]
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


def _named(places: dict[str, Path], message: str) -> tuple[str, str]:
    return (message, str(places[message])) if message in places else ("", "")


def test_a_full_disk_is_one_line_and_leaves_no_folder(trio, tmp_path):
    # A limit on the size of files fails as a full disk does: in the middle of a write, by the system itself.
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from hf_retarget.cli import main; main()"
    )
    running = start("port", *trio, *DATA, *SHORT, "--no-verify", "--out", tmp_path / "ported", module=("-c", limited))
    text, errors = running.communicate(timeout=200)
    assert (running.returncode, text) == (1, "")
    assert errors.splitlines()[-1].startswith(f"Error: cannot keep step 1 in '{tmp_path / '.ported.work'}': ")
    assert os.strerror(errno.EFBIG) in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_port_says_how_to_go_on(trio, tmp_path):
    arguments = (*trio, *DATA, *SHORT, "--no-verify", "--out", tmp_path / "ported")
    running = start("port", *arguments)
    wait_for(tmp_path / ".ported.work" / "fgmt.progress.json", running)
    running.send_signal(signal.SIGINT)
    text, errors = running.communicate(timeout=200)
    assert (running.returncode, text) == (130, "")
    assert errors.splitlines()[-1].startswith("Error: interrupted; the same command with --resume ")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == [".ported.work"]
    refused(arguments, "--resume")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--data", "fashion-mnist", "--out", "x", "--steps", "0"),
        ("--data", "fashion-mnist", "--out", "x", "--method", "magic"),
        ("--data", "fashion-mnist", "--out", "x", "--permutation", "missing.safetensors"),
        ("--out", "x"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, trio):
    assert run("port", *trio, *arguments).exit_code == 2
    assert run("port", *arguments).exit_code == 2, "no models"


def test_help_says_what_the_tool_does():
    listed = run("--help").stdout
    assert "Move a fine-tuning to a new base" in listed
    assert [name in listed for name in ("port", "finetune", "evaluate")] == [True] * 3
    text = run("port", "--help").stdout
    assert text.rstrip().splitlines()[-1].strip().startswith("hf-retarget port ")
    text = run("port", "--help-all").stdout
    assert [heading in text for heading in ("Data (", "Port (", "Fine-tuning (")] == [True] * 3


def test_without_out_the_result_is_named_after_the_models(models, trio, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("port", *trio, *DATA, *SHORT, "--control", "none", "--no-verify")
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[0] == "the result goes to tuned-on-new"
    assert "Saved to tuned-on-new" in done.stdout
    assert (tmp_path / "tuned-on-new" / "model.safetensors").is_file()
    again = run(*command)
    assert again.exit_code == 1
    assert all(flag in again.stderr for flag in ("--out", "--resume", "--overwrite"))
    resumed = run(*command, "--resume")
    assert (resumed.exit_code, "is finished" in resumed.stderr) == (0, True)
    assert run(*command, "--overwrite").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tuned-on-new"]
