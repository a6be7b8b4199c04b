"""One price: check, the dry run, the control and port.json agree, for every method and for epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

import hf_retarget as rt
from hf_retarget.contenders import Asked, contenders, method_names
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting import makers
from hf_retarget.porting.check import plan
from hf_retarget.porting.cost import ImageCounts, price_port

SHORT = {
    "data.limit": 60,
    "data.image_size": 28,
    "data.validation": 0.2,
    "port.steps": 2,
    "port.grad_batches": 2,
    "port.batch_size": 8,
    "port.bn_batches": 1,
    "port.verify": False,
}
LENGTHS = {
    "none": {},
    "steps": {"finetune.steps": 3, "finetune.batch_size": 12},
    "epochs": {"finetune.epochs": 0.5, "finetune.batch_size": 12},
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> list[Path]:
    """Old base, tuned model, new base, and the real fine-tuning of the new base."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for seed, name in enumerate(("old", "tuned", "new", "retuned")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        made.append(save_model(folder / name, net.state_dict(), load_checkpoint(net)))
    return made


def recipe_of(method: str, length: str, control: str = "full") -> rt.Recipe:
    changes = {**SHORT, **LENGTHS[length], "port.method": method, "port.control": control}
    return rt.load_recipe("fashion-mnist").override(**changes)


@pytest.mark.parametrize(
    ("method", "length"),
    [*((method, "epochs") for method in method_names()), ("fgmt-sign", "none"), ("fgmt-sign", "steps")],
)
def test_check_dry_run_and_recipe_agree(sides, method, length):
    recipe = recipe_of(method, length)
    planned = plan(*sides[:3], recipe=recipe, tuned_target=sides[3])
    checked = rt.check(*sides[:3], recipe=recipe).cost
    asked = Asked(method, has_tuned_target=True, trains_after=length != "none")
    price = price_port(recipe, ImageCounts(**planned.images, has_batchnorm=True), asked=asked)
    assert (planned.gradients, planned.forwards) == (price.gradients, price.forwards)
    assert planned.control_steps == price.alternative
    assert (checked.gradients, checked.control) == (price.gradients, price.alternative)
    assert price.after == {"none": 0, "steps": 5, "epochs": 3}[length]


def test_related_bases_are_priced_without_matching(sides):
    tuned = load_checkpoint(sides[1])
    near = []
    for factor in (1.01, 1.009):
        moved = {name: each * factor if each.is_floating_point() else each for name, each in tuned.weights.items()}
        near.append(save_model(sides[0].parent / f"near-{factor}", moved, tuned))
    related, recipe = (near[0], sides[1], near[1]), recipe_of("auto", "none")
    for found in (rt.check(*related, recipe=recipe).cost, plan(*related, recipe=recipe)):
        assert found.seconds_unmatched < 0.7 * found.seconds
    for method, bases in (("fgmt", related), ("auto", sides[:3])):
        assert rt.check(*bases, recipe=recipe_of(method, "none")).cost.seconds_unmatched is None


@pytest.mark.parametrize("method", ["fgmt-sign", "naive", "naive-sign", "head", "auto"])
def test_the_port_costs_what_was_planned(sides, method, monkeypatch):
    monkeypatch.setattr(makers, "BEHIND", 1.0)  # no head is left out
    recipe = recipe_of(method, "epochs")
    planned = plan(*sides[:3], recipe=recipe)
    done = rt.port(*sides[:3], recipe=recipe).document
    price = price_port(recipe, ImageCounts(**planned.images, has_batchnorm=True))
    ports = [each for each in done.contenders if each.role == "port"]
    assert max(each.gradients for each in ports) == planned.gradients
    # Refitted entries and steps shared by two contenders are counted once.
    own = {each.name: each.forwards for each in ports}
    alone = [own[each.name] - own.get(each.row.refits, 0) for each in ports]
    if method == "auto":
        assert {each.name for each in ports} == {each.name for each in contenders() if each.place}
        assert sum(alone) <= planned.forwards == price.forwards
        answered = (done.alternative.gradients - price.after - planned.gradients) * 3 - price.forwards
        assert 0 <= answered <= 3 + 60 * 2 / recipe.port.batch_size, "the tuned model's answers, in minibatches"
    else:
        assert alone == [planned.forwards]
        assert done.alternative.gradients == planned.control_steps
    beside = [each for each in done.contenders if each.role == "beside" and not each.row.is_alternative]
    assert price.beside >= sum(each.gradients for each in beside)


def test_epochs_of_a_recipe_count_in_check(sides):
    # cub@paper fine-tunes for epochs: the control must see as many images, even before they are downloaded.
    whole = rt.check(*sides[:3], recipe=recipe_of("fgmt", "epochs")).cost
    none = rt.check(*sides[:3], recipe=recipe_of("fgmt", "none")).cost
    assert whole.control > none.control
    assert None not in (whole.seconds, none.seconds)
