"""Planes and lines: exact scores at the models, barriers, permutations, errors and resuming."""

from __future__ import annotations

import csv
import json
import re

import pytest
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.document import read_document
from hf_retarget.files import load_record, load_tensors
from hf_retarget.landscape.result import find_barrier
from hf_retarget.models import load_checkpoint
from hf_retarget.recipe import Recipe
from hf_retarget.words import shorten_names

SMALL = Recipe("small").override(
    **{"data.image_size": 12, "data.validation": 0.25, "port.batch_size": 16, "port.bn_batches": 2, "port.seed": 3}
)


class Stop(Exception):
    pass


class Watcher:
    """Interrupts the run after this number of points."""

    def __init__(self, after: int = 10**9) -> None:
        self.after, self.lines, self.seen = after, [], 0

    def track(self, items, doing, total=None):
        for item in items:
            if "points" in doing:
                if self.seen == self.after:
                    raise Stop
                self.seen += 1
            yield item

    def say(self, line: str) -> None:
        self.lines.append(line)


def make_net(seed: int, classes: int = 3, norm: bool = True, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width) if norm else nn.Identity(), nn.ReLU()]
    layers += [nn.Conv2d(width, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(12, classes))


@pytest.fixture(scope="module")
def nets() -> list[nn.Module]:
    return [make_net(seed) for seed in range(3)]


def survey(models, colours, **options):
    return rt.plane(models, str(colours), recipe=SMALL, device="cpu", **options)


def own_score(model: nn.Module, colours) -> dict:
    """The score of a model after a reset of BatchNorm, computed as in a port."""
    from hf_retarget.data import choose_preprocess, derive_seed, load_data
    from hf_retarget.evaluation.batchnorm import reset_batchnorm
    from hf_retarget.evaluation.scorer import score_model, set_layout

    checkpoint = load_checkpoint(model)
    data = load_data(str(colours), SMALL.data, choose_preprocess(checkpoint, 12))
    built = checkpoint.build()
    set_layout(built, torch.channels_last)  # as scores are computed
    reset_batchnorm(built, data.train.batches(16, seed=derive_seed(3, "batchnorm"), count=2))
    found = score_model(built, data.test.batches(SMALL.port.eval_batch), 3)
    return {"loss": found.loss, "top1": found.top1, "top5": found.top5}


def test_corners_have_exactly_the_scores_of_the_models(nets, colours):
    figures = survey(nets, colours, grid=3).figures
    for number, (entry, net) in enumerate(zip(figures["models"], nets, strict=True)):
        expected = own_score(net, colours)
        assert {name: entry[name] for name in expected} == expected
        corner = next(each for each in figures["points"] if each["shares"] == [float(i == number) for i in range(3)])
        assert {name: corner[name] for name in expected} == expected
    assert len(figures["points"]) == 9 + 3
    assert figures["finished"]


def test_a_point_between_has_the_score_of_the_mean_weights(nets, colours):
    figures = survey(nets[:2], colours, grid=3).figures
    (middle,) = [each for each in figures["points"] if each["shares"] == [0.5, 0.5]]
    mean = make_net(0)
    with torch.no_grad():
        for ours, one, two in zip(mean.parameters(), nets[0].parameters(), nets[1].parameters(), strict=True):
            ours.copy_((one.double() + two.double()) / 2)
    expected = own_score(mean, colours)
    assert {name: middle[name] for name in expected} == expected


def test_scoring_does_not_change_the_models(nets, colours):
    before = [{name: tensor.clone() for name, tensor in net.state_dict().items()} for net in nets]
    survey(nets, colours, grid=2)
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("norm", [True, False])
def test_a_line_from_a_model_to_itself_has_no_barrier(norm, colours):
    result = survey({"one": make_net(0, norm=norm), "same": make_net(0, norm=norm)}, colours, grid=5)
    assert (result.barrier["loss"], result.barrier["top1"]) == (0.0, 0.0)
    assert len({each["loss"] for each in result.points}) == 1
    assert "the same weights" in result.figures["notes"][-1]


def test_a_permuted_copy_is_aligned_by_matching_or_its_permutation(nets, colours, tmp_path):
    net = nets[0]
    graph = rt.trace(net, torch.zeros(2, 3, 12, 12))
    moved = graph.random(seed=1)
    copy = make_net(0)
    copy.load_state_dict(graph.apply(moved, net.state_dict()))
    models = {"one": net, "copy": copy}
    raw = survey(models, colours, grid=3)
    assert raw.points[0]["loss"] == pytest.approx(raw.points[1]["loss"], rel=1e-5), "the same function"
    assert raw.points[2]["loss"] != pytest.approx(raw.points[0]["loss"], rel=1e-3), "but not half-way"
    back = graph.invert(moved)
    back.save(tmp_path / "permutation.safetensors")
    graph.save(tmp_path / "graph.json")
    ways = ["match", {"copy": "match"}, {"copy": back}, {"copy": tmp_path / "permutation.safetensors"}]
    for permute in [*ways, {"copy": str(tmp_path)}]:
        found = survey(models, colours, grid=3, permute=permute)
        assert found.barrier["loss"] == 0.0
        assert found.figures["distances"][0][1] == 0.0
        assert found.figures["models"][0]["permuted"] is None
        assert found.figures["models"][1]["permuted"]["moved"] > 0.5
    again = survey(models, colours, grid=3, permute={"copy": back}, graph=tmp_path / "graph.json")
    assert again.barrier["loss"] == 0.0


def test_without_minibatches_stored_statistics_are_mixed(nets, colours):
    with torch.no_grad():
        nets[1][1].running_mean.add_(0.3)
    found = survey(nets[:2], colours, grid=2, overrides={"port.bn_batches": 0})
    expected = rt.evaluate(nets[1], str(colours), recipe=SMALL).score
    assert found.figures["models"][1]["loss"] == expected.loss
    assert found.figures["models"][1]["loss"] != survey(nets[:2], colours, grid=2).figures["models"][1]["loss"]


def test_the_images_can_be_chosen(nets, colours):
    few = survey(nets[:2], colours, grid=2, split="validation", limit=7)
    assert (few.figures["data"]["split"], few.figures["data"]["images"]) == ("validation", 7)
    assert few.figures["points"] == survey(nets[:2], colours, grid=2, split="validation", limit=7).figures["points"]
    assert survey(nets[:2], colours, grid=2, split="validation", limit=999).figures["data"]["images"] == 15


def test_an_infinite_loss_is_null(colours):
    wild = make_net(1, norm=False)
    with torch.no_grad():
        wild[-1].weight.copy_(3e38 * torch.randn(3, 12).sign())
    result = survey({"tame": make_net(0, norm=False), "wild": wild}, colours, grid=3)
    assert result.figures["models"][1]["loss"] is None
    assert result.barrier["loss"] is None
    assert json.loads(json.dumps(result.figures, allow_nan=False))


def test_the_barrier_is_relative_to_interpolation_between_the_ends():
    points = [{"x": x / 4, "loss": 1.0 + x / 4, "top1": 0.8 - x / 10} for x in range(5)]
    assert find_barrier(points)["loss"] == pytest.approx(0.0, abs=1e-15)
    points[1] = {"x": 0.25, "loss": 2.0, "top1": 0.2}
    points.append({"x": 1.5, "loss": 99.0, "top1": 0.0})
    found = find_barrier(points)
    assert (found["loss"], found["loss_at"]) == (pytest.approx(0.75), 0.25)
    assert (found["top1"], found["top1_at"]) == (pytest.approx(0.5), 0.25)


# ---- files


def test_a_folder_has_figures_tables_and_pictures(nets, colours, tmp_path):
    result = survey(nets, colours, grid=5, out=tmp_path / "plane")
    folder = tmp_path / "plane"
    assert sorted(path.name for path in folder.iterdir()) == [
        "plane.csv", "plane.html", "plane.json", "plane.png", "plane.svg"
    ]  # fmt: skip
    document = json.loads((folder / "plane.json").read_text())
    assert document == result.figures
    assert document["format"] == "hf-retarget/plane/1"
    assert {"torch", "hf-retarget"} <= set(document["versions"])
    assert all(each["hashes"] for each in document["models"])
    rows = list(csv.DictReader((folder / "plane.csv").open()))
    assert [row["model"] for row in rows[:4]] == ["Sequential", "Sequential (2)", "Sequential (3)", ""]
    assert [float(row["loss"]) for row in rows] == [each["loss"] for each in document["points"]]
    result.save(tmp_path / "again")
    for name in ("plane.json", "plane.svg", "plane.png", "plane.html"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_coarse_picture_comes_early_and_a_killed_run_resumes_to_the_same_result(nets, colours, tmp_path):
    options = {"grid": 9, "limit": 6}
    whole = survey(nets, colours, **options, out=tmp_path / "whole").figures
    out = tmp_path / "plane"
    with pytest.raises(Stop):
        survey(nets, colours, **options, out=out, progress=Watcher(after=40))
    assert not json.loads((out / "plane.json").read_text())["finished"]
    assert len(json.loads((out / "plane.json").read_text())["points"]) == 25 + 3
    assert (out / "plane.png").stat().st_size > 10_000
    assert "A coarse picture" in (out / "plane.html").read_text()
    kept = out / "points.json"
    assert len(load_record(kept)["points"]) == 40
    with pytest.raises(rt.RetargetError, match="--resume"):
        survey(nets, colours, **options, out=out)
    with pytest.raises(rt.RetargetError, match="'images' was 6 and is 5 now"):
        survey(nets, colours, **{**options, "limit": 5}, out=out, resume=True)
    with pytest.raises(rt.RetargetError, match="'models' had"):
        survey(nets[::-1], colours, **options, out=out, resume=True)
    watcher = Watcher()
    resumed = survey(nets, colours, **options, out=out, resume=True, progress=watcher).figures
    assert watcher.seen == len(whole["points"]) - 40
    assert "continuing: 40 of 84 points are known" in watcher.lines
    for figures in (whole, resumed):
        figures.pop("seconds")
    assert resumed == whole
    assert (out / "plane.svg").read_bytes() == (tmp_path / "whole" / "plane.svg").read_bytes()
    assert not kept.exists()
    with pytest.raises(rt.RetargetError, match="--overwrite"):
        survey(nets, colours, **options, out=out)


def test_damaged_points_are_scored_again(nets, colours, tmp_path):
    options, out = {"grid": 3, "limit": 6}, tmp_path / "plane"
    whole = survey(nets, colours, **options).figures["points"]
    with pytest.raises(Stop):
        survey(nets, colours, **options, out=out, progress=Watcher(after=5))
    kept = out / "points.json"
    text = kept.read_text()
    for damaged in (text[: len(text) // 2], text.replace("0.", "0.1", 1), "{}", "[]", ""):
        kept.write_text(damaged)
        watcher = Watcher(after=5)
        with pytest.raises(Stop):
            survey(nets, colours, **options, out=out, resume=True, progress=watcher)
        assert watcher.seen == 5, "from the first point on"
    assert survey(nets, colours, **options, out=out, resume=True).figures["points"] == whole


def test_unrelated_files_are_not_touched(nets, colours, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(rt.RetargetError, match=r"thesis\.tex"):
            survey(nets, colours, out=tmp_path, overwrite=overwrite)
    with pytest.raises(rt.RetargetError, match="is a file"):
        survey(nets, colours, out=tmp_path / "thesis.tex")


# ---- errors


def test_models_that_do_not_fit_are_refused(nets, colours, tmp_path):
    one, two, three = nets
    cases = [
        ([one], "1 models were given; give two for a line or three for a plane"),
        ([one, two, three, one], "4 models were given"),
        ([one, two, one], "have the same weights"),
        ([one, make_net(1, classes=5)], r"heads .* differ in size: 3 classes and 5"),
        ([one, make_net(1, width=9)], "only models of one architecture"),
        ([one, nn.Sequential(nn.Flatten(), nn.Linear(432, 3))], "only models of one architecture"),
    ]
    for models, message in cases:
        with pytest.raises(rt.ModelError, match=message):
            survey(models, colours, out=tmp_path / "plane")
    assert list(tmp_path.iterdir()) == []


def test_three_models_on_a_line_are_refused(nets, colours):
    between = make_net(0)
    with torch.no_grad():
        for ours, one, two in zip(between.parameters(), nets[0].parameters(), nets[1].parameters(), strict=True):
            ours.copy_(0.3 * one + 0.7 * two)
    with pytest.raises(rt.ModelError, match="give the two at its ends"):
        survey({"a": nets[0], "b": nets[1], "c": between}, colours)


def test_different_labels_are_refused(tmp_path, gray_resnet, labelled, colours):
    names = [("blue", "green", "red"), ("blue", "red", "green")]
    folders = [
        labelled(tmp_path / str(number), "test_resnet", labels, num_classes=3) for number, labels in enumerate(names)
    ]
    with pytest.raises(rt.ModelError, match="class 1 is 'green' in one and 'red' in the other"):
        survey(folders, colours)
    with pytest.raises(rt.ModelError, match="differ"):
        survey([folders[0], gray_resnet], colours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"permute": "magic"}, "cannot be permuted by 'magic'"),
        ({"permute": {"c": "match"}}, "there is no model 'c' to permute; the models are a, b"),
        ({"permute": {"a": "match"}}, "'a' is the first model"),
        ({"permute": {"b": "nowhere.safetensors"}}, r"there is no permutation 'nowhere\.safetensors'"),
        ({"split": "tset"}, "there is no split 'tset'"),
        ({"limit": 0}, "at least one image"),
        ({"grid": 1}, "at least 2 points along a side"),
        ({"margin": -1.0}, "the margin is -1"),
    ],
)
def test_invalid_options_are_refused(options, message, nets, colours):
    with pytest.raises(rt.RetargetError, match=message):
        survey({"a": nets[0], "b": nets[1]}, colours, **options)


def test_a_permutation_of_another_graph_is_refused(nets, colours):
    other = rt.trace(make_net(0, width=9), torch.zeros(2, 3, 12, 12))
    with pytest.raises(rt.GraphMismatchError):
        survey({"a": nets[0], "b": nets[1]}, colours, permute={"b": other.identity()})


def test_names_distinguish_references():
    assert shorten_names(["x/a", "y/b"]) == ["a", "b"]
    assert shorten_names(["x/a/m", "y/a/m", "y/b/m"]) == ["x/a/m", "y/a/m", "y/b/m"]
    assert shorten_names(["m/", "m"]) == ["m", "m (2)"]


# ---- the report of a port


def test_a_plane_is_added_to_the_report_of_a_port(colours, tmp_path):
    old, new = make_net(0), make_net(1)
    tuned = make_net(0)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    short = SMALL.override(**{"port.method": "fgmt", "port.steps": 2, "port.grad_batches": 1, "port.verify": False})
    ported = rt.port(old, tuned, new, str(colours), recipe=short, device="cpu").save(tmp_path / "ported")
    port = read_document(ported / "port.json")
    model = make_net(1)
    model.load_state_dict(load_tensors(ported / "model.safetensors")[0])
    before = (ported / "report.html").read_text()
    models = {"<b>port</b>": model, "tuned": tuned}
    for _ in range(2):
        found = survey(models, colours, grid=3, permute={"tuned": ported}, report=ported, overwrite=True)
    assert found.figures["models"][0]["loss"] == port.port.test.loss, "the score that the port had"
    assert (ported / "plane" / "plane.json").is_file()
    page = (ported / "report.html").read_text()
    assert page.count('<section id="plane">') == 1, "a new plane goes in the place of the old one"
    assert page.index('id="moved"') < page.index('id="plane"') < page.index('<section id="cost">')
    assert "&lt;b&gt;port&lt;/b&gt;" in page
    assert "<b>port</b>" not in page
    assert page.count('<li><a href="#plane">') == 1
    assert re.sub("<!-- plane -->.*?<!-- end of plane -->\n", "", page, flags=re.DOTALL) == before
    with pytest.raises(rt.RetargetError, match=r"no report\.html"):
        survey(models, colours, grid=3, report=tmp_path)
    (tmp_path / "report.html").write_text("somebody else's")
    with pytest.raises(rt.RetargetError, match="not the report of a port"):
        survey(models, colours, grid=3, report=tmp_path)
