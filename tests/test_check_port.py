"""`hf-retarget check ported/`: what port.json pins is what is there; an input that is something else is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from loopback_hub import Hub
from safetensors.torch import load_file, save_file

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.files import hash_file
from hf_retarget.models import load_checkpoint, peek_checkpoint, save_model

OLDER = Path(__file__).parent / "data_files" / "port-v1"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def make(folder: Path, seed: int, noise: float) -> Path:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return save_model(folder, model.state_dict(), load_checkpoint(model), labels=("a", "b", "c"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with old, tuned and new, and the port of the one to the other."""
    folder = tmp_path_factory.mktemp("finished")
    sides = [make(folder / name, seed, 0.01) for seed, name in enumerate(("old", "tuned", "new"))]
    rt.port(*sides, "none", out=folder / "ported")
    return folder


@pytest.fixture
def ported(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished / "ported", tmp_path / "ported"))


def sides(folder: Path) -> tuple[object, ...]:
    return "--src-base", folder / "old", "--src-ft", folder / "tuned", "--new-base", folder / "new"


def damage(path: Path) -> None:
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 1}, path)


def test_a_port_pins_its_files_and_its_inputs(finished):
    document = json.loads((finished / "ported" / "port.json").read_text())
    files = {
        name: hash_file(finished / "ported" / name) for name in ("config.json", "model.safetensors", "recipe.yaml")
    }
    assert document["files"] == files
    for side, name in (("source", "old"), ("tuned", "tuned"), ("target", "new")):
        assert document["models"][side]["hashes"] == {
            "model.safetensors": hash_file(finished / name / "model.safetensors")
        }


def test_a_port_that_is_what_it_was(finished):
    result = run(finished / "ported", *sides(finished))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "files       model.safetensors: same" in lines
    assert sum("compared: model.safetensors" in line for line in lines) == 3
    assert lines[-1] == "result      everything that was compared matches"


def test_inputs_by_path_are_compared_only_where_they_are_named(finished):
    result = run(finished / "ported", "--src-ft", finished / "tuned", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["format"], document["whole"]) == (0, "hf-retarget/check-port/1", True)
    assert document["pins"]["tuned"]["compared"] == ["model.safetensors"]
    assert "its path is not recorded" in document["pins"]["source"]["unseen"]
    wrong = run(finished / "ported", "--src-base", finished / "tuned")
    assert wrong.exit_code == 1
    assert "the old base is not what the port was made from: model.safetensors of" in wrong.stdout


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "recipe.yaml"])
def test_a_file_that_was_changed_or_lost(ported, name):
    (ported / name).write_bytes((ported / name).read_bytes() + b" ")
    changed = run(ported)
    assert changed.exit_code == 1
    assert f"problem     {name} is not the file that port.json pins" in changed.stdout
    assert changed.stdout.splitlines()[-1] == "result      not intact"
    (ported / name).unlink()
    assert f"problem     {name} is missing" in run(ported).stdout


def test_the_card_may_be_edited(ported):
    (ported / "README.md").write_text("mine\n")
    assert run(ported).exit_code == 0


def test_a_port_of_an_older_version_is_checked_by_its_parts(tmp_path):
    folder = Path(shutil.copytree(OLDER, tmp_path / "older"))
    whole = run(folder)
    assert whole.exit_code == 0, whole.output
    assert "the port's own files are not pinned, because version" in whole.stdout
    document = json.loads((folder / "port.json").read_text())
    document["graph"]["fingerprint"] = "another"
    document["recipe"]["port"]["seed"] = 7
    (folder / "port.json").write_text(json.dumps(document))
    lines = [line for line in run(folder).stdout.splitlines() if line.startswith("problem")]
    assert [line.split()[1] for line in lines] == [
        "graph.json",
        "permutation.safetensors",
        "recipe.yaml",
    ]
    assert all("belongs to another port than port.json" in line for line in lines)


def test_an_unpinned_model_that_port_json_is_not_about(ported):
    document = json.loads((ported / "port.json").read_text())
    document["models"]["target"]["architecture"], document["files"] = "test_vit2", {}
    (ported / "port.json").write_text(json.dumps(document))
    result = run(ported)
    assert result.exit_code == 1
    assert "problem     config.json belongs to another port than port.json" in result.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "it is not a port"),
        ('{"format": "hf-retarget/port/2"}', "cannot be read"),
        (None, "name the folder of a finished port"),
    ],
)
def test_a_broken_port_json_is_one_line(ported, content, message):
    (ported / "port.json").unlink()
    if content is not None:
        (ported / "port.json").write_text(content)
    result = run(ported)
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr


def test_wrong_usage(tmp_path, finished):
    assert "there is no folder" in run(tmp_path / "none").stderr
    missing = run("--src-base", "a", "--new-base", "b")
    assert (missing.exit_code, "Missing option '--src-ft'" in missing.stderr) == (2, True)
    nowhere = run(finished / "ported", "--src-base", tmp_path / "none")
    assert nowhere.exit_code == 1
    assert len(nowhere.stderr.strip().splitlines()) == 1


# ---- a port as an input


def test_an_input_that_is_not_what_its_port_json_says_is_refused(ported, finished, tmp_path):
    load_checkpoint(ported)
    damage(ported / "model.safetensors")
    arguments = ["port", *sides(finished)[:4], "--new-base", ported, "--data", "none", "--out", tmp_path / "out"]
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 1
    assert "does not match its port.json: the sha256 of model.safetensors begins with" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ported"], "nothing is written"
    with pytest.raises(rt.ModelError, match="does not match its port"):
        peek_checkpoint(ported)
    (ported / "port.json").unlink()
    load_checkpoint(ported)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ('{"listen": 8080}', False),
        ('{"format": "hf-retarget/port/2", "files": {"../secret": "ab"}}', False),
        ('{"format": "hf-retarget/port/2", "files": ["model.safetensors"]}', True),
        ('{"format": "hf-retarget/port/2", "files": {"model.safetensors": 3}}', True),
        ("{", True),
    ],
)
def test_a_port_json_beside_an_input(ported, content, refused):
    (ported / "port.json").write_text(content)
    if refused:
        with pytest.raises(rt.ModelError, match="is damaged"):
            load_checkpoint(ported)
    else:
        load_checkpoint(ported)


# ---- on the Hub


def test_inputs_on_the_hub_are_compared_at_their_commit_without_a_download(connected: Hub, finished, tmp_path):
    for name in ("old", "tuned", "new"):
        connected.repository(f"ada/{name}", {path.name: path for path in (finished / name).iterdir()})
    rt.port("ada/old", "ada/tuned", "ada/new", "none", out=tmp_path / "ported")
    commit = connected.repository("ada/old").resolve("main").oid
    connected.repository("ada/old", {"model.safetensors": finished / "new" / "model.safetensors"})  # a newer commit
    seen = len(list(connected.log))
    result = run(tmp_path / "ported")
    assert result.exit_code == 0, result.output
    assert f"ada/old, commit {commit}, model.safetensors" in result.stdout
    assert sum("; compared: model.safetensors" in line for line in result.stdout.splitlines()) == 3
    assert not [each for each in list(connected.log)[seen:] if "safetensors" in each.path]
    moved = run(tmp_path / "ported", "--src-base", "ada/old")
    assert moved.exit_code == 1
    assert "the old base is not what the port was made from: model.safetensors of 'ada/old' differs" in moved.stdout


def test_a_port_on_the_hub_is_refused_as_an_input_if_it_was_changed(connected: Hub, ported):
    damage(ported / "model.safetensors")
    files = {path.name: path for path in ported.iterdir() if path.is_file()}
    connected.repository("ada/ported", files)
    for read in (peek_checkpoint, load_checkpoint):
        with pytest.raises(rt.ModelError, match="'ada/ported' does not match its port"):
            read("ada/ported")


def test_a_base_that_is_gone_is_said_and_no_reason_to_fail(connected: Hub, finished, tmp_path):
    for name in ("old", "tuned", "new"):
        connected.repository(f"ada/{name}", {path.name: path for path in (finished / name).iterdir()})
    rt.port("ada/old", "ada/tuned", "ada/new", "none", out=tmp_path / "ported")
    document = json.loads((tmp_path / "ported" / "port.json").read_text())
    document["models"]["source"]["hub_id"] = "ada/gone"
    (tmp_path / "ported" / "port.json").write_text(json.dumps(document))
    result = run(tmp_path / "ported")
    assert result.exit_code == 0
    assert "not compared: there is no model 'ada/gone' on the Hub, or it is private" in result.stdout


def test_a_port_that_was_saved_as_an_adapter_is_whole(finished, tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for number, label in enumerate("abc" * 4):
            path = tmp_path / "photos" / split / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (80 * (number % 3), number, 90)).save(path)
    sides = [finished / name for name in ("old", "tuned", "new")]
    options = {"port.method": "naive", "port.steps": 1, "port.save_as": "lora", "port.control": "none"}
    options |= {"data.validation": 0.4}
    rt.port(*sides, tmp_path / "photos", out=tmp_path / "adapter", overrides=options, quiet=True)
    found = rt.check_port(tmp_path / "adapter", dict(zip(("source", "tuned", "target"), sides, strict=True)))
    assert found.problems == ()
    assert set(found.files.values()) == {"same"}


def test_a_pinned_file_under_another_name_is_not_read(ported):
    (ported / "model.safetensors").rename(ported / "weights.safetensors")
    with pytest.raises(rt.ModelError, match=r"lacks model\.safetensors"):
        load_checkpoint(ported)
