"""Repeated blocks: which neighbours in a stack carry the same groups, so that one may stand for all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hf_retarget.inspection.paths import home

if TYPE_CHECKING:
    from hf_retarget.graph import Layout, PermutationGraph

_INDEXED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a stack that are alike, say ``blocks.0`` to ``blocks.11``, and the groups of each."""

    blocks: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def hidden(self) -> frozenset[str]:
        """The groups that need not be shown, because the first block's stand for them."""
        return frozenset(name for names in self.groups[1:] for name in names)

    def __str__(self) -> str:
        return f"{self.blocks[0]} … {self.blocks[-1]}"


def repeated_blocks(graph: PermutationGraph, shortest: int = 3) -> tuple[Run, ...]:
    """All runs of at least `shortest` blocks that are alike, in order, none inside another."""
    homes = {group.name: home(axis.tensor for axis in group.axes) for group in graph.groups}
    return tuple(_runs(graph, homes, "", list(graph.layouts), shortest))


def _runs(graph: PermutationGraph, homes: dict[str, str], parent: str, tensors: list[str], shortest: int) -> list[Run]:
    children: dict[str, list[str]] = {}
    for name in tensors:
        child, dot, _ = name[len(parent) :].partition(".")
        if dot:
            children.setdefault(parent + child, []).append(name)
    described = [(block, *_describe(graph, homes, block + ".", names)) for block, names in children.items()]
    found: list[Run] = []
    for (stem, _), alike in groupby(described, key=lambda item: (_stem(item[0]), item[1])):
        blocks = list(alike)
        if stem is not None and len(blocks) >= shortest and blocks[0][2]:
            found.append(Run(tuple(block[0] for block in blocks), tuple(block[2] for block in blocks)))
        else:
            for block, *_ in blocks:
                found += _runs(graph, homes, block + ".", children[block], shortest)
    return found


def _stem(path: str) -> str | None:
    match = _INDEXED.fullmatch(path)
    return match[1] if match else None


def _describe(
    graph: PermutationGraph, homes: dict[str, str], prefix: str, tensors: list[str]
) -> tuple[Any, tuple[str, ...]]:
    # What makes two blocks alike: the same tensors, cut up in the same way, by the same groups from outside the
    # block and by groups of its own in the same places.
    own: dict[str | None, int] = {}
    for name, module in homes.items():
        if module.startswith(prefix):
            own[name] = len(own)
    pattern = tuple(
        (name[len(prefix) :], graph.layouts[name].shape, _cut(graph.layouts[name], own)) for name in tensors
    )
    return pattern, tuple(name for name in own if name is not None)


def _cut(layout: Layout, own: dict[str | None, int]) -> Any:
    return tuple(
        (
            block.offset,
            tuple((*factor[:3], own.get(factor.group, factor.group), factor.outer) for factor in block.factors),
        )
        for block in layout.blocks
    )
