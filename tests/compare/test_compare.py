"""Comparisons of ports: groups, means and deviations, incomparable and damaged ports."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.comparison import Spread, read_ports
from hf_retarget.recipe import Recipe
from hf_retarget.report.comparison import draw_comparison_page, make_table


def test_seeds_form_a_group_and_methods_separate_groups(port):
    folders = [port(f"fgmt-{seed}", 0.5 + 0.1 * seed, port__seed=seed, finetune__seed=seed) for seed in range(3)]
    folders += [port(f"sign-{seed}", 0.7, port__seed=seed, port__method="fgmt-sign") for seed in range(2)]
    found = rt.compare(folders)
    assert found.differing == ("port.method",)
    assert [group.name for group in found.groups] == ["fgmt", "fgmt-sign"]
    assert [run.name for run in found.groups[0].runs] == ["fgmt-0", "fgmt-1", "fgmt-2"]
    spread = found.groups[0].top1["fgmt"]
    assert (spread.mean, spread.deviation, spread.count) == (pytest.approx(0.6), pytest.approx(0.1), 3)
    assert found.groups[1].top1["fgmt-sign"].deviation == 0.0
    first = found.groups[0]
    assert first.seconds.mean == 12.5
    assert first.minibatches.mean == 40
    assert first.best_step == Spread(3.0, 0.0, 3)
    assert first.curve[-1] == (4.0, pytest.approx(0.6))
    assert found.warnings == ()
    assert found.problems == ()


def test_all_differing_fields_are_found(port):
    cases = {
        "plain": {},
        "longer": {"port__steps": 20},
        "classes": {"data__classes": ("a", "b")},
        "given": {"permutation": {"given": True, "moved": 0.5}},
        "head": {"head": {"policy": "shared"}},
    }
    found = rt.compare([port(name, **changes) for name, changes in cases.items()])
    assert set(found.differing) == {"port.steps", "data.classes", "permutation", "head"}
    names = [group.name for group in found.groups]
    assert "steps 20, data classes none, head zero, permutation found" in names
    assert "steps 10, data classes a+b, head zero, permutation found" in names
    assert len(names) == 5


def test_options_of_comparing_and_display_form_no_group(port):
    bare = {"port__control": "none", "port__samples": 0, "only": ("fgmt",)}
    found = rt.compare([port("one"), port("two", 0.8, port__seed=1, **bare)])
    (group,) = found.groups
    assert found.differing == ()
    assert (group.top1["fgmt"].count, group.top1["plain"].count) == (2, 1)
    assert found.warnings == ()
    (again,) = rt.compare([port("three"), port("four", port__samples=0)]).warnings
    assert "repeats" in again


def test_all_contenders_are_compared(port, contender):
    beside = [contender("naive-sign", 0.4), contender("oracle", 0.7), contender("base", 0.1)]
    found = rt.compare([port("one", besides=beside)])
    assert set(found.scores) == {"fgmt", "finetuned", "naive", "naive-sign", "oracle", "plain", "tuned", "base"}
    page = draw_comparison_page(found.to_json())
    assert all(words in page for words in ("mask alone: 40.0%", "oracle: 70.0%"))
    assert "new base: 10.0%" not in page, "at chance, it would only distract"


def test_integers_equal_floats(port):
    whole = port("whole", finetune__epochs=2.0)
    content = json.loads((whole / "port.json").read_text())
    content["recipe"]["finetune"]["epochs"] = 2
    (whole / "port.json").write_text(json.dumps(content))
    found = rt.compare([whole, port("point", finetune__epochs=2.0, port__seed=1)])
    assert [len(group.runs) for group in found.groups] == [2]


def test_a_single_run_has_no_deviation(port):
    (group,) = rt.compare([port("only")]).groups
    assert group.name == "fgmt"
    assert group.top1["fgmt"] == Spread(0.6, None, 1)


def test_different_test_images_or_new_bases_cause_a_warning(port, document):
    data, models = document()["data"], document()["models"]
    port("one")
    port("two", data={**data, "fingerprint": "ee" * 32})
    port("three", models={**models, "target": {**models["target"], "hashes": {"model.safetensors": "ff" * 32}}})
    folder = port("four", port__seed=1).parent
    found = rt.compare([folder])
    assert len(found.groups) == 3, "they are never averaged"
    images, base = found.warnings
    assert images.startswith("different test images")
    assert "photos (cdcdcdcd): four, one, three; photos (eeeeeeee): two" in images
    assert base.startswith("different new base")
    assert "new (ffffffff): three" in base
    assert [group.name.partition(" ")[0] for group in rt.compare([folder], over=["data"]).groups] == ["new", "new"]
    page = draw_comparison_page(rt.compare([folder], over=["data"]).to_json())
    assert "Groups differ in: <b>new base</b>." in page
    averaged = rt.compare([folder], over=["target"])
    assert [len(group.runs) for group in averaged.groups] == [3, 1]
    assert len(averaged.warnings) == 1


def test_duplicate_ports_cause_a_warning(port):
    one, two = port("one"), port("two")
    found = rt.compare([one, two, one])
    assert len(found.runs) == 2, "one folder counts once"
    assert "two repeats one with the same seeds" in found.warnings[0]
    (group,) = found.groups
    assert group.top1["fgmt"] == Spread(0.6, None, 1), "the same seed again shows no noise"
    third = rt.compare([one, two, port("three", 0.8, port__seed=1)]).groups[0]
    assert third.top1["fgmt"].deviation == pytest.approx(0.02**0.5)
    table = make_table(rt.compare([one, port("four", 0.8, port__seed=1)]).to_json())
    assert {"70.0 ± 14.1%", "50.0%"} <= set(table[1][0]), "what did not vary has no deviation"


def test_damaged_ports_give_one_line_each(port, tmp_path, document):
    good = port("good")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "port.json").write_text(json.dumps(document())[:500])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "port.json").write_text('{"format": "hf-retarget/plane/1"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "port.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    port("lacking", only=("naive",))
    strange = port("strange", 7.5)
    port("bare", recipe={"port": {}})
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "port.json").write_bytes(b"\xff\xfe{")
    names = ["cut", "other", "list", "empty", "lacking", "strange", "bare", "bytes", "missing"]
    found = rt.compare([good, *(tmp_path / name for name in names)])
    assert len(found.runs) == 1
    assert len(found.problems) == len(names)
    assert all(str(tmp_path / name) in line for line in found.problems for name in names if f"/{name}" in line)
    words = " | ".join(found.problems)
    for fact in ("cannot be read", "its format is 'hf-retarget/plane/1'", "format is 'list'", "has no port.json",
                 "winner 'fgmt' is not among", "an accuracy is", "damaged", "does not exist"):  # fmt: skip
        assert fact in words, fact
    assert strange.name in words
    with pytest.raises(rt.RetargetError, match="does not exist"):
        rt.compare([tmp_path / "missing"])


def test_an_unknown_field_is_refused(port):
    with pytest.raises(rt.RetargetError, match="there is no field 'sed' to average over"):
        rt.compare([port("one")], over=["sed"])


def test_curves_are_averaged_at_shared_points(port, course):
    stopped = port("stopped", port__seed=1, steps=course(0.1, 0.2))
    (group,) = rt.compare([port("whole"), stopped]).groups
    assert group.curve == [(1.0, 0.125), (2.0, 0.25)]
    assert group.curves["plain"] == [(0.0, 0.1), (60 * 128.0, 0.5)]
    assert [at for at, _ in group.curves["finetuned"]] == [40 * 128, 40 * 128 + 20 * 64]
    assert set(group.curves) == {"plain", "finetuned"}


def test_the_document_is_complete_json(port):
    text = json.dumps(rt.compare([port("a"), port("b", port__seed=1)]).to_json(), allow_nan=False)
    document = json.loads(text)
    assert document["format"] == "hf-retarget/compare/2"
    (group,) = document["groups"]
    assert [run["seeds"]["port.seed"] for run in group["runs"]] == [0, 1]
    assert group["top1"]["fgmt"]["count"] == 2
    assert [run["winner"] for run in group["runs"]] == ["fgmt", "fgmt"]
    assert [at for at, _ in group["curves"]["plain"]] == [0.0, 60 * 128.0]


# ---- real ports


def make_net(seed: int, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)]
    return nn.Sequential(*layers)


def test_real_ports_are_read(tmp_path):
    images = [(torch.rand(3, 12, 12) * 0.5 + 0.4 * (label == torch.arange(3))[:, None, None], label)
              for label in (0, 1, 2) for _ in range(12)]  # fmt: skip
    tuned = make_net(0)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    recipe = Recipe("tiny").override(
        **{"data.image_size": 12, "data.validation": 0.3, "port.steps": 2, "port.batch_size": 8, "port.verify": False,
           "port.grad_batches": 1, "port.method": "fgmt", "finetune.steps": 2, "finetune.batch_size": 8}
    )  # fmt: skip
    for seed in (0, 1):
        changes = {"port.seed": seed, "finetune.seed": seed}
        result = rt.port(make_net(0), tuned, make_net(1), images, recipe=recipe, overrides=changes, device="cpu")
        result.save(tmp_path / str(seed))
    found, problems = read_ports([tmp_path])
    assert problems == []
    documents = [json.loads((tmp_path / str(seed) / "port.json").read_text()) for seed in (0, 1)]
    for run, document in zip(found, documents, strict=True):
        assert run.top1 == {each["name"]: each["test"]["top1"] for each in document["contenders"]}
    comparison = rt.compare([tmp_path])
    (group,) = comparison.groups
    assert (len(group.runs), group.name, comparison.warnings) == (2, "fgmt", ())
    assert {"fgmt", "naive", "plain", "finetuned"} <= set(group.top1)
    assert group.minibatches.mean == 4
    assert len(group.curve) == 2
    assert group.curves["finetuned"]
