"""What a descent solves in one step: a group, or blocks together with what is permuted inside them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_retarget.graph.permutation_graph import Group, PermutationGraph
from hf_retarget.matching.objective import Piece


@dataclass(frozen=True)
class Unit:
    """What is solved in one step: a group, or blocks together with some of their inner groups."""

    group: Group
    inners: tuple[Group, ...] = ()

    @property
    def names(self) -> set[str]:
        """All groups that the step may move."""
        return {self.group.name, *(inner.name for inner in self.inners)}


def units(graph: PermutationGraph, pieces: list[Piece]) -> list[Unit]:
    """The steps of a descent: each group, blocks taken together with inner groups that do not share a piece.

    Two inner groups in one piece (both sides of a grouped convolution) cannot be solved jointly, so each
    is paired with the blocks in a step of its own.
    """
    result = []
    for group in graph.groups:
        inners = [inner for inner in graph.groups if inner.outer == (group.name,)] if not group.blocks else []
        if not inners:
            joint = len(group.outer) == 1 and group.outer[0] is not None and not graph[group.outer[0]].blocks
            if not joint:
                result.append(Unit(group))
            continue
        classes: list[list[Group]] = []
        for inner in inners:
            free = (each for each in classes if not any(_meet(inner, other, pieces) for other in each))
            chosen = next(free, None)
            if chosen is None:
                classes.append([inner])
            else:
                chosen.append(inner)
        result += [Unit(group, tuple(each)) for each in classes]
    return result


def _meet(one: Group, other: Group, pieces: list[Piece]) -> bool:
    return any({one.name, other.name} <= piece.groups for piece in pieces)
