"""port.json: its schema, documents of version 1, and what a stranger's document may not do."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.document import FORMAT, PortDocument, make_schema, parse_document, read_document
from hf_retarget.publish.contents import list_contents
from hf_retarget.recipe import Recipe
from hf_retarget.report import compose_report

ROOT = Path(__file__).resolve().parents[1]
OLD = Path(__file__).parent / "data_files" / "port-v1"
"""A port by the last version that wrote port.json of version 1: the nets and images below, with `make_recipe()`."""


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))


def tune(net: nn.Module, seed: int) -> nn.Module:
    """Something like a fine-tuning."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def make_images() -> list[tuple[torch.Tensor, int]]:
    torch.manual_seed(5)
    channels = torch.arange(3)
    return [
        (torch.rand(3, 12, 12) * 0.5 + 0.06 * (label == channels)[:, None, None], label)
        for label in (0, 1, 2)
        for _ in range(60)
    ]


def make_recipe(**changes: Any) -> Recipe:
    fields = {"data.image_size": 12, "data.validation": 0.2, "port.steps": 4, "port.batch_size": 8}
    fields |= {"port.grad_batches": 2, "port.bn_batches": 1, "port.method": "fgmt-sign", "port.samples": 4}
    fields |= {"finetune.steps": 4, "finetune.batch_size": 4, "finetune.lr": 0.02}
    fields |= {"port.start": "restart"}  # the default of the version that made `OLD`
    return Recipe("tiny").override(**(fields | changes))


def make_port(**options: Any) -> rt.PortResult:
    options.setdefault("recipe", make_recipe())
    return rt.port(make_net(0), tune(make_net(0), 7), make_net(1), make_images(), device="cpu", **options)


@pytest.fixture(scope="module")
def ported(tmp_path_factory) -> Path:
    """The port of `OLD`, by this version: with everything that a document may hold."""
    out = tmp_path_factory.mktemp("ported") / "ported"
    # Version 1 began each search anew; what differs makes a group of its own in a comparison.
    anew = {"port.start": "restart"}
    make_port(tuned_target=tune(make_net(1), 8), out=out, command="hf-retarget port --steps 4", overrides=anew)
    return out


# ---- the schema


def violations(schema: dict[str, Any], value: Any, where: str = "document") -> list[str]:
    """What a value breaks of a schema; the keywords are those that `make_schema` writes."""
    known = {"$schema", "title", "const", "type", "anyOf", "required", "properties", "additionalProperties"}
    known |= {"items", "prefixItems", "minItems", "maxItems", "$ref", "$defs", "description", "default"}
    if schema is True:
        return []
    assert schema.keys() <= known, f"{where}: this validator does not know {schema.keys() - known}"
    if "$ref" in schema:
        return violations(make_schema()["$defs"][schema["$ref"].rpartition("/")[2]], value, where)
    if "const" in schema:
        return [] if value == schema["const"] else [f"{where} is {value!r}"]
    if "anyOf" in schema:
        return [] if any(not violations(each, value, where) for each in schema["anyOf"]) else [f"{where}: none fits"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if kind := schema.get("type"):
        fits = isinstance(value, (int, float)) if kind == "number" else isinstance(value, kinds[kind])
        if not fits or (isinstance(value, bool) and kind != "boolean"):
            return [f"{where} is no {kind}"]
    found = [f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name, each in value.items():
            found += violations(properties.get(name, others), each, f"{where}.{name}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where} has {len(value)} entries")
        first = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        for number, (inner, each) in enumerate(zip(first, value, strict=False)):
            found += violations(inner, each, f"{where}[{number}]")
    return found


def test_a_real_port_fits_the_schema_and_all_its_keys_are_in_it(ported):
    content, schema = json.loads((ported / "port.json").read_text()), make_schema()
    assert violations(schema, content) == []
    assert content["format"] == FORMAT
    assert content.keys() == schema["properties"].keys()
    roles = {each["name"]: each["role"] for each in content["contenders"]}
    assert roles.pop("fgmt-sign") == "port"
    assert roles.pop("finetuned") == "after"
    known = ("tuned", "base", "naive", "naive-sign", "oracle", "plain", "tuned-target")
    assert roles == dict.fromkeys((*known, "head", "tuned-head", "old-head"), "beside")


def test_the_schema_refuses_what_the_reader_refuses(ported):
    content = json.loads((ported / "port.json").read_text())
    for change in (
        lambda it: it.pop("winner"),
        lambda it: it.update(steps_planned="four"),
        lambda it: it["contenders"][0].update(gradients=1.5),
        lambda it: it["contenders"][0]["curve"].append([1.0, 0.5, 0.5]),
        lambda it: it["models"]["source"].pop("reference"),
        lambda it: it.update(format="hf-retarget/port/3"),
    ):
        wrong = copy.deepcopy(content)
        change(wrong)
        assert violations(make_schema(), wrong)
        with pytest.raises(ValueError, match=r"."):
            parse_document(wrong)


def test_the_schema_in_the_docs_is_that_of_the_types():
    written = json.loads((ROOT / "docs" / "port.schema.json").read_text())
    assert written == make_schema(), "python -m hf_retarget.document docs/port.schema.json"


def test_a_document_comes_back_from_its_file(ported):
    document = read_document(ported / "port.json")
    assert parse_document(json.loads(json.dumps(document.to_json()))) == document
    assert document.result.name == "finetuned"
    assert document.unmatched is document.find("naive-sign")
    assert document.rival is document.alternative is document.find("plain")
    assert document.best == document.port.steps[document.port.best_step - 1]
    assert document.find("nobody") is None


def test_keys_and_contenders_of_a_later_version_do_no_harm(ported):
    content = json.loads((ported / "port.json").read_text())
    later = {**content["contenders"][0], "name": "telepathy", "role": "beside", "colour": "ultraviolet"}
    content |= {"contenders": [*content["contenders"], later], "mood": "good"}
    document = parse_document(content)
    assert document.table[-1].name == document.table[-1].row.label == "telepathy"
    assert compose_report(document).problems == ()


@pytest.mark.parametrize(
    ("method", "control", "rival"),
    [("fgmt", "naive", "tuned"), ("naive", "naive", "tuned"), ("naive", "none", None)],
)
def test_images_are_compared_with_the_tuned_model(method, control, rival):
    changes = {"port.method": method, "port.control": control, "port.steps": 2, "finetune.steps": 0}
    document = make_port(recipe=make_recipe(**changes)).document
    assert document.samples["theirs"] == rival


# ---- version 1


@pytest.fixture(scope="module")
def old() -> dict[str, Any]:
    return json.loads((OLD / "port.json").read_text())


@pytest.fixture(scope="module")
def upgraded() -> PortDocument:
    return read_document(OLD / "port.json")


def test_version_1_has_its_numbers_under_the_new_names(old, upgraded):
    assert old["format"] == "hf-retarget/port/1"
    assert upgraded.format == FORMAT
    names = {"port": "fgmt-sign", "masked": "naive-sign", "control": "plain", "tuned_target": "tuned-target"}
    assert {each.name for each in upgraded.contenders} == {names.get(key, key) for key in old["test"]}
    for key, score in old["test"].items():
        found = upgraded.find(names.get(key, key))
        assert (found.test.top1, found.test.loss, found.test.images) == (score["top1"], score["loss"], 18)
        assert list(found.test.per_class) == score["per_class"]
        assert found.test.confusion == (tuple(map(tuple, score["confusion"])) if "confusion" in score else None)
    assert (upgraded.winner, upgraded.port.best_step) == ("fgmt-sign", old["best_step"])
    assert [each.role for each in upgraded.contenders if each.role != "beside"] == ["port", "after"]
    for key, name in (("", "fgmt-sign"), ("naive_", "naive"), ("masked_", "naive-sign"), ("oracle_", "oracle")):
        found = upgraded.find(name)
        assert [each.top1 for each in found.steps] == [each["top1"] for each in old[f"{key}steps"]]
        assert found.best_step == old[f"{key}best_step"]
        assert found.validation == old[f"{key}steps"][found.best_step - 1]["top1"]
    assert [each.cosines for each in upgraded.port.steps] == [each["cosines"] for each in old["steps"]]
    for key in ("tuned", "base", "tuned_target"):
        assert upgraded.find(names.get(key, key)).validation == old["levels"][key]
    assert upgraded.models["target"].hashes == old["inputs"]["target"]["hashes"]
    assert upgraded.models.keys() == {"source", "tuned", "target", "tuned_target"}
    assert upgraded.data.fingerprint == old["inputs"]["data"]["fingerprint"]
    assert all(upgraded.recipe[part].items() >= old["recipe"][part].items() for part in ("data", "port", "finetune"))
    for key in ("verdict", "graph", "matching", "batchnorm", "seconds", "versions", "command"):
        assert getattr(upgraded, key) == old[key]


def test_prices_of_version_1_become_gradients_and_curves_over_images(old, upgraded):
    spent = {each.name: each.gradients for each in upgraded.contenders if each.gradients}
    assert spent == {"fgmt-sign": 2 * 2 * 4, "naive-sign": 2 * 4, "finetuned": 4, "plain": 16 + 4 * 4 // 8}
    assert (old["gradients"]["port"], old["gradients"]["control"]) == (spent["fgmt-sign"], spent["plain"])
    assert [at for at, _ in upgraded.port.curve] == [8 * 4 * step for step in (1, 2, 3, 4)]
    assert [at for at, _ in upgraded.find("naive-sign").curve] == [8 * 2 * step for step in (1, 2, 3, 4)]
    after, plain = upgraded.find("finetuned"), upgraded.find("plain")
    assert [at for at, _ in after.curve] == [8 * 16 + 4 * step for step in range(5)]
    assert [at for at, _ in plain.curve] == [8 * at for at, _ in old["curves"]["control"]]
    for found, key in ((after, "finetuned"), (plain, "control")):
        assert [top1 for _, top1 in found.curve] == [top1 for _, top1 in old["curves"][key]]
        assert found.validation == found.curve[-1][1]


def test_samples_of_version_1_name_the_contenders(old, upgraded):
    assert old["samples"]["theirs"] == "control"
    assert (upgraded.samples["ours"], upgraded.samples["theirs"]) == ("finetuned", "plain")
    for image, before in zip(upgraded.samples["images"], old["samples"]["images"], strict=True):
        assert image["predictions"] == {
            "finetuned": before["predictions"]["finetuned"],
            "plain": before["predictions"]["control"],
        }


def test_both_versions_of_one_port_have_the_same_shape(ported, upgraded):
    """The figures are the same bits on the machine that made them; elsewhere, what there is must be the same."""
    now = read_document(ported / "port.json")

    def shape(document: PortDocument) -> dict[str, Any]:
        return {
            each.name: (each.role, each.gradients, len(each.steps), [at for at, _ in each.curve])
            for each in document.table
            if upgraded.find(each.name) and not each.row.is_alternative  # forward passes cost something now
        }

    assert shape(now) == shape(upgraded)
    assert now.to_json().keys() == upgraded.to_json().keys()
    assert compose_report(upgraded).problems == ()


@pytest.mark.parametrize(
    ("given", "method", "winner", "gradients"),
    [(True, "fgmt-sign", "given", 0), (False, "naive", "naive", 0), (False, "gmt", "gmt", 4 * 5 * 2)],
)
def test_the_winner_of_version_1_is_its_method_or_the_given_permutation(old, given, method, winner, gradients):
    content = copy.deepcopy(old)
    content["permutation"] |= {"given": given, "from": "lender" if given else None}
    content["recipe"]["port"]["method"] = method
    content["gradients"]["port"] = gradients
    document = parse_document(content)
    assert (document.winner, document.port.role, document.port.gradients) == (winner, "port", gradients)
    assert document.port.test.top1 == old["test"]["port"]["top1"]
    assert document.permutation.origin == ("lender" if given else None)
    images = [8 * 2 * step * (step + 1) for step in (1, 2, 3, 4)]
    assert [at for at, _ in document.port.curve] == (images if method == "gmt" else [])


def test_an_early_version_1_may_lack_what_came_later(old):
    content = {key: value for key, value in copy.deepcopy(old).items() if key not in ("levels", "samples", "memory")}
    document = parse_document(content | {"matching": None})
    assert document.samples is None
    assert document.find("tuned").validation == old["test"]["tuned"]["top1"]


def test_ports_of_both_versions_are_compared(ported, old):
    found = rt.compare([OLD, ported])
    assert found.problems == ()
    (group,) = found.groups
    first, second = group.runs
    assert first.top1["plain"] == old["test"]["control"]["top1"]
    assert first.top1.keys() < second.top1.keys()
    assert group.top1["fgmt-sign"].count == 2
    assert len(group.curves["finetuned"]) == 5
    result = CliRunner().invoke(main, ["compare", str(OLD), str(ported), "--json"])
    assert result.exit_code == 0, result.output


def test_a_folder_of_version_1_can_be_pushed(tmp_path):
    folder = shutil.copytree(OLD, tmp_path / "old")
    (folder / "report.html").write_text("pictures")
    everything = {path.name for path in folder.iterdir()}
    files, left_out = list_contents(folder)
    assert files.keys() == everything - {"report.html"}, "the images are not those of the Hub"
    assert left_out == ["report.html"]
    content = json.loads((folder / "port.json").read_text())
    content["inputs"]["data"]["revision"] = "0" * 40
    (folder / "port.json").write_text(json.dumps(content))
    assert list_contents(folder)[0].keys() == everything


def test_the_permutation_of_version_1_serves_again(ported):
    result = make_port(permutation=OLD, recipe=make_recipe(**{"port.control": "naive", "finetune.steps": 0}))
    kept = rt.Permutation.load(OLD / "permutation.safetensors")
    assert all(torch.equal(result.permutation.indices[name], index) for name, index in kept.indices.items())
    assert (result.document.winner, result.document.port.gradients) == ("given", 0)
    assert (result.document.permutation.given, result.document.permutation.origin) == (True, OLD.name)


def test_a_finished_port_of_version_1_is_shown_by_its_command(tmp_path, monkeypatch, upgraded):
    """As when somebody repeats a command with --resume after an update."""

    def finished(*_: Any, **__: Any) -> None:
        raise rt.FinishedError("it is finished")

    monkeypatch.setattr("hf_retarget.porting.port.port", finished)
    out = shutil.copytree(OLD, tmp_path / "out")
    sides = ("--src-base", "a", "--src-ft", "b", "--new-base", "c", "--data", "fashion-mnist")
    result = CliRunner().invoke(main, ["port", *sides, "--out", str(out), "--resume", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert violations(make_schema(), {key: value for key, value in shown.items() if key != "folder"}) == []
    assert shown["winner"] == upgraded.winner


# ---- hostile documents


Change = Callable[[dict[str, Any]], Any]

HOSTILE: dict[str, tuple[Change, str]] = {
    "an accuracy on test": (lambda it: it["contenders"][0]["test"].update(top1=9.9), r"is 9\.9.*contenders\.0"),
    "an accuracy of a class": (lambda it: it["contenders"][0]["test"]["per_class"].append(-1), "an accuracy is -1"),
    "an accuracy of a step": (lambda it: it["contenders"][0]["steps"][0].update(top1=9.9), r"an accuracy is 9\.9"),
    "an accuracy on validation": (lambda it: it["contenders"][0].update(validation=9.9), r"an accuracy is 9\.9"),
    "an accuracy of a curve": (lambda it: it["contenders"][0].update(curve=[[1, 9.9]]), r"an accuracy is 9\.9"),
    "a winner that did not enter": (lambda it: it.update(winner="nobody"), "winner 'nobody' is not among"),
    "a contender twice": (lambda it: it["contenders"].append(it["contenders"][0]), "same name"),
    "no contenders": (lambda it: it.update(contenders=[]), "not among"),
    "a best step that was not made": (lambda it: it["contenders"][0].update(best_step=99), "best step is 99 of 4"),
    "a best step before the first": (lambda it: it["contenders"][0].update(best_step=-4), "best step is -4 of 4"),
    "a role of its own": (lambda it: it["contenders"][0].update(role="judge"), "no role 'judge'"),
    "text for a number": (lambda it: it["contenders"][0].update(gradients="16"), r"integer.*contenders\.0\.gradients"),
    "a truth for a number": (lambda it: it.update(steps_planned=True), "valid integer.*steps_planned"),
    "a number for text": (lambda it: it["models"]["target"].update(reference=7), r"string.*target\.reference"),
    "a list for an object": (lambda it: it.update(data=[]), "in 'data'"),
    "null for an object": (lambda it: it.update(permutation=None), "in 'permutation'"),
    "text for a list": (lambda it: it.update(contenders="fgmt"), "in 'contenders'"),
    "a point of three numbers": (lambda it: it["contenders"][0].update(curve=[[1, 0.5, 0.5]]), r"2 items.*curve\.0"),
    "a field that is missing": (lambda it: it["contenders"][1]["test"].pop("top1"), r"required.*test\.top1"),
    "a part that is missing": (lambda it: it.pop("contenders"), "required.*contenders"),
    "a model that is missing": (lambda it: it["models"].pop("target"), "three models"),
    "endless seconds": (lambda it: it.update(seconds={"one": 1e308, "two": 1e308}), "seconds"),
    "another version": (lambda it: it.update(format="hf-retarget/port/3"), "format is 'hf-retarget/port/3'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_document_is_refused_in_one_sentence_and_left_out(case, ported, tmp_path):
    change, words = HOSTILE[case]
    content = json.loads((ported / "port.json").read_text())
    change(content)
    refuse(tmp_path / "port.json", json.dumps(content), words, ported)


HOSTILE_OLD: dict[str, tuple[Change, str]] = {
    "an accuracy": (lambda it: it["test"]["port"].update(top1=9.9), r"an accuracy is 9\.9"),
    "no port": (lambda it: it["test"].pop("port"), "winner 'fgmt-sign' is not among"),
    "no test": (lambda it: it.pop("test"), "damaged.*test"),
    "a list for the test": (lambda it: it.update(test=[]), "damaged"),
    "a price in words": (lambda it: it["gradients"].update(port="x" * 1000), "damaged"),
    "a batch size in words": (lambda it: it["recipe"]["port"].update(batch_size="x"), "damaged"),
    "a place in words": (lambda it: it["curves"].update(control=[["x", 0.5]]), "cannot be read"),
    "a best step in words": (lambda it: it.update(best_step="3"), "damaged"),
    "a best step that was not made": (lambda it: it.update(best_step=99), "damaged"),
    "steps that are none": (lambda it: it.update(steps=[1, 2, 3, 4]), "damaged"),
    "samples that are none": (lambda it: it.update(samples=["cat.jpg"]), "damaged"),
    "inputs in words": (lambda it: it.update(inputs="three models"), "cannot be read"),
}


@pytest.mark.parametrize("case", HOSTILE_OLD)
def test_a_hostile_document_of_version_1_is_refused_as_well(case, old, ported, tmp_path):
    change, words = HOSTILE_OLD[case]
    content = copy.deepcopy(old)
    change(content)
    refuse(tmp_path / "port.json", json.dumps(content), words, ported)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "format is 'list'"),
        ("{}", "format is None"),
        ('{"format": ["hf-retarget/port/2"]}', "format is"),
        ('{"format": "hf-retarget/port/2", "winner": NaN}', "NaN"),
        ('{"format": "hf-retarget/port/2"' + ', "a": [' * 60 + "]" * 60 + "}", "cannot be read"),
        ('{"format": "hf-retarget/port/2", "steps_planned": ' + "9" * 400 + "}", "beyond"),
    ],
)
def test_what_is_no_document_is_refused(text, words, ported, tmp_path):
    refuse(tmp_path / "port.json", text, words, ported)


def refuse(path: Path, text: str, words: str, good: Path) -> None:
    """Reading is one sentence, `compare` names the folder and goes on, and nothing private is pushed."""
    path.write_text(text)
    with pytest.raises(rt.PortError, match=words) as error:
        read_document(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 600
    found = rt.compare([good, path.parent])
    assert len(found.runs) == 1
    assert found.problems == (message,)
    shutil.copytree(OLD, path.parent / "pushed")
    shutil.copy(path, path.parent / "pushed" / "port.json")
    (path.parent / "pushed" / "report.html").write_text("pictures")
    assert list_contents(path.parent / "pushed")[1] == ["report.html"], "whose images these are cannot be told"


def test_a_document_that_is_not_there():
    with pytest.raises(rt.PortError, match="finished port"):
        read_document("nowhere/port.json")
