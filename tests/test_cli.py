"""The command line, run on real small models: output, files, exit codes, messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import timm
from click.testing import CliRunner, Result

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.cli.show import write_file
from hf_retarget.contenders import find_contender
from hf_retarget.document import read_document
from hf_retarget.models import load_checkpoint, save_model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("inspect")
    names = ("--svg", "resnet.svg", "--html", "resnet.html", "--save", "graph.json")
    paths = [name if name.startswith("--") else str(folder / name) for name in names]
    return run("inspect", "test_resnet", "--verify", *paths), folder


@pytest.fixture(scope="module")
def document() -> dict:
    result = run("inspect", "test_vit", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_inspect_prints_groups_and_pinned_axes(files):
    result, _ = files
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "nobody watches: no progress"
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["model", "test_resnet"]
    assert any(line.startswith("check ") and "passed" in line for line in lines)
    assert next(line.split()[0] for line in lines if " residual stream " in line) == "conv1.6"
    assert any(line.startswith("output ") and "fc.weight:0" in line for line in lines)


def test_inspect_writes_what_it_was_asked_for(files):
    _, folder = files
    assert sorted(path.name for path in folder.iterdir()) == ["graph.json", "resnet.html", "resnet.svg"]
    graph = rt.PermutationGraph.load(folder / "graph.json")
    picture = (folder / "resnet.svg").read_text()
    ElementTree.fromstring(picture)
    assert all(group.name in picture for group in graph.groups)
    assert "Verified" in (folder / "resnet.html").read_text()


def test_json_has_the_documented_keys(document):
    assert document["format"] == "hf-retarget/inspect/1"
    assert set(document) == {
        "format",
        "model",
        "fingerprint",
        "tensors",
        "parameters",
        "share_on_one_free_axis",
        "share_on_two_free_axes",
        "groups",
        "pinned",
        "unknown_operators",
        "tied",
        "check",
    }
    assert document["check"] is None
    assert len(document["groups"]) == 25
    for group in document["groups"]:
        assert set(group) == {"name", "role", "size", "blocks", "outer", "axes", "parameters"}


def test_the_roles_of_a_vision_transformer(document):
    roles = [group["role"] for group in document["groups"]]
    assert {role: roles.count(role) for role in roles} == {
        "residual stream": 1,
        "heads": 6,
        "per head": 12,
        "inner": 6,
    }


def test_options_reach_the_model():
    result = run("inspect", "test_resnet", "--num-classes", "7", "--in-chans", "4", "--json")
    pinned = {entry["reason"]: entry["axes"] for entry in json.loads(result.stdout)["pinned"]}
    assert "fc.weight:0" in pinned["output"]
    assert json.loads(result.stdout)["parameters"] < 469_688 - 90 * 990


def test_a_typo_is_one_line_that_names_what_was_meant():
    result = run("inspect", "test_vitt")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "'test_vit'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("HF_DEBUG", "1")
    result = run("inspect", "test_vitt", *(["--debug"] if how == "option" else []))
    assert result.exit_code == 1
    assert isinstance(result.exception, rt.ModelError)


def test_a_graph_that_is_not_verified_exits_with_1(monkeypatch):
    honest = rt.verify
    monkeypatch.setattr(rt, "verify", lambda *arguments: replace(honest(*arguments), error=1.0))
    result = run("inspect", "test_resnet", "--verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["check"]["passed"] is False


@pytest.mark.parametrize("arguments", [("inspect",), ("inspect", "test_vit", "--img-size", "0"), ("nonsense",)])
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result = run("inspect", "test_resnet", "--svg", str(tmp_path / "file" / "x.svg"))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "picture.svg"
    write_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("picture.svg", "old")]


@pytest.mark.parametrize("command", [(), ("inspect",), ("demo",)])
def test_help_has_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert "hf-retarget " in result.stdout.split("Example")[1]


def test_version():
    assert run("--version").stdout.strip() == rt.__version__


def test_help_loads_no_torch():
    code = "import sys, hf_retarget.cli; sys.exit(bool({'torch', 'timm', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_demo_tells_the_whole_story(tmp_path):
    result = run("demo", "--quick", "--out", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.output
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert made == {"old", "new", "independent", "tuned", "ported", "matched"}
    report = tmp_path / "demo" / "ported" / "report.html"
    assert result.stdout.splitlines()[-1] == f"Open the report: {report}"
    assert report.stat().st_size > 100_000
    assert (tmp_path / "demo" / "ported" / "model.safetensors").exists()
    labels = (
        find_contender(name).label for name in ("tuned", "base", "naive-line", "head", "plain", "matched", "whole")
    )
    for port in ("ported", "matched"):
        assert read_document(tmp_path / "demo" / port / "port.json").verdict in result.stdout
    for words in (*labels, "(best step", "ALSO", str(tmp_path / "demo" / "ported")):
        assert words in result.stdout


# ---- models that are stored somewhere


@pytest.fixture(scope="module")
def gray(tmp_path_factory) -> Path:
    model = timm.create_model("test_vit", num_classes=3, in_chans=1)
    return save_model(tmp_path_factory.mktemp("models") / "gray", model.state_dict(), load_checkpoint(model))


def test_a_folder_is_inspected_as_its_files_say(gray):
    result = run("inspect", str(gray), "--json", "--verify")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    built = timm.create_model("test_vit", num_classes=3, in_chans=1)
    assert found["parameters"] == sum(parameter.numel() for parameter in built.parameters())
    assert found["check"]["passed"]


def test_a_folder_of_transformers_is_inspected(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    result = run("inspect", str(tmp_path / "vit"), "--verify")
    assert result.exit_code == 0, result.output
    assert "unknown operators   none" in result.stdout


def test_a_folder_takes_no_options_of_architectures(gray):
    result = run("inspect", str(gray), "--in-chans", "3", "--img-size", "64")
    assert result.exit_code == 2
    assert "--in-chans, --img-size: " in result.stderr
