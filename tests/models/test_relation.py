"""How bases are related, according to all weights and to samples of a few megabytes."""

from __future__ import annotations

import timm
import torch
from safetensors.torch import save_file

from hf_retarget.models import load_checkpoint, peek_checkpoint, save_model
from hf_retarget.models.relation import (
    DRIFTED,
    INDEPENDENT,
    LINEAGE,
    SAMPLE_BYTES,
    compare_samples,
    list_backbone,
    measure_relation,
    sample_weights,
)


def weights(seed: int, by: float = 0.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = {name: torch.randn(40, 30) for name in "abc"}
    noise = torch.Generator().manual_seed(seed)
    return {name: tensor + by * torch.randn(tensor.shape, generator=noise) for name, tensor in base.items()}


def test_the_word_depends_on_cosine_and_distance():
    old, tuned = weights(1), weights(2, by=0.1)
    near = measure_relation(old, tuned, weights(3, by=0.05), "abc")
    assert (near.word, round(near.drift, 1)) == (LINEAGE, 0.5)
    far = measure_relation(old, tuned, weights(3, by=0.15), "abc")
    assert (far.word, round(far.drift, 1)) == (DRIFTED, 1.5)
    torch.manual_seed(9)
    apart = measure_relation(old, tuned, {name: torch.randn(40, 30) for name in "abc"}, "abc")
    assert apart.word == INDEPENDENT
    assert abs(apart.cosine) < 0.1
    assert set(apart.tensors) == set("abc")
    same = measure_relation(old, old, tuned, "abc")
    assert same.drift is None
    assert "times as far" not in same.sentence


def test_norm_scales_alone_do_not_indicate_a_lineage():
    torch.manual_seed(0)
    old, new = (timm.create_model("test_vit", num_classes=5, img_size=32) for _ in range(2))
    weights, other = old.state_dict(), new.state_dict()
    names = list_backbone(old, ["head.weight", "head.bias"])
    assert all(weights[name].ndim > 1 for name in names)
    assert measure_relation(weights, weights, other, names).word == INDEPENDENT
    everything = [name for name, _ in old.named_parameters()]
    assert measure_relation(weights, weights, other, everything).word != INDEPENDENT, "what would happen with them"


def test_samples_are_small_and_alike_for_an_architecture(tmp_path):
    paths = []
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = timm.create_model("test_resnet", num_classes=10 + seed)
        save_model(tmp_path / name, model.state_dict(), load_checkpoint(model))
        paths.append(tmp_path / name / "model.safetensors")
    old, new = (sample_weights([path], None) for path in paths)
    assert list(old) == list(new)
    assert 4 <= len(old) <= 8
    assert sum(each.numel() * 4 for each in old.values()) <= SAMPLE_BYTES
    whole = load_checkpoint(tmp_path / "old").weights
    for name, part in old.items():
        assert torch.equal(part, whole[name].flatten()[: len(part)])
    peeked = [peek_checkpoint(tmp_path / name) for name in ("old", "old", "new")]
    assert compare_samples([each.sample for each in peeked], ["fc.weight"]).word == INDEPENDENT


def test_large_tensors_are_read_in_part(tmp_path):
    save_file({"w": torch.arange(3_000_000.0).view(1000, 3000)}, tmp_path / "model.safetensors")
    (part,) = sample_weights([tmp_path / "model.safetensors"], None).values()
    assert part.tolist()[:3] == [0.0, 1.0, 2.0]
    assert len(part) * 4 * 8 == SAMPLE_BYTES
