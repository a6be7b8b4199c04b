"""Minibatches that are wanted again."""

from __future__ import annotations

import torch

from hf_retarget.pipeline.drawn import Drawn


def make_draw():
    asked = []

    def draw():
        asked.append(len(asked))
        for _ in range(2):
            yield torch.zeros(4, 3, 8, 8), torch.zeros(4)

    return draw, asked


def test_what_is_small_is_drawn_once_for_each_use():
    draw, asked = make_draw()
    drawn = Drawn((3, 8, 8))
    assert [len(list(drawn.get("step 1", 8, draw))) for _ in range(3)] == [2, 2, 2]
    assert asked == [0]
    drawn.get("step 2", 8, draw)
    assert asked == [0, 1]
    drawn.forget(but="step 2")
    drawn.get("step 2", 8, draw)
    drawn.get("step 1", 8, draw)
    assert asked == [0, 1, 2]


def test_what_is_large_is_never_held_as_a_whole():
    draw, asked = make_draw()
    drawn = Drawn((3, 8, 8), room=Drawn((3, 8, 8)).size(8) - 1)
    for _ in range(3):
        batches = drawn.get("step 1", 8, draw)
        assert not isinstance(batches, list)
        assert len(list(batches)) == 2
    assert asked == [0, 1, 2]
