"""A permutation serves another graph if it acts there as it does on its own."""

from __future__ import annotations

import pytest
import timm
import torch

import hf_retarget as rt
from hf_retarget.pipeline.reuse import act_alike, load_permutation


def graph_of(name: str = "test_resnet", classes: int = 3, **options: object) -> rt.PermutationGraph:
    return rt.trace(timm.create_model(name, num_classes=classes, **options), torch.zeros(2, 3, 32, 32))


def test_another_number_of_classes_is_alike_and_another_model_is_not(tmp_path):
    three, seven = graph_of(), graph_of(classes=7)
    assert three.fingerprint != seven.fingerprint
    assert act_alike(three, seven)
    assert not act_alike(three, graph_of("test_efficientnet"))
    assert not act_alike(graph_of("test_vit", img_size=32), graph_of("test_vit", img_size=32, num_heads=4))
    segments = "densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}
    assert act_alike(graph_of(segments[0], 3, **segments[1]), graph_of(segments[0], 7, **segments[1]))
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
