"""A port from end to end: the permutation it finds, its folder, its comparisons, and resuming."""

from __future__ import annotations

import errno
import html as html_module
import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torch import nn

import hf_retarget as rt
from hf_retarget.contenders import find_contender
from hf_retarget.document import ContenderFigures, read_document
from hf_retarget.files import load_tensors, save_tensors
from hf_retarget.graph.verify import Verification
from hf_retarget.matching import gradients
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting import inputs, result
from hf_retarget.porting.check import plan
from hf_retarget.recipe import Recipe

FILES = ["README.md", "config.json", "graph.json", "model.safetensors", "permutation.safetensors", "port.json"]
FIGURES = ["classes", "confusion", "curve", "gradients", "groups", "moved", "price", "samples", "sweeps", "time"]
PORTING, NAIVELY = (find_contender(name).label for name in ("fgmt", "naive"))
"""What the work of the port, and of the port without matching, is called while it runs."""


class Stop(Exception):
    pass


class Watcher:
    """A progress display that interrupts when the work `doing` begins for the `after`-th time."""

    def __init__(self, doing: str = "", after: int = 0) -> None:
        self.doing, self.after = doing, after
        self.lines: list[str] = []

    def track(self, items, doing, total=None):
        for item in items:
            if doing == self.doing:
                self.after -= 1
                if self.after < 0:
                    raise Stop
            yield item

    def row(self, cells, line: str) -> None:
        self.say(line)

    def say(self, line: str) -> None:
        self.lines.append(line)


def make_recipe(**values) -> Recipe:
    """A recipe: `steps=4` sets `port.steps`, `data__limit=60` sets `data.limit`."""
    keys = {f"port.{key}" if "__" not in key else key.replace("__", "."): value for key, value in values.items()}
    small = {"port.steps": 3, "port.batch_size": 16, "port.grad_batches": 2, "port.bn_batches": 2}
    return Recipe("small").override(
        **{"port.method": "fgmt", **small, "data.image_size": 12, "data.validation": 0.25, **keys}
    )


def make_net(seed: int, classes: int = 3, channels: int = 3, norm: bool = False) -> nn.Module:
    """A convolutional network, optionally with BatchNorm, without a configuration."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    layers += [nn.Conv2d(8, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(12, classes))


def moved(model: nn.Module, classes: int, by: float = 0.1, seed: int = 5) -> nn.Module:
    """The model as if fine-tuned, with a head of `classes` classes."""
    torch.manual_seed(seed)
    tuned = load_checkpoint(model).build(classes, seed=7)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(by * parameter.std(correction=0) * torch.randn_like(parameter))
    return tuned


@pytest.fixture(scope="module")
def pictures(colours) -> list:
    """The training images as Python objects."""
    names = sorted(path.name for path in (colours / "train").iterdir())
    paths = sorted((colours / "train").rglob("*.png"))
    return [(Image.open(path).copy(), names.index(path.parent.name)) for path in paths]


@pytest.fixture(scope="module")
def nets():
    """Old base, its fine-tuning with another head, and new base: no BatchNorm."""
    old = make_net(0, classes=5)
    return old, moved(old, 3), make_net(1, classes=5)


@pytest.fixture(scope="module")
def ported(nets, colours, tmp_path_factory) -> rt.PortResult:
    return rt.port(*nets, colours, recipe=make_recipe(), out=tmp_path_factory.mktemp("ported") / "ported")


def same_files(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "permutation.safetensors", "config.json", "graph.json", "recipe.yaml"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def timeless(figures: ContenderFigures) -> ContenderFigures:
    """The figures without the time of each step."""
    return replace(figures, steps=tuple(replace(each, seconds={}) for each in figures.steps))


# ---- what it finds


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A new base that is the old one with its neurons in another order: a port should lose nothing."""
    folder = tmp_path_factory.mktemp("planted")
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=10, in_chans=1)
    graph = rt.trace(model)
    order = graph.random(seed=1)
    like = load_checkpoint(model)
    save_model(folder / "old", model.state_dict(), like)
    save_model(folder / "new", graph.apply(order, model.state_dict()), like)
    recipe = make_recipe(
        steps=2,
        batch_size=32,
        bn_batches=4,
        data__reference="fashion-mnist",
        data__limit=300,
        data__image_size=32,
        finetune__steps=24,
        finetune__batch_size=32,
        finetune__lr=0.05,
    )
    rt.finetune(folder / "old", recipe=recipe, out=folder / "tuned")
    recipe = recipe.override(**{"finetune.steps": 0, "finetune.lr": 0.001})
    result = rt.port(folder / "old", folder / "tuned", folder / "new", recipe=recipe, out=folder / "ported")
    return SimpleNamespace(folder=folder, order=order, recipe=recipe, result=result)


def test_a_planted_permutation_is_found_and_the_function_carried_over(planted):
    result, graph = planted.result, planted.result.graph
    top1 = {each.name: each.test.top1 for each in result.document.contenders}
    tuned = load_checkpoint(planted.folder / "tuned").weights
    expected = graph.apply(planted.order, {name: tuned[name] for name in dict(result.model.named_parameters())})
    last = rt.port(
        *(planted.folder / name for name in ("old", "tuned", "new")),
        recipe=planted.recipe.override(**{"port.steps": 1, "port.control": "none"}),
        permutation=result.permutation,
    )
    for name, parameter in last.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-3, atol=1e-4, msg=name)
    assert last.document.port.test.top1 > top1["tuned"] - 0.05
    assert top1["tuned"] > 0.4
    assert top1["fgmt"] > top1["tuned"] - 0.1
    assert top1["naive"] < 0.25
    assert top1["base"] < 0.25
    assert "the matching itself was worth +" in result.verdict
    assert result.document.head["policy"] == "own"


def test_timm_loads_the_folder_with_the_same_outputs(planted, tmp_path, monkeypatch, capsys):
    folder = planted.folder / "ported"
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(3, 1, 32, 32)
    assert torch.equal(model(images), planted.result.model(images))
    Image.new("RGB", (20, 20)).save(tmp_path / "image.jpg")
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    exec(code, {})  # the example of the card runs in its folder as it is
    assert "tensor([[" in capsys.readouterr().out
    assert load_checkpoint(folder).labels[:2] == ("T-shirt/top", "Trouser")
    assert load_checkpoint(folder).config["input_size"] == (1, 32, 32)
    assert rt.evaluate(folder, recipe=planted.recipe).score.top1 == planted.result.document.port.test.top1


PINS_NOTHING = {"port.json", "README.md", "report.html"}


def test_the_folder_is_complete_with_nothing_beside_it(planted):
    folder = planted.folder / "ported"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "figures", "recipe.yaml", "report.html"])
    drawn = {path.name for path in (folder / "figures").iterdir()}
    assert drawn == {f"{name}.{kind}" for name in (*FIGURES, "batchnorm") for kind in ("png", "svg")} | {"graph.svg"}
    assert sorted(path.name for path in planted.folder.iterdir()) == ["new", "old", "ported", "tuned"]
    written = json.loads((folder / "port.json").read_text())
    assert set(written["files"]) == {path.name for path in folder.iterdir() if path.is_file()} - PINS_NOTHING
    assert {**written, "files": {}} == json.loads(json.dumps(planted.result.document.to_json()))
    assert read_document(folder / "port.json") == planted.result.document
    assert rt.PermutationGraph.load(folder / "graph.json") == planted.result.graph
    assert rt.Permutation.load(folder / "permutation.safetensors") == planted.result.permutation
    assert rt.load_recipe(folder / "recipe.yaml") == planted.recipe


def test_port_json_records_its_inputs(planted):
    document = planted.result.document
    assert document.format == "hf-retarget/port/2"
    for side, name in (("source", "old"), ("tuned", "tuned"), ("target", "new")):
        assert document.models[side].hashes == dict(load_checkpoint(planted.folder / name).hashes)
    assert document.data.images == {"train": 225, "validation": 75, "test": 300}
    assert document.graph["check"]["passed"] is True
    assert (document.winner, document.port.role) == ("fgmt", "port")
    # Forward passes count a third: two steps with BatchNorm (128 images) and validation (75).
    assert (document.port.gradients, document.port.forwards) == (8, 2 * (128 + 75) / 32)
    assert document.find("plain").gradients == math.ceil(document.port.price) == 13
    negative, positive = document.port.flips
    assert positive - negative == round(300 * (document.port.test.top1 - document.find("tuned").test.top1))
    assert (len(document.flipped["negative"]), len(document.flipped["positive"])) == (negative, positive)
    assert document.relation.word == "independent"
    assert [each.step for each in document.port.steps] == [1, 2]
    assert [each.far for each in document.port.steps] == [0.5, 1.0]
    assert sum(map(sum, document.port.test.confusion)) == 300
    assert document.find("naive").test.confusion is None
    assert document.batchnorm["layers"] > 5
    assert set(document.seconds) >= {"loading", "tracing", "matching", "gradients", "batchnorm", "evaluation"}


def test_the_card_has_valid_front_matter_and_the_accuracies(planted):
    card = ModelCard.load(planted.folder / "ported" / "README.md")
    assert card.data.library_name == "timm"
    assert "hf-retarget" in card.data.tags
    assert f"{planted.result.document.port.test.top1:.1%}" in card.text
    assert planted.result.verdict in card.text
    assert str(planted.folder) not in card.text.partition("```")[0]  # no local folders


def test_port_json_records_the_quality_of_the_match(planted):
    document = planted.result.document
    first, second = (each.cosines for each in document.port.steps)
    assert first["unseen"] is None, "nothing was matched before"
    # The new base is the old one in another order, so that matched gradients agree, whether they were seen or not.
    assert first["after"] > 0.99
    assert second["unseen"] > 0.9
    assert max(first["before"], second["before"]) < 0.6
    fit = document.matching
    assert fit["identity"] < fit["matched"] <= fit["perfect"] * 1.001
    assert [group["name"] for group in fit["groups"]] == [group.name for group in planted.result.graph.groups]
    assert sum(group["moved"] > 0.5 for group in fit["groups"]) > 5
    assert all(group["after"] > 0.9 > group["before"] for group in fit["groups"] if group["after"] is not None)
    best = document.best
    assert best.objectives[-1] == pytest.approx(best.objective, rel=1e-4)
    assert len(best.objectives) == best.sweeps
    assert set(document.memory) == set(document.seconds)
    assert document.port.validation == best.top1
    assert all(0 <= document.find(name).validation <= 1 for name in ("tuned", "base"))


def test_sample_images_agree_with_the_scores(planted):
    result = planted.result
    facts, test = result.document.samples, result.inputs.data.test
    assert (facts["ours"], facts["theirs"]) == ("fgmt", "tuned")
    assert sum(facts["counts"].values()) == len(test) == 300
    right = facts["counts"]["both"] + facts["counts"]["only ours"]
    assert right / 300 == pytest.approx(result.document.port.test.top1)
    assert len(facts["images"]) == 12
    assert len({each["number"] for each in facts["images"]}) == 12
    for each in facts["images"]:
        assert each["label"] == int(test.targets[each["number"]])
        said = each["predictions"]["fgmt"] == each["label"], each["predictions"]["tuned"] == each["label"]
        kinds = {(True, True): "both", (True, False): "only ours", (False, True): "only theirs"}
        assert each["kind"] == kinds.get(said, "neither")
        with Image.open(io.BytesIO(result.thumbnails[each["number"]])) as small:
            assert np.array_equal(np.asarray(small), np.asarray(test.image(each["number"])))


def test_the_report_describes_this_port(planted):
    html = (planted.folder / "ported" / "report.html").read_text()
    assert planted.result.verdict.partition(": ")[2] in html_module.unescape(html)
    assert html.count('src="data:image/') == 12
    assert 'class="graph"' in html
    assert str(planted.folder) not in html.partition("<pre>")[0]


def test_a_failing_report_does_not_fail_the_port(ported, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(result, "compose_report", fail)
        with pytest.warns(UserWarning, match=r"no report.html: KeyError"):
            ported.save(tmp_path / "saved")
    same_files(ported.save(tmp_path / "whole"), tmp_path / "saved")
    assert not (tmp_path / "saved" / "report.html").exists()


# ---- the same again


def test_the_seed_determines_the_bytes(nets, ported, colours, tmp_path):
    rt.port(*nets, colours, recipe=make_recipe(), out=tmp_path / "again", workers=1)
    same_files(ported.save(tmp_path / "saved"), tmp_path / "again")
    other = rt.port(*nets, colours, recipe=make_recipe(seed=1, control="none"))
    assert other.permutation != ported.permutation


def test_the_seed_affects_the_control_but_not_the_split(nets, pictures, tmp_path):
    hard = [(picture, number % 3 if number % 4 else label) for number, (picture, label) in enumerate(pictures)]
    first = rt.port(*nets, hard, recipe=make_recipe(finetune__steps=9), out=tmp_path / "first").document
    recipe, changes = tmp_path / "first" / "recipe.yaml", ({"port.seed": 1}, {"port.seed": 1, "finetune.seed": 0})
    again = [rt.port(*nets, hard, recipe=recipe, overrides=each).document for each in changes]
    courses = [(each.find("plain").curve, each.find("plain").test.loss) for each in (first, *again)]
    assert courses[0] == courses[2] != courses[1], "its own seed is kept"
    assert again[0].recipe["finetune"]["seed"] == 1
    assert again[0].data.fingerprint == first.data.fingerprint


def test_given_models_are_not_modified(nets, colours, pictures):
    before = [{name: tensor.clone() for name, tensor in net.state_dict().items()} for net in nets]
    rt.port(*nets, pictures, recipe=make_recipe(control="full"))
    for net, kept in zip(nets, before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    ("doing", "after"),
    [(PORTING, 0), (PORTING, 1), ("evaluating", 2), (NAIVELY, 1), ("fine-tuning", 2), ("fine-tuning", 9)],
)
def test_an_interrupted_port_resumes_to_the_same_bytes(doing, after, nets, ported, colours, tmp_path):
    out, options = tmp_path / "ported", {"recipe": make_recipe()}
    with pytest.raises(Stop):
        rt.port(*nets, colours, out=out, progress=Watcher(doing, after), **options)
    assert not out.exists()
    began = (doing, after) != (PORTING, 0)
    assert any(tmp_path.iterdir()) is began
    watching = Watcher()
    resumed = rt.port(*nets, colours, out=out, resume=True, progress=watching, **options)
    assert any("continuing the port" in line for line in watching.lines) is began
    same_files(ported.save(tmp_path / "whole"), out)
    for part in ("matching", "samples", "batchnorm", "verdict", "run"):
        assert getattr(resumed.document, part) == getattr(ported.document, part), part
    assert resumed.thumbnails == ported.thumbnails
    for kept in ported.document.contenders:
        assert timeless(resumed.document.find(kept.name)) == timeless(kept), kept.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ported", "whole"]


def test_unfinished_ports_are_kept_and_told_apart(nets, colours, tmp_path):
    out = tmp_path / "ported"
    with pytest.raises(Stop):
        rt.port(*nets, colours, recipe=make_recipe(), out=out, progress=Watcher(PORTING, 2))
    kept = sorted(path.name for path in (tmp_path / ".ported.work").iterdir())
    assert [name for name in kept if ".state-" in name] == ["fgmt.state-2.safetensors"]
    with pytest.raises(rt.PortError, match=r"unfinished run .* --resume"):
        rt.port(*nets, colours, recipe=make_recipe(), out=out)
    with pytest.raises(rt.PortError, match=r"had grad_batches 2 and has 1 now"):
        rt.port(*nets, colours, recipe=make_recipe(grad_batches=1), out=out, resume=True)
    with pytest.raises(rt.PortError, match="'target' was"):
        rt.port(*nets[:2], make_net(2, classes=5), colours, recipe=make_recipe(), out=out, resume=True)
    rt.port(*nets, colours, recipe=make_recipe(control="none"), out=out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ported"]


# ---- other models, other data


def test_a_resnet_with_another_head_on_a_colour_folder(colours, tmp_path, labelled):
    old = labelled(tmp_path / "old", "test_resnet", num_classes=7)
    new = save_model(
        tmp_path / "new",
        load_checkpoint(timm.create_model("test_resnet", num_classes=9)).weights,
        load_checkpoint(timm.create_model("test_resnet", num_classes=9)),
    )
    tuned = moved(load_checkpoint(old).build(), 3)
    save_model(tmp_path / "tuned", tuned.state_dict(), load_checkpoint(tuned), labels=("red", "green", "blue"))
    options = make_recipe(steps=2, data__image_size=32, finetune__steps=3, finetune__batch_size=8)
    found = rt.port(old, tmp_path / "tuned", new, colours, recipe=options, out=tmp_path / "ported")
    document, plain, after = found.document, found.document.find("plain"), found.document.find("finetuned")
    assert document.head["policy"] == "zero"
    assert load_checkpoint(tmp_path / "ported").labels == ("red", "green", "blue"), "in the model's order"
    price = math.ceil(document.port.price + 2)
    assert (document.port.gradients, plain.gradients) == (8, price), "24 images more are two minibatches of 16"
    assert after.curve[0] == (16 * 8, document.port.validation)
    assert [images for images, _ in after.curve] == [16 * 8 + 8 * step for step in range(4)]
    assert plain.curve[-1][0] == 16 * plain.gradients
    assert [images for images, _ in document.port.curve] == [16 * 4, 16 * 8]
    # The saved model is the fine-tuned one.
    assert (after.role, document.result) == ("after", after)
    measured = rt.evaluate(tmp_path / "ported", colours, recipe=options).score
    assert measured.loss == pytest.approx(after.test.loss, rel=1e-6)
    assert measured.loss != document.port.test.loss


def test_a_vision_transformer_on_parquet(pictures, tmp_path):
    import datasets

    images, labels = zip(*pictures, strict=True)
    table = datasets.Dataset.from_dict({"image": list(images), "label": list(labels)})
    table.cast_column("image", datasets.Image()).to_parquet(tmp_path / "train.parquet")

    def make(name: str, tensors: dict) -> Path:
        save_tensors(tmp_path / f"{name}.safetensors", tensors, {})
        like = load_checkpoint(tmp_path / f"{name}.safetensors", arch="test_vit", options={"img_size": 32})
        return save_model(tmp_path / name, tensors, like)

    torch.manual_seed(0)
    old, new = (timm.create_model("test_vit", num_classes=3, img_size=32) for _ in range(2))
    trio = make("old", old.state_dict()), make("tuned", moved(old, 3).state_dict()), make("new", new.state_dict())
    recipe = make_recipe(data__image_size=None, steps=2, head="shared", control="naive")
    found = rt.port(*trio, str(tmp_path / "train.parquet"), recipe=recipe, out=tmp_path / "ported")
    images = torch.randn(2, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path / 'ported'}", pretrained=True).eval()
    assert torch.equal(again(images), found.model(images))
    assert {each.name for each in found.document.contenders} == {
        *("fgmt", "naive", "tuned", "base"),
        *("head", "tuned-head", "old-head"),
    }
    assert any("no test split" in note for note in found.document.notes)
    blocked = [group.name for group in found.graph.groups if group.blocks]
    assert blocked
    assert any((found.permutation[name] != torch.arange(found.permutation[name].shape[-1])).any() for name in blocked)
    assert found.document.batchnorm["layers"] == 0
    changed = rt.verify(found.model, found.graph, torch.zeros(2, 3, 32, 32))
    assert changed.passed


@pytest.mark.parametrize("channels", [1, 3])
def test_python_data_in_gray_and_colour(channels, pictures):
    old = make_net(0, classes=5, channels=channels, norm=True)
    tuned, new = moved(old, 3), make_net(1, classes=4, channels=channels, norm=True)
    found = rt.port(old, tuned, new, pictures, recipe=make_recipe(control="none"))
    assert [each.name for each in found.document.contenders] == ["fgmt"]
    assert "Undecided" in found.verdict
    assert found.inputs.preprocess.input_size == (channels, 12, 12)
    layer = found.document.batchnorm["statistics"]["1"]
    assert layer["before"]["variance"] == 1.0
    assert layer["after"]["variance"] != 1.0
    assert not found.model.training


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        ("fgmt", 12),
        ("fgmt-sign", 12),
        ("naive-sign", 6),
        ("gmt", 24),
        ("naive", 0),
        ("rebasin", 0),
        ("permuted-source", 12),
        ("oracle", 0),
    ],
)
def test_every_method_makes_a_port(method, gradients, nets, pictures):
    real = moved(nets[2], 3, by=0.2, seed=6)
    found = rt.port(*nets, pictures, recipe=make_recipe(method=method, control="naive"), tuned_target=real)
    document, names = found.document, {each.name for each in found.document.contenders}
    assert (document.winner, document.port.gradients) == (method, gradients)
    assert names >= {method, "naive", "oracle", "tuned-target"}
    assert "plain" not in names
    assert len(document.find("oracle").steps) == 3
    assert (document.port.steps[-1].cosines is None) is method.startswith("naive")
    assert (found.permutation == found.graph.identity()) is method.startswith("naive")
    masked = document.find("naive-sign")
    assert (masked is not None) is method.endswith("-sign")
    assert masked is None or len(masked.steps) == 3
    if (unmatched := document.unmatched) is not None:
        assert unmatched.test.loss != document.port.test.loss
    whom = {"naive": None, "naive-sign": None, "fgmt-sign": "naive-sign"}.get(method, "naive")
    assert (unmatched.name if unmatched else None) == whom, "the port without matching, not itself"
    assert document.samples["theirs"] == "tuned"


# ---- permutations, trajectories and heads that are there already


def test_a_permutation_is_reused_without_gradients(ported, nets, colours, monkeypatch, tmp_path):
    ported.permutation.save(tmp_path / "permutation.safetensors")
    monkeypatch.setattr(gradients, "Gradients", None)
    again = rt.port(*nets, colours, recipe=make_recipe(), permutation=tmp_path / "permutation.safetensors")
    assert again.permutation == ported.permutation
    assert (again.document.winner, again.document.port.gradients) == ("given", 0)
    assert again.document.permutation.given
    assert again.document.find("plain").gradients == math.ceil(again.document.port.forwards / 3)
    last = ported.history[-1]
    if ported.best_step == last.step:
        assert again.history[-1].top1 == last.top1
    other = rt.Permutation("somebody else's", ported.permutation.indices)
    with pytest.raises(rt.GraphMismatchError, match="made for graph somebody"):
        rt.port(*nets, colours, recipe=make_recipe(), permutation=other)


def test_an_actual_trajectory_is_followed(nets, colours, tmp_path):
    old, tuned, new = nets
    middle = moved(old, 3, by=0.05)
    recorder = rt.TrajectoryRecorder(tmp_path / "trajectory", every=1)
    recorder.start(middle)
    recorder.record(middle, 1)
    recorder.record(tuned, 2)
    recipe = make_recipe(control="none")
    found = rt.port(old, tuned, new, colours, recipe=recipe, checkpoints=tmp_path / "trajectory")
    assert [(each.step, each.far) for each in found.history] == [(1, None), (2, None)]
    assert found.recipe.port.trajectory == "actual"
    files = [tmp_path / "trajectory" / f"step-{step:06}.safetensors" for step in (1, 2)]
    assert rt.port(old, tuned, new, colours, recipe=recipe, checkpoints=files).permutation == found.permutation
    with pytest.raises(rt.PortError, match="no checkpoint"):
        rt.port(old, tuned, new, colours, recipe=recipe, checkpoints=[tmp_path / "none", *files])
    with pytest.raises(rt.PortError, match="--checkpoints"):
        rt.port(old, tuned, new, colours, recipe=make_recipe(trajectory="actual"))


def test_given_and_shared_heads(nets, colours, tmp_path):
    head = {"8.weight": torch.randn(3, 12), "8.bias": torch.randn(3)}
    save_tensors(tmp_path / "head.safetensors", {**head, "0.weight": torch.zeros(1)}, {})
    given = rt.port(*nets, colours, recipe=make_recipe(control="none"), initial_head=tmp_path / "head.safetensors")
    assert given.document.head["policy"] == "given"
    assert torch.equal(given.inputs.heads.source["8.weight"], head["8.weight"])
    old, _, new = nets
    same_size = (old, moved(old, 5), new)
    pictures_of_five = [(Image.new("RGB", (12, 12), (40 * n, 0, 0)), n % 5) for n in range(60)]
    shared = rt.port(*same_size, pictures_of_five, recipe=make_recipe(head="shared", control="none"))
    fresh = shared.inputs.heads
    assert torch.equal(fresh.source["8.weight"], fresh.target["8.weight"])
    assert not torch.equal(fresh.target["8.weight"], new.state_dict()["8.weight"]), "not the new base's own"
    with pytest.raises(rt.ModelError, match="no head was given"):
        rt.port(*nets, colours, recipe=make_recipe(head="given"))


def test_gradients_of_the_old_side_are_reused_by_other_ports(nets, ported, colours, tmp_path, monkeypatch):
    options = {"recipe": make_recipe(control="none"), "gradient_cache": tmp_path / "cache"}
    first = rt.port(*nets, colours, **options)
    asked = []
    original = gradients.StepGradients.__call__

    def count(self, weights, step):
        asked.append(step)
        return original(self, weights, step)

    monkeypatch.setattr(gradients.StepGradients, "__call__", count)
    again = rt.port(*nets, colours, **options)
    assert asked == [1, 2, 3], "only the target's side"
    assert again.permutation == first.permutation == ported.permutation
    rt.port(*nets, colours, recipe=make_recipe(control="none", seed=1), gradient_cache=tmp_path / "cache")
    assert len(asked) == 3 + 6


# ---- when to stop, and what can go wrong


def test_early_stop_takes_no_needless_steps(nets, pictures):
    old, _, new = nets
    far = old, moved(old, 3, by=2.0), new
    whole = rt.port(*far, pictures, recipe=make_recipe(steps=6, control="none"))
    tops = [(each.top1, -each.loss) for each in whole.history]
    short = rt.port(*far, pictures, recipe=make_recipe(steps=6, control="none", early_stop=1))
    # It stops after the first step that is no better than all before it.
    expected = next((step for step in range(2, 7) if tops[step - 1] <= max(tops[: step - 1])), 6)
    assert expected < 6, "otherwise this proves nothing; choose another seed"
    assert [(each.top1, -each.loss) for each in short.history] == tops[:expected]
    assert short.document.steps_planned == 6


def test_a_diverging_control_becomes_a_note(nets, colours, tmp_path):
    recipe = make_recipe(finetune__lr=1e30, finetune__steps=4)
    found = rt.port(*nets, colours, recipe=recipe, out=tmp_path / "ported")
    assert found.document.find("plain") is None
    assert found.document.find("finetuned") is None
    assert [("plain" in note, "lower lr" in note) for note in found.document.notes if "failed" in note] == [
        (False, True),
        (True, True),
    ]
    assert "plain fine-tuning" not in found.verdict
    saved, _ = load_tensors(tmp_path / "ported" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values() if tensor.is_floating_point())
    json.loads((tmp_path / "ported" / "port.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("change", "values", "error", "message"),
    [
        (
            {"new_base": make_net(0, norm=True)},
            {},
            rt.ModelError,
            "the new base .* differ: .* 5 tensors are unexpected",
        ),
        ({"src_ft": make_net(0, classes=4)}, {}, rt.DataError, "3 classes, but .* has 4"),
        ({}, {"data__validation": 0.0}, rt.DataError, "data.validation"),
        ({}, {"method": "oracle"}, rt.PortError, "--tuned-target"),
        ({"tuned_target": make_net(0, classes=4)}, {}, rt.ModelError, "4 classes, but"),
        ({"dtype": "float8"}, {}, rt.PortError, "float32, float16, bfloat16"),
        ({"out": None, "resume": True}, {}, rt.PortError, "out="),
        ({"preset": "paper"}, {}, rt.RecipeError, "preset 'paper'"),
        ({"initial_head": "missing.safetensors"}, {}, rt.ModelError, "initial head 'missing"),
        ({"permutation": "missing.safetensors"}, {}, rt.PermutationError, "missing.safetensors"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(change, values, error, message, nets, colours, tmp_path):
    sides = dict(zip(("src_base", "src_ft", "new_base"), nets, strict=True))
    arguments = sides | {"data": colours, "out": tmp_path / "ported"} | change
    with pytest.raises(error, match=message):
        rt.port(**arguments, recipe=make_recipe(**values))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_fails_verification_is_an_error(nets, colours, monkeypatch):
    failed = Verification(1.0, 0.0, 1e-8, 2, (), 0.0)
    monkeypatch.setattr(inputs, "verify", lambda *_, **__: failed)
    with pytest.raises(rt.PortError, match=r"cannot be trusted: FAILED.*--no-verify"):
        rt.port(*nets, colours, recipe=make_recipe())
    unchecked = rt.port(*nets, colours, recipe=make_recipe(check=False, control="none"))
    assert unchecked.document.graph["check"] is None


def test_a_full_disk_leaves_no_folder_and_the_port_can_continue(nets, ported, colours, tmp_path, monkeypatch):
    out = tmp_path / "ported"

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(result, "write_json", fail)
        with pytest.raises(rt.PortError, match="No space left"):
            rt.port(*nets, colours, recipe=make_recipe(), out=out)
        with pytest.raises(rt.PortError, match="No space left"):
            ported.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == [".ported.work"]
    rt.port(*nets, colours, recipe=make_recipe(), out=out, resume=True, progress=Watcher(PORTING, 0))
    same_files(ported.save(tmp_path / "whole"), out)
    with pytest.raises(rt.PortError, match="not empty"):
        ported.save(out)
    ported.save(out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ported", "whole"]


def test_half_precision_is_computed_in_float32_and_kept(nets, colours, tmp_path):
    old, tuned, new = nets
    narrow = load_checkpoint(new).build().half()
    found = rt.port(old, tuned, narrow, colours, recipe=make_recipe(control="none"), out=tmp_path / "half")
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.float32}
    assert {tensor.dtype for tensor in load_tensors(tmp_path / "half" / "model.safetensors")[0].values()} == {
        torch.half
    }
    assert any("different precisions" in note for note in found.document.notes)
    rt.port(old, tuned, narrow, colours, recipe=make_recipe(control="none"), out=tmp_path / "full", dtype="float32")
    saved, _ = load_tensors(tmp_path / "full" / "model.safetensors")
    assert all(torch.equal(tensor, found.weights[name]) for name, tensor in saved.items())


# ---- before it begins


def test_a_dry_run_describes_the_port(nets, ported, colours, tmp_path):
    found = plan(*nets, colours, recipe=make_recipe(finetune__steps=4, finetune__batch_size=16))
    assert found.gradients == ported.document.port.gradients == 12
    assert found.control_steps == math.ceil(12 + found.forwards / 3 + 4)
    assert found.groups == len(ported.graph.groups)
    assert found.images == ported.document.data.images
    assert found.parameters == sum(parameter.numel() for parameter in ported.model.parameters())
    assert found.memory > 2 * 3 * 4 * found.parameters
    assert found.seconds > 0
    json.dumps(found.to_json())
    carried = plan(*nets, colours, recipe=make_recipe(), permutation=ported.permutation)
    assert (carried.gradients, carried.control_steps) == (0, math.ceil(carried.forwards / 3))


@pytest.mark.parametrize(
    ("options", "steps", "parameters", "expected"),
    [
        ({}, 10, 3_300_000, None),
        ({}, 11, 3_300_000, 0.999),
        ({"compress": 0.9}, 1, 10, 0.9),
        ({"compress": 1}, 99, 10**9, None),
    ],
)
def test_large_stacks_are_compressed(options, steps, parameters, expected):
    how = inputs.choose_compression(make_recipe(**options).port, steps, parameters)
    assert (how.energy if how else None) == expected
