"""The commands at the paper's full size, run on small images under the real names of the datasets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pytest
import timm
from loopback_hub import Hub
from PIL import Image

from hf_retarget.models import load_checkpoint, save_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETS = {
    "cars": ("tanganke/stanford_cars", 196, "image", "label", "test"),
    "cub": ("bentrevett/caltech-ucsd-birds-200-2011", 200, "image", "label", "test"),
    "imagenet": ("ILSVRC/imagenet-1k", 1000, "image", "label", "validation"),
    "cifar10": ("uoft-cs/cifar10", 10, "img", "label", "test"),
    "cifar100": ("uoft-cs/cifar100", 100, "img", "fine_label", "test"),
}
"""Id, classes, columns and the split with labels to test on."""
FRUIT = ("apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle")

LOGGING = """#!/bin/sh
"{python}" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> "{log}"
"""

RUNNING = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from hf_retarget.cli import main

done = []
for line in Path(sys.argv[1]).read_text().splitlines():
    arguments = json.loads(line)
    small = ["--batch-size", "4", "--data-limit", "12", "--data-validation", "0.2", "-q"]
    if arguments[0] == "finetune":
        small += ["--steps", "2", "--epochs", "0", "--warmup", "0", "--lr", "0.001"]
        arguments = ["1" if each == "43" else each for each in arguments]
    else:
        assert arguments[-1] == "--dry-run"
        small += ["--json", "--no-verify"]
    result = CliRunner().invoke(main, arguments + small)
    words = result.stdout if result.exit_code == 0 else result.output + repr(result.exception)
    done.append([result.exit_code, words])
answer(done)
"""


def table(classes: int, image: str, label: str) -> bytes:
    buffer = BytesIO()
    names = [*FRUIT, *(f"kind {number}" for number in range(len(FRUIT), classes))]
    random = np.random.default_rng(0)
    pictures = []
    for _ in range(2 * classes):
        png = BytesIO()
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(png, "PNG")
        pictures.append({"bytes": png.getvalue(), "path": None})
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=names)})
    labels = [number % classes for number in range(2 * classes)]
    datasets.Dataset.from_dict({image: pictures, label: labels}, features=features).to_parquet(buffer)
    return buffer.getvalue()


@pytest.fixture
def stocked(hub: Hub, tmp_path: Path) -> Hub:
    """The datasets and models that the script names, filled with noise."""
    for name, classes, image, label, test in SETS.values():
        content = table(classes, image, label)
        files = {f"data/{split}-00000-of-00001.parquet": content for split in ("train", test)}
        hub.repository(name, files, kind="dataset")
    for tag in ("tv_in1k", "a1_in1k"):
        random = load_checkpoint(timm.create_model("resnet18"))
        folder = save_model(tmp_path / tag, random.weights, random)
        hub.repository(f"timm/resnet18.{tag}", {path.name: path.read_bytes() for path in folder.iterdir()})
    return hub


@pytest.mark.skipif(not shutil.which("sh"), reason="needs a shell")
@pytest.mark.slow
def test_every_port_of_the_script_can_be_planned(stocked: Hub, tmp_path: Path) -> None:
    folder, tools, log = tmp_path / "work", tmp_path / "bin", tmp_path / "commands"
    folder.mkdir()
    tools.mkdir()
    (tools / "hf-retarget").write_text(LOGGING.format(python=sys.executable, log=log))
    (tools / "hf-retarget").chmod(0o755)
    script = ["sh", BENCHMARKS / "paper.sh", "--dry-run", "cars", "cub", "actual", "imagenet", "cifar10", "cifar100"]
    places = os.pathsep.join([str(tools), os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run(script, cwd=folder, env=os.environ | {"PATH": places}, check=True)
    commands = [json.loads(line) for line in dict.fromkeys(log.read_text().splitlines())]
    assert [command[0] for command in commands].count("port") == 2 * 5 + 1 + 1 + 1 + 1
    # Those for cars differ from those for birds in the recipe alone, so one of them will do.
    commands = [each for each in commands if not re.search(r"cars/(naive|gmt|fgmt-sign|oracle)", each[-2])]
    log.write_text("".join(json.dumps(command) + "\n" for command in commands))
    client = stocked.client(PYTHONPATH=str(BENCHMARKS))
    enter = f"import os; os.chdir({str(folder)!r})"
    done = client.ask(enter + RUNNING, log, timeout=600)
    assert [words for code, words in done if code] == []
    plans = {
        command[command.index("--out") + 1]: json.loads(words)
        for command, (_, words) in zip(commands, done, strict=True)
        if command[0] == "port"
    }
    assert {plan["format"] for plan in plans.values()} == {"hf-retarget/plan/1"}
    assert plans["cub/fgmt"]["gradients"] == 2 * 15 * 5
    assert plans["cub/gmt"]["gradients"] == 15 * 16 * 5
    assert plans["imagenet/fgmt"]["gradients"] == 2 * 40 * 100
    assert plans["conv8/cifar10-fgmt"]["steps"] == 30
    assert plans["conv8/cifar100-fgmt"]["classes"] == 10
    assert not (folder / "cub" / "fgmt").exists()
