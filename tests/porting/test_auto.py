"""`--method auto`: related bases are not matched, independent ones are; heads, targets, and data with gaps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import nn

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.contenders import AUTO, FURTHER, contenders, find_contender
from hf_retarget.document import read_document
from hf_retarget.evaluation.refit import fit_head
from hf_retarget.models import load_checkpoint
from hf_retarget.porting import makers
from hf_retarget.porting.contest import Contest
from hf_retarget.porting.cost import FEW
from hf_retarget.porting.makers import BEHIND
from hf_retarget.recipe import Recipe

SMALL = {
    "port.steps": 3,
    "port.batch_size": 16,
    "port.grad_batches": 2,
    "port.bn_batches": 2,
    "port.control": "none",
    "data.image_size": 12,
    "data.validation": 0.25,
}


def make_recipe(**values) -> Recipe:
    """A recipe: `alpha=1` sets `port.alpha`, `finetune__steps=2` sets `finetune.steps`."""
    keys = {f"port.{key}" if "__" not in key else key.replace("__", "."): value for key, value in values.items()}
    return Recipe("small").override(**SMALL | keys)


def make_net(seed: int, classes: int = 3, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    layers += [nn.Conv2d(8, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, classes))


def shake(model: nn.Module, by: float, seed: int = 5) -> nn.Module:
    """The model as if trained a little further."""
    torch.manual_seed(seed)
    other = load_checkpoint(model).build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * parameter.std(correction=0) * torch.randn_like(parameter))
    return other


@pytest.fixture(scope="module")
def tuned(colours, tmp_path_factory) -> tuple[nn.Module, nn.Module]:
    """An old base and a real fine-tuning of it."""
    old = make_net(0)
    recipe = make_recipe(finetune__steps=60, finetune__batch_size=16, finetune__lr=0.1)
    done = rt.finetune(old, colours, recipe=recipe, out=tmp_path_factory.mktemp("tuned") / "tuned", head="zero")
    assert done.test.top1 > 0.8
    return old, done.model


@pytest.fixture(scope="module")
def related(tuned) -> nn.Module:
    return shake(tuned[0], 0.01)


@pytest.fixture(scope="module")
def flat(colours, tmp_path_factory) -> Path:
    """The same images without labels."""
    folder = tmp_path_factory.mktemp("flat")
    for split in ("train", "test"):
        (folder / split).mkdir()
        for path in sorted((colours / split).rglob("*.png")):
            shutil.copy(path, folder / split / f"{path.parent.name}-{path.name}")
    return folder


# ---- who enters


def test_related_bases_are_neither_traced_nor_matched(tuned, related, colours, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_retarget.porting.contest.trace_model", lambda *_, **__: pytest.fail("traced"))
    done = rt.port(*tuned, related, colours, recipe=make_recipe(), out=tmp_path / "ported")
    document = done.document
    assert document.relation.word == "same lineage"
    assert document.relation.cosine > 0.99
    assert {each.name for each in document.contenders} == {"naive-line", "naive-head", "head"}
    assert all(each.gradients == 0 < each.forwards for each in document.contenders)
    assert any("nothing was matched" in note for note in document.notes)
    assert done.permutation is done.graph is None
    assert document.port.test.top1 > 0.8
    files = {path.name for path in (tmp_path / "ported").iterdir()}
    assert not files & {"permutation.safetensors", "graph.json"}
    assert {"model.safetensors", "port.json", "report.html", "README.md"} <= files
    assert "same lineage" in (tmp_path / "ported" / "report.html").read_text()
    assert "same lineage" in (tmp_path / "ported" / "README.md").read_text()


def test_a_port_without_matching_has_no_permutation(tuned, related, colours, tmp_path):
    rt.port(*tuned, related, colours, recipe=make_recipe(), out=tmp_path / "ported")
    with pytest.raises(rt.PermutationError, match="permutation"):
        rt.port(*tuned, related, colours, recipe=make_recipe(), permutation=tmp_path / "ported")


def test_masked_and_whole_steps_share_gradients_between_independent_bases(tuned, colours, tmp_path):
    done = rt.port(*tuned, make_net(1), colours, recipe=make_recipe(control="full"), out=tmp_path / "ported")
    document = done.document
    assert document.relation.word == "independent"
    masked, whole = document.find("matched"), document.find("whole")
    best = {each.name: max(step.top1 for step in each.steps) for each in (masked, whole)}
    far_behind = {f"{name}-head" for name, top1 in best.items() if max(best.values()) - top1 > BEHIND}
    assert {each.name for each in document.contenders if each.role == "port"} == {
        each.name for each in contenders() if each.place
    } - far_behind
    assert masked.gradients == whole.gradients == 2 * 3 * 2
    assert len(whole.steps) == 3
    assert len(masked.steps) <= 3
    plain = document.alternative
    assert plain.gradients < 2 * masked.gradients + sum(each.forwards for each in document.contenders) / 3 + 1
    assert done.graph is not None
    for name in ("tuned-head", "old-head", "base"):
        assert document.find(name).role == "beside"
    flips = document.result.flips
    assert flips == (len(document.flipped["negative"]), len(document.flipped["positive"]))
    # The winner is the best on validation, or a simpler one that is not clearly worse.
    best = max(each.validation for each in document.contenders if each.role == "port")
    assert document.port.validation > best - 0.15


@pytest.mark.parametrize(("behind", "refitted"), [(-1.0, set()), (1.0, {"matched-head", "whole-head"})])
def test_the_head_of_trailing_steps_is_not_refitted(behind, refitted, tuned, colours, monkeypatch):
    monkeypatch.setattr(makers, "BEHIND", behind)
    document = rt.port(*tuned, make_net(1), colours, recipe=make_recipe()).document
    assert {each.name for each in document.contenders} & {"matched-head", "whole-head"} == refitted


def test_masked_steps_are_scaled_up_if_validation_agrees(tuned, colours):
    scored = {}

    class Spy(Contest):
        def enter(self, contender, role):
            super().enter(contender, role)
            if contender.name == "matched":
                entered, inputs = self.find("matched"), self.inputs
                base, best = inputs.heads.target, self.courses["matched"]["matched"].best.weights
                for factor in (1.0, *FURTHER):
                    moved = {name: torch.lerp(base[name], best[name], factor) for name in inputs.names}
                    self.scorer.load(base, moved)
                    self.scorer.reset_batchnorm()
                    scored[factor] = self.scorer.score(self.chosen_by)
                scored["entered"] = entered.made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_retarget.porting.port.Contest", Spy)
        rt.port(*tuned, make_net(1), colours, recipe=make_recipe())
    made = scored.pop("entered")
    best = max(scored, key=lambda factor: (scored[factor].top1, -scored[factor].loss))
    assert made.validation.top1 == scored[best].top1
    assert (f"factor {best:g}" in made.detail) is (best != 1)


def test_a_killed_course_continues_to_the_same_bytes(tuned, colours, tmp_path):
    class Stop(Exception):
        pass

    class Plug:
        rows = 0

        def track(self, items, doing, total=None):
            yield from items

        def say(self, line):
            pass

        def row(self, cells, line):
            self.rows += 1
            if self.rows == 2:
                raise Stop

    recipe, new = make_recipe(finetune__steps=4, finetune__batch_size=16, targets="teacher"), make_net(1)
    whole = rt.port(*tuned, new, colours, recipe=recipe, out=tmp_path / "whole")
    with pytest.raises(Stop):
        rt.port(*tuned, new, colours, recipe=recipe, out=tmp_path / "cut", progress=Plug())
    assert (tmp_path / ".cut.work" / "matched.progress.json").exists()
    again = rt.port(*tuned, new, colours, recipe=recipe, out=tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "config.json", "recipe.yaml"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    for one, other in zip(whole.document.contenders, again.document.contenders, strict=True):
        assert replace(one, steps=(), best_step=None) == replace(other, steps=(), best_step=None)
        assert one.best_step == other.best_step
        assert [each.top1 for each in one.steps] == [each.top1 for each in other.steps]


@pytest.mark.parametrize("method", ["auto", "head", "naive", "fgmt"])
def test_forward_passes_are_counted(method, tuned, colours, monkeypatch):
    measured = {}
    enter = Contest.enter

    def watch(contest, contender, role):
        enter(contest, contender, role)
        measured[contender.name] = contest.entries[-1].images

    monkeypatch.setattr(Contest, "enter", watch)
    recipe = make_recipe(method=method, targets="labels", bn_batches=0)
    document = rt.port(*tuned, make_net(1), colours, recipe=recipe).document
    said = {each.name: 16 * each.forwards for each in document.contenders}
    own = {name: images - said.get(find_contender(name).refits, 0) for name, images in said.items()}
    if method == "auto":  # what two contenders share is measured at the first; whole steps and factors may be left out
        shared = own.pop("matched") + own.pop("whole")
        assert shared / 2 < measured.pop("matched") + measured.pop("whole") <= shared
    assert measured == own


def test_fine_tuning_after_an_unmatched_port_can_be_resumed(tuned, related, colours, tmp_path):
    class Stop(Exception):
        pass

    class Plug:
        def track(self, items, doing, total=None):
            for number, item in enumerate(items):
                if doing == "fine-tuning" and number == 3:
                    raise Stop
                yield item

        def say(self, line):
            pass

        row = say

    recipe = make_recipe(finetune__steps=6, finetune__batch_size=16, finetune__checkpoint_every=1, targets="labels")
    whole = rt.port(*tuned, related, colours, recipe=recipe, out=tmp_path / "whole")
    with pytest.raises(Stop):
        rt.port(*tuned, related, colours, recipe=recipe, out=tmp_path / "cut", progress=Plug())
    assert list((tmp_path / ".cut.work").glob("*.training.safetensors"))
    again = rt.port(*tuned, related, colours, recipe=recipe, out=tmp_path / "cut", resume=True)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "cut/model.safetensors").read_bytes()
    assert whole.document.result == again.document.result


@pytest.mark.parametrize(("error", "kept"), [(1.0, True), (-1.0, False)])
def test_without_labels_a_fine_tuning_must_be_clearly_better(error, kept, tuned, flat, monkeypatch):
    monkeypatch.setattr(makers, "paired_error", lambda *_: error)
    recipe = make_recipe(finetune__steps=6, finetune__batch_size=16, method="head")
    done = rt.port(*tuned, make_net(1), flat, recipe=recipe)
    after = done.document.find("finetuned")
    assert ("left as it was" in after.detail) == kept
    assert (after.test.top1, after.validation) == (
        done.document.port.test.top1,
        done.document.port.validation,
    ) or not kept


def test_a_closed_form_head_can_be_requested(tuned, colours):
    done = rt.port(*tuned, make_net(1), colours, recipe=make_recipe(method="head"))
    document = done.document
    assert [(each.name, each.gradients) for each in document.contenders] == [("head", 0)]
    backbone = make_net(1).state_dict()
    assert all(torch.equal(done.weights[name], backbone[name]) for name in backbone if not name.startswith("7"))
    assert document.port.test.top1 > 0.5, "a third is chance"
    assert document.port.test.loss < 1.2, "its outputs are scaled"


def test_batchnorm_of_a_base_is_kept_or_re_estimated(colours):
    old, new = make_net(0, norm=True), make_net(1, norm=True)
    document = rt.port(old, shake(old, 0.3), new, colours, recipe=make_recipe(method="head")).document
    batch, chosen_by, images = 16, document.data.images["validation"], document.data.images["train"]
    assert document.port.forwards == (2 * (images + chosen_by) + 2 * batch) / batch


def test_without_a_single_linear_classifier_no_heads_are_fitted(colours):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = (
                nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                nn.Linear(4, 3),
            )

        def forward(self, images):
            return 2 * self.fc(self.body(images))

    torch.manual_seed(0)
    old = Twice()
    document = rt.port(old, shake(old, 0.2), shake(old, 0.1, seed=6), colours, recipe=make_recipe()).document
    assert document.find("naive-line") is not None
    assert document.find("naive-head") is document.find("head") is None
    assert any("does not determine the model's outputs" in note for note in document.notes)
    with pytest.raises(rt.PortError, match=r"no contender could be made.*does not determine the model's outputs"):
        rt.port(old, shake(old, 0.2), shake(old, 0.1, seed=6), colours, recipe=make_recipe(method="head", head="zero"))


# ---- dials


def test_a_given_factor_is_the_only_one_tried(tuned, related, colours):
    done = rt.port(*tuned, related, colours, recipe=make_recipe(alpha=0.5))
    line = done.document.find("naive-line")
    assert [(each.far, line.detail) for each in line.steps] == [(0.5, "factor 0.5")]


def test_part_of_an_update_can_be_taken(tuned, related, colours):
    old, model = tuned
    done = rt.port(old, model, related, colours, recipe=make_recipe(update=0.5, method="naive", steps=1, head="own"))
    for name, weight in model.named_parameters():
        half = weight + 0.5 * (related.state_dict()[name] - old.state_dict()[name])
        assert torch.allclose(done.weights[name], half, atol=1e-6), name


@pytest.mark.parametrize(
    ("values", "seed", "message"),
    [
        ({"update": 0.5}, 1, "nothing between independent bases"),
        ({"update": 0.5, "alpha": 1.0}, 0, "scale the same line"),
    ],
)
def test_meaningless_options_are_refused(values, seed, message, tuned, related, colours):
    new = related if not seed else make_net(seed)
    with pytest.raises(rt.PortError, match=message):
        rt.port(*tuned, new, colours, recipe=make_recipe(**values))


@pytest.mark.parametrize("values", [{"alpha": 0.0}, {"alpha": -1.0}, {"alpha": float("nan")}, {"update": 0.0},
                                    {"update": 1.5}, {"targets": "labls"}])  # fmt: skip
def test_invalid_values_are_refused(values):
    with pytest.raises(rt.RecipeError, match=next(iter(values))):
        make_recipe(**values)


# ---- images


def test_without_labels_the_tuned_model_provides_them(tuned, related, flat):
    recipe = make_recipe(control="full")
    document = rt.port(*tuned, related, flat, recipe=recipe).document
    assert (document.labelled, document.targets) == (False, "teacher")
    assert document.find("tuned").test.top1 == 1.0, "it agrees with itself"
    assert document.port.test.top1 > 0.8
    assert "agreement with the tuned model" in document.verdict
    assert "fitted to teacher" in document.find("head").detail
    with pytest.raises(rt.DataError, match="no labels to aim at"):
        rt.port(*tuned, related, flat, recipe=make_recipe(targets="labels"))


def test_with_a_teacher_labels_serve_only_the_test(tuned, related, colours):
    labelled = rt.port(*tuned, related, colours, recipe=make_recipe(control="naive")).document
    taught = rt.port(*tuned, related, colours, recipe=make_recipe(control="naive", targets="teacher")).document
    assert taught.labelled
    assert taught.targets == "teacher"
    assert taught.find("tuned").validation == 1.0
    assert taught.find("tuned").test == labelled.find("tuned").test


def test_functions_that_need_labels_say_so(flat, tuned, tmp_path):
    with pytest.raises(rt.DataError, match="no class folders"):
        rt.evaluate(tuned[1], flat, recipe=make_recipe())
    with pytest.raises(rt.DataError, match="no class folders"):
        rt.finetune(tuned[1], flat, recipe=make_recipe(finetune__steps=1), out=tmp_path / "out")


def test_a_model_learns_from_a_teacher_without_labels(tuned, flat, colours, tmp_path):
    recipe = make_recipe(finetune__steps=40, finetune__batch_size=16, finetune__lr=0.1)
    done = rt.finetune(make_net(3), flat, recipe=recipe, out=tmp_path / "out", teacher=tuned[1], head="zero")
    assert done.document["labelled"] is False
    assert done.test.top1 > 0.8, "agreement with the teacher"
    assert rt.evaluate(done.model, colours, recipe=recipe).score.top1 > 0.7
    with pytest.raises(rt.DataError, match="classes"):
        rt.finetune(make_net(3), colours, recipe=recipe, out=tmp_path / "other", teacher=make_net(1, classes=2))


def test_a_second_set_of_images_has_its_own_column(tuned, related, colours, tmp_path):
    noisy = tmp_path / "noisy"
    for path in sorted((colours / "test").rglob("*.png")):
        place = noisy / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            ImageOps.invert(image.convert("RGB")).save(place)
    recipe = make_recipe(control="full")
    done = rt.port(*tuned, related, colours, recipe=recipe, also_data=noisy, out=tmp_path / "ported")
    document = read_document(tmp_path / "ported" / "port.json")
    assert document == done.document
    assert document.also.name == "noisy"
    assert all(each.also.images == document.data.images["test"] for each in document.contenders)
    assert document.find("tuned").also.top1 < document.find("tuned").test.top1
    for name in ("report.html", "README.md"):
        assert "top-1, noisy" in (tmp_path / "ported" / name).read_text()
    pairs = [(Image.open(path).convert("RGB"), path.parent.name) for path in sorted(noisy.rglob("*.png"))]
    assert rt.port(*tuned, related, colours, recipe=recipe, also_data={"noisy": pairs}).document.also.name == "noisy"
    bare = [Image.open(path).convert("RGB") for path in sorted((colours / "test").rglob("*.png"))]
    told = rt.port(*tuned, related, colours, recipe=recipe, also_data={"test": bare, "train": bare}).document
    assert told.find("tuned").also.top1 == 1.0, "without labels, the tuned model agrees with itself"
    fitted = rt.port(*tuned, related, colours, recipe=make_recipe(), also_data=noisy, also_data_fit=True).document
    assert fitted.find("head").also.top1 >= document.find("head").also.top1


@pytest.mark.parametrize("targets", ["auto", "teacher"])
def test_heads_learn_the_labels_of_a_second_set_of_images(tuned, related, colours, monkeypatch, targets):
    """Not the tuned model's answers there, unless no label may be used: it shows what that model is bad at."""
    paths = sorted((colours / "train").rglob("*.png"))
    noisy = [(ImageOps.invert(Image.open(path).convert("RGB")), path.parent.name) for path in paths]
    certain = []

    def look(scorer, head, images, shares, chosen_by=None):
        certain.extend(bool((rows[1].max(1).values == 1).all()) for rows in shares.values())
        return fit_head(scorer, head, images, shares, chosen_by)

    monkeypatch.setattr("hf_retarget.porting.contest.fit_head", look)
    recipe = make_recipe(targets=targets)
    rt.port(*tuned, related, colours, recipe=recipe, also_data={"train": noisy, "test": noisy}, also_data_fit=True)
    assert certain
    assert all(certain) if targets == "auto" else not any(certain)


def test_few_validation_images_are_supplemented(tuned, related, colours):
    document = rt.port(*tuned, related, colours, recipe=make_recipe()).document
    images = document.data.images
    assert images["validation"] < FEW
    both, batch = images["train"] + images["validation"], 16
    assert document.find("head").forwards == both / batch, "no image is looked at twice"
    method = rt.port(*tuned, related, colours, recipe=make_recipe(method="head")).document
    assert method.port.forwards == both / batch, "the steps of a requested method are chosen on validation images alone"


def test_a_validation_split_can_be_named(tuned, related, colours, tmp_path):
    shutil.copytree(colours, tmp_path / "images")
    (tmp_path / "images" / "valid").mkdir()
    shutil.copytree(colours / "test", tmp_path / "images" / "valid", dirs_exist_ok=True)
    recipe = make_recipe(data__validation_split="valid")
    document = rt.port(*tuned, related, tmp_path / "images", recipe=recipe).document
    assert document.data.images["validation"] == document.data.images["test"]
    with pytest.raises(rt.DataError, match="used to train or test"):
        rt.port(*tuned, related, colours, recipe=make_recipe(data__validation_split="train"))


# ---- no images at all


@pytest.fixture
def trio(tuned, related) -> list[nn.Module]:
    """Old base, tuned model and new base, with a configured image size."""
    models = [*tuned, related]
    for model in models:
        model.pretrained_cfg = {"input_size": (3, 12, 12)}
    return models


def test_without_images_the_fine_tuning_is_added_unchanged(trio, tmp_path):
    old, model, new = trio
    done = rt.port(old, model, new, "none", recipe=None, overrides={"port.head": "own"}, out=tmp_path / "ported")
    made = load_file(done.folder / "model.safetensors")
    for name, weight in new.state_dict().items():
        assert torch.allclose(made[name], weight + model.state_dict()[name] - old.state_dict()[name], atol=1e-6)
    document = read_document(tmp_path / "ported" / "port.json")
    assert document.contenders == ()
    assert "Not scored" in document.verdict
    assert document.relation.word == "same lineage"
    assert "Not scored" in (tmp_path / "ported" / "README.md").read_text()
    assert "Not scored" in (tmp_path / "ported" / "report.html").read_text()
    with pytest.raises(rt.RetargetError, match="without images"):
        rt.compare([tmp_path / "ported"])


def test_options_that_need_images_are_refused_without_them(trio, tmp_path):
    old, model, new = trio
    with pytest.raises(rt.PortError, match=r"independent.*labels are not"):
        rt.port(old, model, make_net(1), "none", out=tmp_path / "ported")
    base = make_net(0, norm=True)
    with pytest.raises(rt.PortError, match="BatchNorm"):
        rt.port(base, shake(base, 0.1), shake(base, 0.01, seed=6), "none", out=tmp_path / "ported")
    with pytest.raises(rt.PortError, match="only a naive port"):
        rt.port(old, model, new, "none", overrides={"port.method": "fgmt"})


# ---- the command line


def test_the_default_method_is_auto_and_the_table_shows_prices():
    assert Recipe().port.method == AUTO
    assert find_contender("head").is_method
    shown = CliRunner().invoke(main, ["port", "--help-all"]).output
    for option in ("--targets", "--alpha", "--update", "--also-data", "--data-validation-split"):
        assert option in shown


def test_harmful_fine_tuning_leaves_the_port_unchanged(colours):
    """Even if the new base's own BatchNorm statistics are better than new ones, here from two images."""
    old, new = make_net(0, norm=True), make_net(1, norm=True)
    few = make_recipe(method="head", batch_size=2, bn_batches=1, finetune__batch_size=16)
    result = rt.port(
        old, shake(old, 0.1), new, colours, recipe=few.override(**{"finetune.steps": 4, "finetune.lr": 50})
    )
    head, after = (result.document.find(name) for name in ("head", "finetuned"))
    assert head.detail == "fitted to labels", "with its own statistics"
    assert (after.validation, after.test.top1) == (head.validation, head.test.top1)
    assert after.detail == "4 minibatches did not help"
    alone = rt.port(old, shake(old, 0.1), new, colours, recipe=few)
    for name, weight in alone.weights.items():
        assert torch.equal(weight, result.weights[name]), name
