"""`hf-retarget finetune` and `hf-retarget evaluate`: output, exit codes, messages, and a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result

from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model

SHORT = ("--data", "fashion-mnist", "--data-limit", "80", "--data-image-size", "28", "--batch-size", "16")
TRAIN = (*SHORT, "--steps", "6", "--lr", "0.05")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def process(*arguments: str) -> subprocess.Popen[str]:
    # As many threads as here: sums that are divided otherwise differ in their last bits.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", "from hf_retarget.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5, in_chans=1)
    return str(save_model(tmp_path_factory.mktemp("models") / "base", model.state_dict(), load_checkpoint(model)))


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("tuned") / "tuned"
    return run("finetune", base, *TRAIN, "--evaluate-every", "3", "--out", str(out)), out


# ---- finetune


def test_finetune_prints_figures_and_says_what_to_do_next(tuned):
    result, out = tuned
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(rows) == ["model", "data", "steps", "validation", "test", "saved"]
    assert rows["model"] == "test_resnet, 10 classes, head: zero"
    assert rows["data"] == "fashion-mnist (72 train, 8 validation, 80 test)"
    assert [step in rows["validation"] for step in ("(step 0)", "(step 3)", "(step 6)")] == [True] * 3
    assert rows["saved"] == str(out)
    assert result.stderr.splitlines() == [
        "head: zero (the model has 5 classes, the data 10)",
        f"Next: hf-retarget evaluate {out} --data {out}/recipe.yaml",
    ]


def test_finetune_as_json_is_one_document(base, tmp_path):
    result = run("finetune", base, *TRAIN, "--head", "zero", "--json", "--quiet", "--out", str(tmp_path / "tuned"))
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["folder"] == str(tmp_path / "tuned")
    assert document["format"] == "hf-retarget/finetune/1"
    assert document["head"]["kind"] == "zero"
    assert document["options"]["recipe"]["finetune"]["lr"] == 0.05


def test_a_killed_run_goes_on_to_the_same_bytes(tuned, base, tmp_path):
    _, whole = tuned
    out = tmp_path / "tuned"
    arguments = ("finetune", base, *TRAIN, "--evaluate-every", "3", "--checkpoint-every", "1", "--out", str(out))
    running = process(*arguments)
    state = tmp_path / ".tuned.work" / "state.safetensors"
    deadline = time.monotonic() + 120
    while not state.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    _, errors = running.communicate()
    assert running.returncode == -signal.SIGKILL, errors
    assert not out.exists()
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "--resume" in refused.stderr
    resumed = run(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "continuing the fine-tuning at step" in resumed.stderr
    for name in ("model.safetensors", "initial_head.safetensors", "config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_an_interrupted_run_says_how_to_go_on(base, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("hf_retarget.porting.finetune"), "finetune", interrupt)
    result = run("finetune", base, *TRAIN, "--out", str(tmp_path / "tuned"))
    assert result.exit_code == 130
    assert "interrupted; the same command with --resume " in result.stderr
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("test_resnett", *TRAIN), "test_resnet"),
        (("./missing", *TRAIN), "there is no file or folder"),
        (("BASE", *SHORT), "give --steps or --epochs"),
        (("BASE", *TRAIN, "--data", "fashion-mnits"), "did you mean 'fashion-mnist'?"),
        (("BASE", *TRAIN, "--head", "keep"), "the model has 5 classes, the data 10"),
        (("BASE", *TRAIN, "--freeze", "layer9"), "no parameter under 'layer9'"),
        (("BASE", *TRAIN, "--data-classes", "Bag"), "only one class"),
        (("BASE", *TRAIN, "--num-classes", "9"), "5 classes, not 9"),
        (("BASE", *TRAIN, "--device", "abacus"), "abacus"),
        (("BASE", *TRAIN, "--lr", "1e30"), "lower lr"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(arguments, message, base, tmp_path):
    result = run("finetune", *(base if each == "BASE" else each for each in arguments), "--out", str(tmp_path / "out"))
    errors = [line for line in result.stderr.splitlines() if not line.startswith("head: ")]
    assert result.exit_code == 1, result.output
    assert len(errors) == 1
    assert errors[0].startswith("Error: ")
    assert message in errors[0]
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()
    if message != "lower lr":  # that one has begun, and could go on
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("finetune", "x", *TRAIN),
        ("finetune", "x", "--steps", "3", "--out", "y"),
        ("finetune", "x", *TRAIN, "--out", "y", "--record", "0"),
        ("finetune", "x", *TRAIN, "--out", "y", "--precision", "fp8"),
        ("evaluate", "x"),
        ("evaluate", "x", "--data", "fashion-mnist", "--split", "tset"),
        ("evaluate", "x", "--data", "fashion-mnist", "--steps", "3"),
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


# ---- evaluate


def test_evaluate_in_a_process_of_its_own_prints_plain_text(tuned):
    _, folder = tuned
    running = process("evaluate", str(folder), *SHORT[:-2], "--batch-size", "32")
    text, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert errors == "", "nobody watches: no progress"
    figures, classes, confusions = text.rstrip().split("\n\n")
    expected = json.loads((folder / "finetune.json").read_text())["figures"]["test"]
    assert f"top-1   {expected['top1']:.2%}" in figures
    assert f"top-5   {expected['top5']:.2%}" in figures
    assert f"loss    {expected['loss']:.4f}" in figures
    rows = classes.splitlines()
    assert rows[0].split() == ["CLASS", "IMAGES", "ACCURACY"]
    shares = [float(row.split()[-1].rstrip("%")) for row in rows[1:]]
    assert len(shares) == 10
    assert shares == sorted(shares), "the worst come first"
    assert confusions.splitlines()[0].split() == ["IS", "TAKEN", "FOR", "IMAGES", "SHARE"]
    assert len(confusions.splitlines()) <= 12


def test_evaluate_as_json_has_everything(tuned):
    _, folder = tuned
    result = run("evaluate", str(folder), "--data", str(folder / "recipe.yaml"), "--split", "train", "--json")
    document = json.loads(result.stdout)
    assert (document["format"], document["split"], document["images"]) == ("hf-retarget/evaluate/1", "train", 72)
    assert document["classes"][9]["name"] == "Ankle boot"
    assert sum(each["images"] for each in document["classes"]) == 72
    right = sum(row[number] for number, row in enumerate(document["confusion"]))
    assert document["top1"] == pytest.approx(right / 72)


def test_a_folder_without_splits_is_scored_as_a_whole(tmp_path):
    from PIL import Image

    model = timm.create_model("test_resnet", num_classes=2)
    save_model(tmp_path / "model", model.state_dict(), load_checkpoint(model), labels=("ant", "bee"))
    for label in ("ant", "bee"):
        (tmp_path / "photos" / "test" / label).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (32, 32), (10 * number,) * 3).save(tmp_path / "photos" / "test" / label / f"{number}.png")
    photos = ("--data", str(tmp_path / "photos" / "test"), "--json")
    whole, held = (run("evaluate", str(tmp_path / "model"), *photos, *more) for more in ((), ("--split", "test")))
    document = json.loads(whole.stdout)
    assert (document["split"], document["images"]) == ("all", 40)
    assert [each["images"] for each in document["classes"]] == [20, 20]
    (note,) = document["notes"]
    assert "all 40 images are scored (--split test" in note
    document = json.loads(held.stdout)
    assert (document["split"], document["images"]) == ("test", 4)
    assert "held out (4 images)" in document["notes"][0]


def test_all_lists_every_confusion(base, tmp_path):
    folder = tmp_path / "tuned"
    run("finetune", base, *TRAIN, "--head", "fresh", "--out", str(folder))  # a random head confuses many classes
    few = run("evaluate", str(folder), *SHORT[:-2])
    many = run("evaluate", str(folder), *SHORT[:-2], "--all")
    hidden = int(few.stdout.splitlines()[-1].split()[2])
    assert "--all" in few.stdout.splitlines()[-1]
    assert len(many.stdout.splitlines()) == len(few.stdout.splitlines()) - 1 + hidden


def test_on_a_terminal_there_are_tables(tuned, monkeypatch, capsys):
    _, folder = tuned
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    main(["evaluate", str(folder), *SHORT[:-2]], standalone_mode=False)
    text = capsys.readouterr().out
    assert "───" in text
    assert "Ankle boot" in text


def test_evaluating_on_other_classes_is_one_line(base, tuned):
    for model, message in ((base, "has 5"), (str(tuned[1]), "only the model has 'T-shirt/top'")):
        classes = () if model == base else ("--data-classes", "Bag", "--data-classes", "Coat")
        result = run("evaluate", model, *SHORT[:-2], *classes)
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert message in result.stderr


# ---- help


@pytest.mark.parametrize("command", ["finetune", "evaluate"])
def test_help_ends_with_an_example(command):
    text = run(command, "--help").stdout
    assert text.rstrip().splitlines()[-1].strip().startswith(f"hf-retarget {command} ")
