"""Small handmade permutation graphs, to test the views without tracing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from hf_retarget.graph import Axis, Block, Factor, Group, Layout, PermutationGraph, PinnedAxis, UnknownOperator

EVIL = "<script>alert(1)</script>&'\""


def plain(shape: tuple[int, ...], *groups: str | None) -> Layout:
    """A layout in which every dimension is one axis."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    factors = [
        Factor(size, stride, dim, group)
        for dim, (size, stride, group) in enumerate(zip(shape, strides, groups, strict=True))
    ]
    return Layout(shape, (Block(0, tuple(factors)),))


def graph_of(layouts: Mapping[str, Layout], blocks: Mapping[str, tuple[int, str]] = {}, **others) -> PermutationGraph:
    """A graph with the groups that occur in `layouts`; `blocks` says which are per head: (heads, heads' group)."""
    sizes: dict[str, int] = {}
    axes: dict[str, list[Axis]] = {}
    for name, layout in layouts.items():
        for block in layout.blocks:
            for factor in block.factors:
                if factor.group:
                    sizes[factor.group] = factor.size
                    axes.setdefault(factor.group, []).append(Axis(name, factor.dim))
    groups = []
    for name, size in sizes.items():
        heads, outer = blocks.get(name, (0, None))
        inside = ((heads,), (outer,), ((),)) if heads else ((), (), ())
        groups.append(Group(name, size, *inside, axes=tuple(dict.fromkeys(axes[name]))))
    return PermutationGraph(tuple(groups), layouts, frozenset(layouts), **others)


def transformer(
    depth: int = 4, stream: str = "embed", heads: int = 3, inner: int = 4, classes: int = 10
) -> PermutationGraph:
    """The graph of a pico transformer: stream, and in every block heads, two groups per head, and an MLP."""
    width = heads * inner
    layouts = {
        "pos_embed": plain((1, 5, width), None, None, stream),
        f"{stream}.weight": plain((width, 7), stream, None),
    }
    blocks = {}
    for i in range(depth):
        at = f"blocks.{i}."
        head, qk, v, mlp = (f"{at}attn.qkv#heads", f"{at}attn.qkv", f"{at}attn.qkv#v", f"{at}fc1")
        parts = [
            Block(
                part * width * width,
                (
                    Factor(heads, inner * width, 0, head),
                    Factor(inner, width, 0, name, (0,)),
                    Factor(width, 1, 1, stream),
                ),
            )
            for part, name in enumerate((qk, qk, v))
        ]
        out = Block(0, (Factor(width, width, 0, stream), Factor(heads, inner, 1, head), Factor(inner, 1, 1, v, (1,))))
        layouts |= {
            f"{at}norm.weight": plain((width,), stream),
            f"{at}attn.qkv.weight": Layout((3 * width, width), tuple(parts)),
            f"{at}attn.proj.weight": Layout((width, width), (out,)),
            f"{at}fc1.weight": plain((48, width), mlp, stream),
            f"{at}fc1.bias": plain((48,), mlp),
            f"{at}fc2.weight": plain((width, 48), stream, mlp),
        }
        blocks |= {qk: (heads, head), v: (heads, head)}
    layouts["head.weight"] = plain((classes, width), None, stream)
    pinned = (
        PinnedAxis(Axis("pos_embed", 1), "spatial", "aten.add"),
        PinnedAxis(Axis(f"{stream}.weight", 1), "input", "model input"),
        PinnedAxis(Axis("head.weight", 0), "output", "model output"),
    )
    return graph_of(layouts, blocks, pinned=pinned)


@pytest.fixture
def vit() -> PermutationGraph:
    return transformer()


@pytest.fixture
def deep_vit() -> PermutationGraph:
    return transformer(depth=40)


@pytest.fixture
def evil() -> PermutationGraph:
    """A graph in which every name is malicious."""
    layouts = {f"{EVIL}.weight": plain((4, 3), EVIL, None), f"last{EVIL}\x00.weight": plain((2, 4), None, EVIL)}
    return graph_of(
        layouts,
        pinned=(PinnedAxis(Axis(f"{EVIL}.weight", 1), "unknown operator", EVIL),),
        unknown_operators=(UnknownOperator(EVIL, EVIL, EVIL),),
    )


@pytest.fixture
def dense() -> PermutationGraph:
    """Concatenation: the second layer reads the segments of two groups along one axis."""
    joined = Layout(
        (6, 7),
        (
            Block(0, (Factor(6, 7, 0, "b"), Factor(3, 1, 1, "stem"))),
            Block(3, (Factor(6, 7, 0, "b"), Factor(4, 1, 1, "a"))),
        ),
    )
    layouts = {
        "stem.weight": plain((3, 3, 3, 3), "stem", None, None, None),
        "a.weight": plain((4, 3), "a", "stem"),
        "b.weight": joined,
    }
    return graph_of(layouts, pinned=(PinnedAxis(Axis("stem.weight", 1), "input", ""),))


@pytest.fixture
def grouped() -> PermutationGraph:
    """A grouped convolution between two pointwise ones, as in RegNet: two groups of three."""
    middle = Block(
        0,
        (
            Factor(2, 81, 0, "groups"),
            Factor(3, 27, 0, "out", (0,)),
            Factor(3, 9, 1, "in", (0,)),
            Factor(3, 3, 2),
            Factor(3, 1, 3),
        ),
    )
    first = Block(0, (Factor(2, 9, 0, "groups"), Factor(3, 3, 0, "in", (0,)), Factor(3, 1, 1)))
    last = Block(0, (Factor(5, 6, 0), Factor(2, 3, 1, "groups"), Factor(3, 1, 1, "out", (1,))))
    layouts = {
        "conv1.weight": Layout((6, 3, 1, 1), (first,)),
        "conv2.weight": Layout((6, 3, 3, 3), (middle,)),
        "conv3.weight": Layout((5, 6, 1, 1), (last,)),
    }
    pinned = (PinnedAxis(Axis("conv1.weight", 1), "input", ""), PinnedAxis(Axis("conv3.weight", 0), "output", ""))
    return graph_of(layouts, {"in": (2, "groups"), "out": (2, "groups")}, pinned=pinned)


@pytest.fixture
def gated() -> PermutationGraph:
    """Two inverted residual blocks with squeeze-and-excitation, which writes its group a second time."""
    layouts = {"stem.weight": plain((4, 3), "stem", None)}
    for i in range(2):
        wide, squeezed = f"blocks.{i}.expand", f"blocks.{i}.reduce"
        layouts |= {
            f"blocks.{i}.expand.weight": plain((8, 4), wide, "stem"),
            f"blocks.{i}.se.reduce.weight": plain((2, 8), squeezed, wide),
            f"blocks.{i}.se.expand.weight": plain((8, 2), wide, squeezed),
            f"blocks.{i}.project.weight": plain((4, 8), "stem", wide),
        }
    return graph_of(layouts, pinned=(PinnedAxis(Axis("stem.weight", 1), "input", ""),))
