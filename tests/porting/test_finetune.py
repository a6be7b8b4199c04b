"""A fine-tuning from end to end: its start, its folder, and exact resuming."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import hf_retarget as rt
from hf_retarget.errors import DataError, ModelError, PortError, RecipeError
from hf_retarget.files import load_tensors
from hf_retarget.models import head_names, load_checkpoint
from hf_retarget.models.heads import fit_heads
from hf_retarget.porting.finetune import prepare_start
from hf_retarget.recipe import load_recipe
from hf_retarget.training import TrajectoryRecorder

GRAY = {"data__reference": "fashion-mnist", "data__limit": 80, "data__image_size": 28}


class Stop(Exception):
    pass


class Stopper:
    """A progress display that interrupts before minibatch `after` of the fine-tuning."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.lines: list[str] = []

    def track(self, items, doing, total=None):
        for number, item in enumerate(items):
            if doing == "fine-tuning" and number == self.after:
                raise Stop
            yield item

    def say(self, line: str) -> None:
        self.lines.append(line)


def model_bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def gray(gray_resnet, short, tmp_path_factory):
    out = tmp_path_factory.mktemp("gray") / "tuned"
    recipe = short(steps=8, lr=0.05, evaluate_every=4, **GRAY)
    return rt.finetune(gray_resnet, recipe=recipe, out=out, record=4)


# ---- the folder


def test_a_gray_resnet_is_tuned_and_timm_loads_it(gray):
    assert gray.history.losses[-1] < gray.history.losses[0]
    assert [step for step, _ in gray.history.scores] == [0, 4, 8]
    model = timm.create_model(f"local-dir:{gray.folder}", pretrained=True).eval()
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(images), gray.model(images))


def test_the_folder_is_complete_with_nothing_beside_it(gray):
    assert sorted(path.name for path in gray.folder.iterdir()) == [
        "README.md",
        "config.json",
        "finetune.json",
        "initial_head.safetensors",
        "model.safetensors",
        "recipe.yaml",
        "trajectory",
    ]
    assert [path.name for path in gray.folder.parent.iterdir()] == ["tuned"]
    saved = load_checkpoint(gray.folder)
    assert saved.labels[:2] == ("T-shirt/top", "Trouser")
    assert saved.config["input_size"] == (1, 28, 28)


def test_finetune_json_records_its_inputs(gray, gray_resnet):
    document = json.loads((gray.folder / "finetune.json").read_text())
    assert document == gray.document
    assert document["figures"]["test"]["top1"] == gray.test.top1
    assert len(document["figures"]["losses"]) == 8
    assert document["head"]["kind"] == "zero"
    assert document["head"]["why"] == "the model has 7 classes, the data 10"
    assert document["model"]["hashes"] == dict(load_checkpoint(gray_resnet).hashes)
    assert document["data"]["images"] == {"train": 72, "validation": 8, "test": 80}
    assert set(document["versions"]) >= {"hf-retarget", "torch", "timm"}


def test_the_saved_recipe_repeats_it_exactly(gray, gray_resnet, tmp_path):
    again = rt.finetune(gray_resnet, recipe=load_recipe(gray.folder / "recipe.yaml"), out=tmp_path / "again")
    assert model_bytes(again.folder) == model_bytes(gray.folder)


def test_the_initial_head_is_accepted_by_a_port(gray, gray_resnet):
    head, facts = load_tensors(gray.folder / "initial_head.safetensors")
    tuned, source = load_checkpoint(gray.folder), load_checkpoint(gray_resnet)
    heads = fit_heads(source.weights, tuned.weights, source.weights, head_names(tuned), "given", head=head)
    assert torch.equal(heads.source["fc.weight"], head["fc.weight"])
    start, _ = load_tensors(gray.folder / "trajectory" / "step-000000.safetensors")
    assert all(torch.equal(start[name], tensor) for name, tensor in head.items())
    assert facts == {"head": "zero"}


def test_the_trajectory_ends_at_the_tuned_weights(gray):
    paths = TrajectoryRecorder.load(gray.folder / "trajectory")
    assert [path.stem for path in paths] == ["step-000004", "step-000008"]
    last, _ = load_tensors(paths[-1])
    saved = load_checkpoint(gray.folder).weights
    assert all(torch.equal(last[name], tensor) for name, tensor in saved.items())


def test_evaluating_the_folder_gives_the_recorded_figures(gray):
    recipe = load_recipe(gray.folder / "recipe.yaml")
    assert rt.evaluate(gray.folder, recipe=recipe).score == gray.test
    assert rt.evaluate(gray.folder, recipe=recipe, split="validation").score.top1 == gray.validation
    assert rt.evaluate(gray.folder, recipe=recipe).name(9) == "Ankle boot"


def test_a_tuned_folder_is_trained_further_with_its_head(gray, short, tmp_path):
    more = rt.finetune(gray.folder, recipe=short(steps=1, **GRAY), out=tmp_path / "more")
    head, _ = load_tensors(more.folder / "initial_head.safetensors")
    assert more.head == "keep"
    assert torch.equal(head["fc.weight"], load_checkpoint(gray.folder).weights["fc.weight"])


# ---- other models, other data


def test_a_vision_transformer_on_a_colour_folder(vit, colours, short, tmp_path):
    result = rt.finetune(vit, colours, recipe=short(steps=8, optimizer="adamw", lr=1e-3), out=tmp_path / "tuned")
    assert result.head == "keep", "three classes each, and the model has no names for them"
    assert result.test.top1 > 0.5
    assert load_checkpoint(result.folder).labels == ("blue", "green", "red")
    assert load_recipe(result.folder / "recipe.yaml").data.reference == colours.name


@pytest.mark.parametrize("channels", [1, 3])
def test_a_plain_module_needs_no_configuration(channels, pico, colours, short, tmp_path):
    model = pico(channels, classes=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = rt.finetune(
        model, colours, recipe=short(steps=12, lr=0.3, data__image_size=12), out=tmp_path / "tuned", head="zero"
    )
    assert result.test.top1 > (0.9 if channels == 3 else 0.2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), (
        "it was given, not lent"
    )
    config = json.loads((result.folder / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [channels, 12, 12]
    head, _ = load_tensors(result.folder / "initial_head.safetensors")
    assert {name: (tuple(tensor.shape), bool(tensor.any())) for name, tensor in head.items()} == {
        "5.weight": ((3, 8), False),
        "5.bias": ((3,), False),
    }


def test_workers_do_not_change_the_result(pico, colours, short, tmp_path):
    recipe = short(data__image_size=12, augment=True)
    folders = [
        rt.finetune(pico(), colours, recipe=recipe, out=tmp_path / str(workers), workers=workers).folder
        for workers in (0, 1)
    ]
    assert model_bytes(folders[0]) == model_bytes(folders[1])


# ---- heads


def start_of(reference, colours, short, head="auto", seed=0):
    return prepare_start(load_checkpoint(reference), colours, short(data__image_size=160, seed=seed), head)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (None, "keep"),
        (("blue", "green", "red"), "keep"),
        (("Red", "blue", "GREEN"), "keep"),
        (("red", "green", "violet"), "zero"),
    ],
)
def test_the_head_is_kept_if_its_classes_match_the_data(labels, kind, labelled, colours, short, tmp_path):
    folder = labelled(tmp_path / "model", "test_vit", labels, num_classes=3)
    start = start_of(folder, colours, short)
    assert start.head == kind
    own = load_checkpoint(folder).weights["head.weight"]
    assert torch.equal(start.initial_head["head.weight"], own) is (kind == "keep")
    # A head that is kept must find its own numbers: picture 0 of the test folder is blue.
    names = labels if labels and kind == "keep" else ("blue", "green", "red")
    assert start.labels == names
    assert names[int(start.data.test.targets[0])].casefold() == "blue"


@pytest.mark.parametrize("given", ["folder", "module"])
def test_a_new_head_depends_only_on_the_seed(given, vit, pico, colours, short):
    reference = vit if given == "folder" else pico()
    heads = [start_of(reference, colours, short, "fresh", seed).initial_head for seed in (0, 0, 1)]
    name = next(name for name in heads[0] if name.endswith("weight"))
    own = load_checkpoint(reference).weights[name]
    assert torch.equal(heads[0][name], heads[1][name])
    assert not torch.equal(heads[0][name], heads[2][name])
    assert not torch.equal(heads[0][name], own)


def test_a_new_head_does_not_change_the_rest_of_the_model(vit, colours, short):
    start, weights = start_of(vit, colours, short, "zero"), load_checkpoint(vit).weights
    assert not any(bool(tensor.any()) for tensor in start.initial_head.values())
    for name, tensor in start.model.state_dict().items():
        assert name in start.initial_head or torch.equal(tensor, weights[name])


def test_a_head_that_cannot_be_kept_is_an_error(gray_resnet, colours, vit, short, tmp_path):
    with pytest.raises(ModelError, match="7 classes, the data 3"):
        start_of(gray_resnet, colours, short, "keep")
    with pytest.raises(ModelError, match="did you mean 'fresh'"):
        rt.finetune(vit, colours, recipe=short(), out=tmp_path / "tuned", head="frehs")


# ---- stopping and going on


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_an_interrupted_run_resumes_to_the_same_bytes(after, pico, colours, short, tmp_path):
    recipe = short(data__image_size=12, checkpoint_every=2, evaluate_every=2)
    options = {"recipe": recipe, "record": 2, "head": "fresh"}
    whole = rt.finetune(pico(), colours, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        rt.finetune(pico(), colours, out=tmp_path / "tuned", progress=Stopper(after), **options)
    assert not (tmp_path / "tuned").exists()
    watching = Stopper(99)
    resumed = rt.finetune(pico(), colours, out=tmp_path / "tuned", resume=True, progress=watching, **options)
    assert any("continuing" in line for line in watching.lines) is (after >= 2)
    assert resumed.history.losses == whole.history.losses
    assert resumed.history.scores == whole.history.scores
    for path in sorted(whole.folder.rglob("*.safetensors")):
        assert (resumed.folder / path.relative_to(whole.folder)).read_bytes() == path.read_bytes(), path.name
    assert not hidden(tmp_path)


def test_a_failed_save_is_resumed_without_retraining(pico, colours, short, tmp_path, monkeypatch):
    options = {"recipe": short(data__image_size=12), "out": tmp_path / "tuned"}

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["hf_retarget.porting.finetune"], "save_tensors", fail)
        with pytest.raises(PortError, match="No space left"):
            rt.finetune(pico(), colours, **options)
    assert not (tmp_path / "tuned").exists()
    result = rt.finetune(pico(), colours, resume=True, progress=Stopper(0), **options)
    assert len(result.history.losses) == 6
    assert not hidden(tmp_path)


def test_unfinished_runs_are_kept_and_told_apart(pico, colours, short, tmp_path):
    recipe, out = short(data__image_size=12, checkpoint_every=1), tmp_path / "tuned"
    with pytest.raises(Stop):
        rt.finetune(pico(), colours, recipe=recipe, out=out, progress=Stopper(3))
    with pytest.raises(PortError, match=r"unfinished run .* --resume"):
        rt.finetune(pico(), colours, recipe=recipe, out=out)
    with pytest.raises(PortError, match=r"had lr 0\.01 and has 0\.5 now"):
        rt.finetune(pico(), colours, recipe=recipe.override(**{"finetune.lr": 0.5}), out=out, resume=True)
    with pytest.raises(PortError, match="'data' was"):
        rt.finetune(pico(), colours, recipe=recipe.override(**{"data.seed": 1}), out=out, resume=True)
    other = pico()
    nn.init.ones_(other[0].weight)
    with pytest.raises(PortError, match="'model'"):
        rt.finetune(other, colours, recipe=recipe, out=out, resume=True)
    watching = Stopper(99)
    rt.finetune(pico(), colours, recipe=recipe, out=out, overwrite=True, progress=watching)
    assert not any("continuing" in line for line in watching.lines)


# ---- where it may write


def test_a_non_empty_folder_is_replaced_only_on_request(pico, colours, short, tmp_path):
    out = tmp_path / "tuned"
    first = rt.finetune(pico(), colours, recipe=short(steps=1, data__image_size=12), out=out)
    before = model_bytes(first.folder)
    (out / "mine.txt").touch()
    with pytest.raises(PortError, match=r"not empty.*--overwrite"):
        rt.finetune(pico(), colours, recipe=short(steps=2, data__image_size=12), out=out)
    assert model_bytes(out) == before
    rt.finetune(pico(), colours, recipe=short(steps=2, data__image_size=12), out=out, overwrite=True)
    assert model_bytes(out) != before
    assert not (out / "mine.txt").exists()
    assert not hidden(tmp_path)


def test_folders_without_a_model_are_never_replaced(pico, colours, short, tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "photos")
    for out, message in (("../photos", "the current folder"), (tmp_path, "above"), ("../file", "is a file")):
        with pytest.raises(PortError, match=message):
            rt.finetune(pico(), colours, recipe=short(), out=out, overwrite=True)
    monkeypatch.chdir("/")
    for overwrite in (True, False):
        with pytest.raises(PortError, match="holds no model") as refused:
            rt.finetune(pico(), colours, recipe=short(), out=tmp_path / "photos", overwrite=overwrite)
        assert "--overwrite" not in str(refused.value), "it would not help"
    with pytest.raises(PortError, match="cannot work in"):
        rt.finetune(pico(), colours, recipe=short(data__image_size=12), out=tmp_path / "file" / "tuned")
    assert (tmp_path / "photos" / "one.jpg").exists()


# ---- bad input


def test_a_fine_tuning_without_length_is_an_error(pico, colours, short, tmp_path):
    with pytest.raises(RecipeError, match="--steps or --epochs"):
        rt.finetune(pico(), colours, recipe=short(steps=0), out=tmp_path / "tuned")


def test_unsupported_image_sizes_are_refused(vit, colours, short, tmp_path):
    with pytest.raises(ModelError, match="takes images of 160×160 only, not of 32×32"):
        rt.finetune(vit, colours, recipe=short(data__image_size=32), out=tmp_path / "tuned")
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 3))
    with pytest.raises(ModelError, match=r"cannot take images of 3×224×224: .*--data-image-size"):
        rt.finetune(linear, colours, recipe=short(data__image_size=224), out=tmp_path / "tuned")
    with pytest.raises(ModelError, match=r"output for one image is \[1, 3, 8, 8\]"):
        rt.finetune(
            nn.Sequential(nn.Conv2d(3, 3, 1)), colours, recipe=short(data__image_size=8), out=tmp_path / "tuned"
        )
    assert list(tmp_path.iterdir()) == []


def test_unsaveable_models_fail_before_training(pico, colours, short, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ModelError("too large for torch.float16")

    monkeypatch.setattr(sys.modules["hf_retarget.porting.finetune"], "save_model", fail)
    with pytest.raises(ModelError, match="too large"):
        rt.finetune(pico(), colours, recipe=short(data__image_size=12), out=tmp_path / "tuned", progress=Stopper(0))
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_loss_leaves_no_folder(pico, colours, short, tmp_path):
    with pytest.raises(PortError, match="lower lr"):
        rt.finetune(pico(), colours, recipe=short(steps=30, lr=1e30, data__image_size=12), out=tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_scoring_on_the_wrong_data_is_an_error(gray_resnet, vit, colours, short):
    with pytest.raises(DataError, match=r"has 10 classes, but .* has 7"):
        rt.evaluate(gray_resnet, recipe=short(**GRAY))
    with pytest.raises(DataError, match="there is no split 'tset'"):
        rt.evaluate(vit, colours, recipe=short(), split="tset")
    with pytest.raises(DataError, match="no images to evaluate on"):
        rt.evaluate(vit, colours, recipe=short(data__validation=0), split="validation")


def test_without_validation_images_there_is_only_a_test_score(pico, colours, short, tmp_path):
    recipe = short(steps=1, data__image_size=12, data__validation=0.0)
    result = rt.finetune(pico(), colours, recipe=recipe, out=tmp_path / "tuned")
    assert result.validation is None
    assert result.history.scores == ()
    assert result.test.count == 24


def test_broken_images_are_named_in_the_result(pico, short, colours, tmp_path):
    folder = shutil.copytree(colours, tmp_path / "colours")
    (folder / "test" / "red" / "0.png").write_bytes(b"no picture")
    watching = Stopper(99)
    recipe = short(steps=1, data__image_size=12)
    result = rt.finetune(pico(), folder, recipe=recipe, out=tmp_path / "tuned", progress=watching)
    assert result.test.count == 23
    assert any("1 image of" in line and "0.png" in line for line in watching.lines)
    assert any("0.png" in note for note in result.document["data"]["notes"])
