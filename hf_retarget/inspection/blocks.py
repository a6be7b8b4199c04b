"""Module paths such as ``blocks.0.attn.qkv``: what they have in common, and which blocks repeat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_retarget.graph import PermutationGraph

_INDEX = re.compile(r"(?:^|(?<=\.))[A-Za-z_]*\d+\.")
_INDEXED = re.compile(r"(.*?)\d+")


def home(tensors: Iterable[str]) -> str:
    """The innermost module that holds all these tensors, with a dot at its end; empty for the model itself.

    Example:
        >>> home(["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"])
        'blocks.0.mlp.'
    """
    modules = [tensor.split(".")[:-1] for tensor in tensors]
    pairs = zip(min(modules), max(modules), strict=False)  # what the first and the last share, all share
    return "".join(f"{part}." for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def blocks_of(paths: Sequence[str], weights: Set[str]) -> list[str]:
    """The block of each path: the innermost indexed module that holds at least two weights.

    Example:
        >>> blocks_of(["stem", "s1.b1.conv1", "s1.b1.conv2"], {"s1.b1.conv1", "s1.b1.conv2"})
        ['', 's1.b1.', 's1.b1.']
    """
    holds = Counter(path[: match.end()] for path in weights for match in _INDEX.finditer(path))
    prefixes = ([path[: match.end()] for match in _INDEX.finditer(path)] for path in paths)
    return [next((prefix for prefix in reversed(own) if holds[prefix] > 1), "") for own in prefixes]


@dataclass(frozen=True)
class Repeat:
    """Consecutive blocks of a stack that are alike, such as ``blocks.0`` to ``blocks.11``, and the groups of each."""

    blocks: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def hidden(self) -> frozenset[str]:
        """The groups of all blocks but the first, which represents them."""
        return frozenset(name for names in self.groups[1:] for name in names)

    def __str__(self) -> str:
        return f"{self.blocks[0]} … {self.blocks[-1]}"


def repeated_blocks(graph: PermutationGraph, shortest: int = 3) -> tuple[Repeat, ...]:
    """All runs of at least `shortest` blocks that are alike, in order, none inside another."""
    homes = {group.name: home(axis.tensor for axis in group.axes) for group in graph.groups}

    def search(parent: str, tensors: Sequence[str]) -> list[Repeat]:
        children: dict[str, list[str]] = {}
        for name in tensors:
            child, dot, _ = name[len(parent) :].partition(".")
            if dot:
                children.setdefault(parent + child, []).append(name)
        patterns = [(block, *_pattern(graph, homes, block, names)) for block, names in children.items()]
        found: list[Repeat] = []
        for (stem, _), alike in groupby(patterns, key=lambda each: (_stem(each[0]), each[1])):
            blocks, _, groups = zip(*alike, strict=True)
            if stem is not None and len(blocks) >= shortest and groups[0]:
                found.append(Repeat(blocks, groups))
            else:
                found += [each for block in blocks for each in search(f"{block}.", children[block])]
        return found

    return tuple(search("", list(graph.layouts)))


def _stem(path: str) -> str | None:
    match = _INDEXED.fullmatch(path)
    return match[1] if match else None


def _pattern(
    graph: PermutationGraph, homes: dict[str, str], block: str, tensors: Sequence[str]
) -> tuple[Any, tuple[str, ...]]:
    # Two blocks are alike if they have the same tensors, cut up in the same way, by the same groups from outside and
    # by groups of their own in the same places. The groups of its own come second.
    names = tuple(name for name, module in homes.items() if module.startswith(f"{block}."))
    own: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    return [
        (
            tensor.removeprefix(block),
            graph.layouts[tensor].shape,
            [
                (
                    part.offset,
                    [(*factor[:3], own.get(factor.group, factor.group), factor.outer) for factor in part.factors],
                )
                for part in graph.layouts[tensor].blocks
            ],
        )
        for tensor in tensors
    ], names
