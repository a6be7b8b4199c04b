"""A permutation can be reused for another graph on which it acts in the same way."""

from __future__ import annotations

import pytest
import timm
import torch

import hf_retarget as rt
from hf_retarget.graph import load_permutation


def graph_of(name: str = "test_resnet", classes: int = 3, **options: object) -> rt.PermutationGraph:
    return rt.trace(timm.create_model(name, num_classes=classes, **options), torch.zeros(2, 3, 32, 32))


def test_permutations_fit_other_numbers_of_classes_but_not_other_models(tmp_path):
    three, seven = graph_of(), graph_of(classes=7)
    assert three.fingerprint != seven.fingerprint
    vit, dense = {"img_size": 32}, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}
    pairs = [
        (three, seven, True),
        (graph_of("densenet121", **dense), graph_of("densenet121", 7, **dense), True),
        (three, graph_of("test_efficientnet"), False),
        (graph_of("test_vit", **vit), graph_of("test_vit", num_heads=4, **vit), False),
    ]
    for number, (one, other, alike) in enumerate(pairs):
        (folder := tmp_path / str(number)).mkdir()
        one.random(seed=0).save(folder / "permutation.safetensors")
        one.save(folder / "graph.json")
        assert (load_permutation(folder, other).fingerprint == other.fingerprint) is alike
    with pytest.raises(rt.PermutationError, match=r"has no permutation; give a port that matched"):
        load_permutation(tmp_path, seven)
    found = three.random(seed=0)
    found.save(tmp_path / "permutation.safetensors")
    alone = load_permutation(tmp_path / "permutation.safetensors", seven)
    with pytest.raises(rt.GraphMismatchError):
        seven.apply(alone, {})
    three.save(tmp_path / "graph.json")
    adopted = load_permutation(tmp_path, seven)
    assert load_permutation(tmp_path / "permutation.safetensors", seven) == adopted
    model = timm.create_model("test_resnet", num_classes=7).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        model.load_state_dict(seven.apply(adopted, model.state_dict()))
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    other = graph_of("test_efficientnet")
    with pytest.raises(rt.GraphMismatchError):
        other.apply(load_permutation(tmp_path / "permutation.safetensors", other), {})


def test_a_plane_accepts_the_permutations_of_ports(tmp_path):
    import timm

    from hf_retarget.models import load_checkpoint, save_model

    def make(name: str, seed: int, classes: int):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=classes, in_chans=1)
        return save_model(tmp_path / name, net.state_dict(), load_checkpoint(net))

    short = {"data.limit": 60, "data.image_size": 28, "port.steps": 1, "port.grad_batches": 1, "port.batch_size": 8}
    recipe = rt.load_recipe("fashion-mnist").override(
        **short, **{"port.control": "none", "port.bn_batches": 1, "port.method": "fgmt"}
    )
    trio = [make("old", 0, 10), make("tuned", 1, 10), make("new", 2, 10)]
    rt.port(*trio, recipe=recipe, out=tmp_path / "ported")
    four = recipe.override(**{"data.classes": ("Coat", "Shirt", "Bag", "Dress")})
    pair = {"new": make("new4", 3, 4), "tuned": make("tuned4", 4, 4)}
    line = rt.plane(pair, recipe=four, grid=2, limit=10, permute={"tuned": tmp_path / "ported"})
    assert line.figures["models"][1]["permuted"]["by"] == "ported"
