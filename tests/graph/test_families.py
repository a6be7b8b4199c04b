"""A small model of each of many timm families: its known number of groups, and their verification.

Counts are those of the hand-written specifications where there are any (ResNet-18: 12, as in Git Re-Basin), and
otherwise of an earlier, independent derivation. Comments explain what is not obvious.
"""

from __future__ import annotations

import pytest
import torch

import hf_retarget as rt
from hf_retarget.models import empty_model, random_model

# model, options, side of the image (None: the model's own), groups, how many of them vary over blocks
FAMILIES = [
    ("test_byobnet", {}, None, 14, 0),
    ("test_convnext", {}, None, 13, 0),
    ("test_efficientnet", {}, None, 13, 0),
    ("test_mambaout", {}, None, 18, 0),
    ("test_nfnet", {}, None, 28, 9),
    ("test_resnet", {}, None, 11, 0),
    ("test_vit", {}, None, 25, 12),
    ("cs3darknet_s", {}, 64, 27, 0),
    ("deit_tiny_patch16_224", {"img_size": 64}, None, 49, 24),  # a stream, and four in each of twelve blocks
    ("dla46x_c", {}, 64, 48, 24),
    ("edgenext_xx_small", {}, 64, 28, 6),
    ("fasternet_t0", {}, 64, 35, 0),  # 13 blocks of two, 4 streams of two parts (a quarter is convolved), a head
    ("ghostnet_050", {}, 64, 31, 0),
    ("gmlp_ti16_224", {"img_size": 64}, 64, 31, 0),
    ("legacy_seresnet18", {}, 64, 20, 0),  # as ResNet-18, and 8 squeezed axes
    ("levit_128s", {}, None, 50, 22),
    ("mobilenetv3_small_050", {}, 64, 26, 0),
    ("mobilevit_xxs", {}, 64, 61, 18),
    (
        "pit_ti_224",
        {"img_size": 64},
        None,
        51,
        25,
    ),  # 24 inside the 12 attentions, 1 where a pooling doubles the channels
    ("pvt_v2_b0", {}, 64, 40, 12),
    ("regnetx_002", {}, 64, 44, 26),
    ("resnet18", {}, 64, 12, 0),
    ("resnetv2_18", {}, 64, 12, 0),
    ("skresnet18", {}, 64, 24, 0),  # as ResNet-18, but 4 streams are split in halves, and 8 squeezed axes
    ("starnet_s050", {}, 64, 11, 0),  # a stem, 4 streams, 6 blocks
    ("xcit_nano_12_p8_224", {}, 64, 59, 28),
]


@pytest.mark.parametrize(("name", "options", "side", "groups", "per_block"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_family(name, options, side, groups, per_block):
    example = None if side is None else torch.zeros(2, 3, side, side)
    graph = rt.trace(empty_model(name, **options), example)
    assert [str(unknown) for unknown in graph.unknown_operators] == []
    assert (len(graph), sum(bool(group.blocks) for group in graph)) == (groups, per_block)
    result = rt.verify(random_model(name, **options), graph, example, draws=1, controls=2)
    assert result.error <= 1e-8, result.verdict
    assert result.passed, result.verdict


@pytest.mark.parametrize(("name", "groups"), [("resnet50", 37), ("vgg11", 10)])
def test_large_models_have_the_known_number_of_groups(name, groups):
    assert len(rt.trace(empty_model(name), torch.zeros(2, 3, 64, 64))) == groups
