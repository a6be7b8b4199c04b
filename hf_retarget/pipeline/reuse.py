"""A permutation that was found before, for another fine-tuning between the same two bases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_retarget.graph import Layout, Permutation, PermutationGraph
from hf_retarget.graph.layout import Factor

PERMUTATION, GRAPH = "permutation.safetensors", "graph.json"
"""What a finished port calls the permutation, and the graph it was made for."""


def load_permutation(path: str | Path, graph: PermutationGraph) -> Permutation:
    """Read a permutation for a graph, from its file or the folder of a port; the number of classes may be another.

    One that belongs to another graph altogether is returned as it is: the graph says so when it is applied.
    """
    path = Path(path)
    if path.is_dir():
        path /= PERMUTATION
    permutation = Permutation.load(path)
    beside = path.with_name(GRAPH)
    if permutation.fingerprint != graph.fingerprint and beside.is_file():
        made_for = PermutationGraph.load(beside)
        if made_for.fingerprint == permutation.fingerprint and act_alike(made_for, graph):
            return Permutation(graph.fingerprint, permutation.indices)
    return permutation


def act_alike(one: PermutationGraph, other: PermutationGraph) -> bool:
    """Whether permutations of two graphs do the same: equal groups, and layouts that differ only in pinned sizes."""
    if one.groups != other.groups or one.tied != other.tied or one.layouts.keys() != other.layouts.keys():
        return False
    return all(_alike(layout, other.layouts[name]) for name, layout in one.layouts.items())


def _alike(one: Layout, other: Layout) -> bool:
    if one == other:
        return True
    if len(one.blocks) != len(other.blocks) or len(one.shape) != len(other.shape):
        return False
    return all(
        np.unravel_index(ours.offset, one.shape) == np.unravel_index(theirs.offset, other.shape)
        and _permute_alike(ours.factors, theirs.factors)
        for ours, theirs in zip(one.blocks, other.blocks, strict=True)
    )


def _permute_alike(ours: Sequence[Factor], theirs: Sequence[Factor]) -> bool:
    # The stride of a factor may change with the size of a pinned one behind it; what it permutes does not.
    return len(ours) == len(theirs) and all(
        (a.dim, a.group, a.outer) == (b.dim, b.group, b.outer) and (a.group is None or a.size == b.size)
        for a, b in zip(ours, theirs, strict=True)
    )
