"""Heads of one size for both bases, by every policy."""

from __future__ import annotations

import pytest
import torch

from hf_retarget.errors import ModelError
from hf_retarget.models.heads import fit_heads

NAMES = ("fc.weight", "fc.bias")


def weights(classes: int | None, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    body = {"stem.weight": torch.randn(4, 2, generator=generator)}
    head = {} if classes is None else head_of(classes, seed + 100)
    return {**body, **head}


def head_of(classes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(classes, 4, generator=generator),
        "fc.bias": torch.randn(classes, generator=generator),
    }


def moved(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base after a little training, head included."""
    return {name: tensor + 0.1 * torch.ones_like(tensor) for name, tensor in base.items()}


@pytest.mark.parametrize("classes", [5, 3, None])
def test_zero_gives_both_a_head_of_the_tuned_size(classes):
    source, tuned, target = weights(classes, 1), weights(3, 2), weights(classes, 3)
    heads = fit_heads(source, tuned, target, NAMES, "zero")
    for found, base in ((heads.source, source), (heads.target, target)):
        assert list(found) == list(tuned)
        assert torch.equal(found["stem.weight"], base["stem.weight"])
        assert all(found[name].shape == tuned[name].shape and not found[name].any() for name in NAMES)
    assert (heads.policy, heads.why) == ("zero", "as requested")
    if classes:
        assert source["fc.weight"].shape[0] == classes, "the input must stay as it is"


@pytest.mark.parametrize("policy", ["shared", "given"])
def test_one_head_for_both(policy):
    head = head_of(3, 9)
    heads = fit_heads(weights(5, 1), weights(3, 2), weights(7, 3), NAMES, policy, head=head)
    assert heads.policy == policy
    for name in NAMES:
        assert torch.equal(heads.source[name], head[name])
        assert torch.equal(heads.target[name], head[name])
        assert heads.source[name].data_ptr() != heads.target[name].data_ptr()


def test_own_keeps_both():
    source, target = weights(3, 1), weights(3, 2)
    heads = fit_heads(source, moved(source), target, NAMES, "own")
    assert torch.equal(heads.source["fc.weight"], source["fc.weight"])
    assert torch.equal(heads.target["fc.weight"], target["fc.weight"])


@pytest.mark.parametrize(
    ("source", "tuned", "target", "agree", "policy", "why"),
    [
        (weights(3, 1), moved(weights(3, 1)), weights(3, 2), None, "own", "close to the old base's"),
        (weights(3, 1), moved(weights(3, 1)), weights(3, 2), True, "own", "close to the old base's"),
        (weights(3, 1), moved(weights(3, 1)), weights(3, 2), False, "zero", "labels differ"),
        (weights(3, 1), weights(3, 5), weights(3, 2), None, "zero", "not the old base's"),
        (weights(5, 1), weights(3, 1), weights(5, 2), None, "zero", "[5, 4] in the old base and [3, 4]"),
        (weights(3, 1), moved(weights(3, 1)), weights(5, 2), None, "zero", "[5, 4] in the new base"),
        (weights(3, 1), moved(weights(3, 1)), weights(None, 2), None, "zero", "the new base has no 'fc.weight'"),
        (weights(3, 1), {**weights(3, 1), "fc.weight": torch.zeros(3, 4)}, weights(3, 2), None, "zero", "0.00"),
    ],
)
def test_auto(source, tuned, target, agree, policy, why):
    heads = fit_heads(source, tuned, target, NAMES, labels_agree=agree)
    assert heads.policy == policy
    assert why in heads.why


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("shared", {}, "no random head"),
        ("given", {}, "no head was given"),
        ("given", {"head": {"fc.weight": torch.zeros(3, 4)}}, r"given.* 1 tensor is missing \(fc\.bias \[3\]\)"),
        ("given", {"head": head_of(4, 0)}, r"first: fc\.weight is \[4, 4\], not \[3, 4\]"),
        (
            "given",
            {"head": {**head_of(3, 0), "stem.weight": torch.zeros(4, 2)}},
            r"unexpected \(stem\.weight",
        ),
        ("own", {}, r"needs heads of one size, but 'fc\.weight' is \[5, 4\] in the old base"),
    ],
)
def test_wrong_use(policy, options, message):
    with pytest.raises(ModelError, match=message):
        fit_heads(weights(5, 1), weights(3, 2), weights(5, 3), NAMES, policy, **options)
