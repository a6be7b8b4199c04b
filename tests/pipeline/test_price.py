"""One price: what check, a dry run, the control and port.json say is the same, for every method and in epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

import hf_retarget as rt
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.pipeline.plan import plan
from hf_retarget.pipeline.price import price_port
from hf_retarget.recipe.options import METHODS

SHORT = {
    "data.limit": 60,
    "data.image_size": 28,
    "data.validation": 0.2,
    "port.steps": 2,
    "port.grad_batches": 2,
    "port.batch_size": 8,
    "port.bn_batches": 1,
    "port.check": False,
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
    ("method", "length"), [*((method, "epochs") for method in METHODS), ("fgmt-sign", "none"), ("fgmt-sign", "steps")]
)
def test_check_and_dry_run_and_recipe_agree(sides, method, length):
    recipe = recipe_of(method, length)
    planned = plan(*sides[:3], recipe=recipe, tuned_target=sides[3])
    checked = rt.check(*sides[:3], recipe=recipe).cost
    price = price_port(recipe, planned.images["train"], oracle=True)
    assert (planned.gradients, planned.control_steps) == (price.gradients, price.control)
    assert (checked.gradients, checked.control) == (price.gradients, price.control)
    assert price.after == {"none": 0, "steps": 5, "epochs": 3}[length]


@pytest.mark.parametrize(("method", "courses"), [("fgmt-sign", 3), ("naive", 1), ("naive-sign", 2)])
def test_the_port_takes_what_was_planned(sides, method, courses):
    recipe = recipe_of(method, "epochs")
    planned = plan(*sides[:3], recipe=recipe)
    done = rt.port(*sides[:3], recipe=recipe).figures
    assert done["gradients"] == {"port": planned.gradients, "control": planned.control_steps}
    assert price_port(recipe, planned.images["train"]).courses == courses
    assert len([name for name in ("naive", "masked") if name in done["test"]]) == (2 if "sign" in method else 1)


def test_epochs_of_a_recipe_count_in_check(sides):
    # cub@paper fine-tunes for epochs: the control has to see as many images, also before they are downloaded.
    whole = rt.check(*sides[:3], recipe=recipe_of("fgmt", "epochs")).cost
    none = rt.check(*sides[:3], recipe=recipe_of("fgmt", "none")).cost
    assert whole.control > none.control
    assert whole.seconds > none.seconds
