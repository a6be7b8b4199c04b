"""Which blocks of a stack are shown as repetitions of one."""

from __future__ import annotations

import pytest

from hf_retarget.inspection.picture import blocks_of
from hf_retarget.inspection.roles import home, repeated_blocks


def test_equal_blocks_form_one_repeat_with_their_groups(vit):
    (repeat,) = repeated_blocks(vit)
    assert str(repeat) == "blocks.0 … blocks.3"
    assert [len(names) for names in repeat.groups] == [4, 4, 4, 4]
    assert all(name.startswith("blocks.0.") for name in repeat.groups[0])
    assert "blocks.0.fc1" not in repeat.hidden
    assert "blocks.3.fc1" in repeat.hidden


def test_short_repeats_are_not_folded(gated):
    assert repeated_blocks(gated) == ()
    assert len(repeated_blocks(gated, shortest=2)) == 1


@pytest.mark.parametrize(
    ("tensors", "module"),
    [
        (["a.b.weight"], "a.b."),
        (["a.b.weight", "a.c.weight"], "a."),
        (["a.b.weight", "a.b.c.weight"], "a.b."),
        (["a.b1.weight", "a.b10.weight"], "a."),
        (["weight", "a.weight"], ""),
    ],
)
def test_a_groups_home_is_the_innermost_common_module(tensors, module):
    assert home(tensors) == module


@pytest.mark.parametrize(
    ("paths", "blocks"),
    [
        (["blocks.0.qkv", "blocks.0.proj"], ["blocks.0.", "blocks.0."]),
        (["layers.1.blocks.2.mlp.fc1", "layers.1.blocks.2.mlp.fc2"], ["layers.1.blocks.2."] * 2),
        (["s1.b2.conv1.conv", "s1.b2.conv2.conv"], ["s1.b2.", "s1.b2."]),
        (["conv1", "layer1.0", "layer1.1"], ["", "layer1.", "layer1."]),
    ],
)
def test_the_block_is_the_innermost_indexed_module_with_two_weights(paths, blocks):
    assert blocks_of(paths, set(paths)) == blocks
