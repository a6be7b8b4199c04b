"""`hf-retarget outdated`: which bases have a successor, whether a port fits, and the command for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import peft
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from loopback_hub import Hub
from tiny_lm import WORDS, make_lm, save_lm, shake

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.files import hash_file
from hf_retarget.models import load_checkpoint, save_model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["outdated", *map(str, arguments)])


def look(*arguments: object) -> tuple[int, dict[str, dict[str, object]]]:
    result = run(*arguments, "--json", "-q")
    assert result.stdout, result.output
    document = json.loads(result.stdout)
    assert document["format"] == "hf-retarget/outdated/1"
    return result.exit_code, {each["model"]: each for each in document["models"]}


def make(folder: Path, seed: int, name: str = "test_vit", classes: int = 3, **options: object) -> Path:
    """Of one lineage, whatever the seed."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=classes, **options)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return save_model(folder, model.state_dict(), load_checkpoint(model))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new", "birds")):
        make(folder / name, seed)
    make(folder / "wide", 0, embed_dim=128)
    make(folder / "resnet", 0, "test_resnet")
    make(folder / "resnet-birds", 1, "test_resnet", classes=5)
    make(folder / "resnet-new", 2, "test_resnet")
    return folder


def files(folder: Path, card: str = "") -> dict[str, bytes | Path | None]:
    found: dict[str, bytes | Path | None] = {path.name: path for path in folder.iterdir() if path.is_file()}
    return found | ({"README.md": f"---\n{card}\n---\n".encode()} if card else {})


@pytest.fixture
def place(connected: Hub, models):
    """Put a model of the folder on the Hub under another name, with a card."""

    def put(id: str, name: str, card: str = "", **more: object) -> str:
        return connected.repository(id, files(models / name, card), **more).resolve("main").oid

    return put


def test_a_base_with_a_new_version(place):
    old, new = place("lab/old", "old", "new_version: lab/newer"), place("lab/new", "new")
    place("lab/newer", "old", "new_version: lab/new")
    place("ada/birds", "birds", "base_model: lab/old\ndatasets: [ada/photos]")
    result = run("ada/birds")
    assert result.exit_code == 3, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["MODEL", "BASE", "SUCCESSOR", "FITS", "BASES"]
    assert lines[1].split()[:4] == ["ada/birds", f"lab/old@{old[:8]}", f"lab/new@{new[:8]}", "yes"]
    assert lines[2] == "ada/birds: the card of 'lab/newer' names it as the new version"
    command = f"hf-retarget port --src-base lab/old@{old} --src-ft ada/birds --new-base lab/new@{new} --data ada/photos"
    assert lines[-2:] == [command, "1 of 1 model outdated"]


def test_nothing_new_exits_with_0_and_no_weights_are_read(place, connected):
    place("lab/old", "old")
    place("ada/birds", "birds", "base_model: lab/old")
    code, found = look("ada/birds")
    assert (code, found["ada/birds"]["successor"], found["ada/birds"]["base"]) == (0, None, "lab/old")
    assert not [each for each in connected.log if "resolve" in each.path and "safetensors" in each.path]


def test_new_weights_count_and_a_new_card_does_not(place, connected, models):
    old = place("lab/old", "old")
    place("ada/birds", "birds", "base_model: lab/old")
    place("lab/old", "old", "license: mit")
    assert look("ada/birds")[0] == 0
    new = place("lab/old", "new")
    code, found = look("ada/birds")
    finding = found["ada/birds"]
    assert (code, finding["revision"], finding["successor"]) == (3, old, f"lab/old@{new}")
    assert finding["why"] == f"'lab/old' has new weights since commit {old[:8]}"
    assert finding["relation"]["word"] in ("same lineage", "drifted")
    assert finding["command"].endswith("--data none"), "no BatchNorm, one lineage, and no data is named"


def test_the_command_it_prints_runs(place, tmp_path, monkeypatch):
    place("lab/old", "old")
    place("ada/birds", "birds", "base_model: lab/old")
    place("lab/old", "new")
    command = shlex.split(str(look("ada/birds")[1]["ada/birds"]["command"]))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*command[1:], "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_port_json_pins_the_base_exactly(place, tmp_path):
    for name in ("old", "birds", "new"):
        place(f"lab/{name}", name)
    rt.port("lab/old", "lab/birds", "lab/new", "none", out=tmp_path / "runs" / "ported")
    code, found = look("--folder", tmp_path / "runs")
    ported = str(tmp_path / "runs" / "ported")
    assert (code, found[ported]["base"], found[ported]["named_by"]) == (0, "lab/new", "port.json")
    newer = place("lab/new", "old")
    code, found = look("--folder", tmp_path / "runs")
    assert (code, found[ported]["successor"]) == (3, f"lab/new@{newer}")
    assert f"--data {ported}/recipe.yaml" in str(found[ported]["command"])


@pytest.mark.parametrize("broken", [False, True])
def test_finetune_json_pins_the_base_too(place, models, tmp_path, broken):
    commit = place("lab/old", "old")
    newer = place("lab/old", "new")
    digest = hash_file(models / "old" / "model.safetensors")
    pin = {"hub_id": "lab/old", "revision": commit, "hashes": [] if broken else {"model.safetensors": digest}}
    folder = make(tmp_path / "tuned", 3)
    (folder / "finetune.json").write_text(json.dumps({"model": pin}))
    (folder / "README.md").write_text("---\nbase_model: lab/old\n---\n")
    code, found = look(folder)
    finding = found[str(folder)]
    if broken:
        assert (code, finding["named_by"], finding["successor"]) == (0, "README.md", None)
        assert "is not recorded, so new weights are not noticed" in finding["notes"][0]
    else:
        assert (code, finding["named_by"], finding["successor"]) == (3, "finetune.json", f"lab/old@{newer}")


def test_an_adapter_names_its_base_and_its_command_runs(place, connected, models, tmp_path):
    place("lab/old", "old", "new_version: lab/new")
    place("lab/new", "new")
    model = peft.get_peft_model(load_checkpoint(models / "old").build(), peft.LoraConfig(target_modules=["qkv"], r=2))
    for name, each in model.named_parameters():
        torch.nn.init.normal_(each) if "lora_B" in name else None
    model.save_pretrained(tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "lab/old"}))
    connected.repository("ada/lora", files(tmp_path / "lora", "library_name: peft"))
    code, found = look("ada/lora")
    finding = found["ada/lora"]
    assert (code, finding["named_by"], finding["fits"]) == (3, "adapter_config.json", True)
    command = shlex.split(str(finding["command"]))
    assert command[-2:] == ["--data", "none"]
    result = CliRunner().invoke(main, [*command[1:], "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    sides = [load_checkpoint(each).weights for each in (models / "old", models / "new", tmp_path / "out")]
    old, new, ported = (each["blocks.0.attn.qkv.weight"] for each in sides)
    added = model.merge_and_unload().state_dict()["blocks.0.attn.qkv.weight"] - old
    torch.testing.assert_close(ported - new, added, rtol=1e-4, atol=1e-6)


def test_a_base_with_more_tokens_fits(connected, tmp_path):
    old = make_lm()
    for name, model in {"old": old, "tuned": shake(old, 0.05, 1), "new": shake(old, 0.02, 2, len(WORDS) + 3)}.items():
        save_lm(model, tmp_path / name)
    connected.repository("lab/lm", files(tmp_path / "old", "new_version: lab/lm-new"))
    connected.repository("lab/lm-new", files(tmp_path / "new"))
    connected.repository("ada/law", files(tmp_path / "tuned", "base_model: lab/lm"))
    code, found = look("ada/law")
    finding = found["ada/law"]
    assert (code, finding["fits"], finding["relation"]["word"]) == (3, True, "same lineage"), finding
    assert str(finding["command"]).endswith("--data none")


@pytest.mark.parametrize("name", ["/home/eve/base", "../../etc/passwd", "--out", "a b", 3, ["x"], ""])
def test_a_base_that_is_no_name_is_not_asked_for(connected: Hub, name):
    config = json.dumps({"base_model_name_or_path": name}).encode()
    connected.repository("ada/lora", {"adapter_config.json": config})
    before = len(list(connected.log))
    code, found = look("ada/lora")
    assert (code, found["ada/lora"]["base"]) == (0, None)
    assert all("ada/lora" in each.path for each in list(connected.log)[before:])
    words = found["ada/lora"]["notes"][0]
    assert "is no name on the Hub" in words or "it names no base" in words


def test_shapes_that_do_not_fit_and_heads_that_may_differ(place):
    place("lab/old", "old", "new_version: lab/wide")
    place("lab/wide", "wide")
    place("ada/birds", "birds", "base_model: lab/old")
    code, found = look("ada/birds")
    finding = found["ada/birds"]
    assert (code, finding["fits"], finding["command"]) == (3, False, None)
    assert "it cannot be ported: " in finding["notes"][0]
    place("lab/resnet", "resnet", "new_version: lab/resnet-new")
    place("lab/resnet-new", "resnet-new")
    place("ada/resnet", "resnet-birds", "base_model: [lab/resnet]")
    finding = look("ada/resnet")[1]["ada/resnet"]
    assert finding["fits"] is True
    assert str(finding["command"]).endswith("--data DATA"), "BatchNorm needs images"
    assert "DATA are images of the kind that it was tuned on" in finding["notes"]


def test_models_of_a_user(place, connected, models):
    connected.add_user("eve")
    place("lab/old", "old", "new_version: lab/new")
    place("lab/new", "new")
    place("eve/birds", "birds", "base_model: lab/old")
    place("eve/alone", "birds")
    place("eve/merged", "birds", "base_model: [lab/old, lab/new]")
    place("eve/small", "birds", "base_model: lab/old\nbase_model_relation: quantized")
    code, found = look("--user", "eve")
    assert code == 3
    assert [name for name, each in found.items() if each["successor"]] == ["eve/birds"]
    assert found["eve/alone"]["notes"] == ["it names no base; add base_model to its card"]
    assert "it names 2 bases" in found["eve/merged"]["notes"][0]
    assert "'quantized' of 'lab/old', which is no fine-tuning" in found["eve/small"]["notes"][0]


def test_a_gated_base_and_one_that_is_gone_are_said(place, connected):
    place("lab/old", "old", "new_version: lab/new")
    place("lab/new", "new", gated=True)
    place("ada/birds", "birds", "base_model: lab/old")
    place("ada/lost", "birds", "base_model: lab/gone")
    code, found = look("ada/birds", "ada/lost")
    assert code == 3
    assert "'lab/new' is gated: accept its terms on the Hub" in found["ada/birds"]["notes"][0]
    assert (found["ada/birds"]["fits"], found["ada/birds"]["command"]) == (None, None)
    assert "there is no model 'lab/gone' on the Hub, or it is private" in found["ada/lost"]["notes"][0]


def test_bad_input(place, connected, tmp_path):
    place("ada/birds", "birds", "base_model: lab/old")
    for arguments, message in (
        (("--user", "nobody"), "'nobody' has no models on the Hub that you may see"),
        (("--folder", tmp_path / "none"), "there is no folder"),
        (("--folder", tmp_path), "there are no models in"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert message in result.stderr
    assert run().exit_code == 2
    (tmp_path / "ported").mkdir()
    (tmp_path / "ported" / "port.json").write_text("{")
    code, found = look("ada/none", "ada/birds", tmp_path / "ported")
    assert code == 1
    assert "there is no model 'ada/none' on the Hub" in str(found["ada/none"]["error"])
    assert "cannot be read" in str(found[str(tmp_path / "ported")]["error"])
    assert found["ada/birds"]["error"] is None


def test_a_hub_in_trouble_is_an_error_and_not_a_base_without_a_successor(place, connected, monkeypatch):
    place("lab/old", "old")
    place("ada/birds", "birds", "base_model: lab/old")
    monkeypatch.setenv("HF_RETARGET_HUB_PATIENCE", "0.5")
    connected.fail("info", 503, times=None)
    code, found = look("ada/birds")
    assert code == 1
    assert "could not be reached" in str(found["ada/birds"]["error"])


def test_new_versions_in_a_circle_end(place):
    place("lab/old", "old", "new_version: lab/new")
    place("lab/new", "new", "new_version: lab/old")
    place("ada/birds", "birds", "base_model: lab/old")
    assert str(look("ada/birds")[1]["ada/birds"]["successor"]).startswith("lab/new@")


def test_a_folder_has_models_at_any_depth_but_none_in_another(models, tmp_path, connected):
    place = tmp_path / "runs"
    for name in ("a/model", "a/model/checkpoint-5", "b", ".hidden/c"):
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text("{}")
    code, found = look("--folder", place)
    assert (code, list(found)) == (0, [str(place / "a" / "model"), str(place / "b")])
