"""Paths of modules, such as ``blocks.0.attn.qkv``: what several have in common, and which block they are in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set

_INDEX = re.compile(r"(?:^|(?<=\.))[A-Za-z_]*\d+\.")


def home(tensors: Iterable[str]) -> str:
    """The innermost module that holds all these tensors, with a dot at its end; empty for the model itself.

    Example:
        >>> home(["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"])
        'blocks.0.mlp.'
    """
    first, *others = (tensor.split(".")[:-1] for tensor in tensors)
    shared = len(first)
    for other in others:
        same = (a == b for a, b in zip(first, other, strict=False))
        shared = min(shared, next((i for i, equal in enumerate(same) if not equal), len(other)))
    return "".join(part + "." for part in first[:shared])


def blocks_of(paths: Sequence[str], weights: Set[str]) -> list[str]:
    """For each path the block that it is in: the innermost indexed module that holds two weights or more.

    Example:
        >>> blocks_of(["stem", "s1.b1.conv1", "s1.b1.conv2"], {"s1.b1.conv1", "s1.b1.conv2"})
        ['', 's1.b1.', 's1.b1.']
    """
    holds = Counter(path[: match.end()] for path in weights for match in _INDEX.finditer(path))
    prefixes = ([path[: match.end()] for match in _INDEX.finditer(path)] for path in paths)
    return [next((prefix for prefix in reversed(own) if holds[prefix] > 1), "") for own in prefixes]
