"""Bring models into the arrangement of the first, so that the weights between them mean something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import PermutationError, RetargetError
from hf_retarget.files import hash_tensors
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.matching.methods import match
from hf_retarget.pipeline.held import derive_graph
from hf_retarget.pipeline.reuse import load_permutation
from hf_retarget.pipeline.start import doing
from hf_retarget.progress import Progress

MATCH = "match"
_FILE = "permutation.safetensors"

Tensors = Mapping[str, Tensor]
Permute = str | Mapping[str, str | Path | Permutation] | None
"""`match`: all models but the first; else from names of models to `match`, a permutation, its file or a port."""


@dataclass(frozen=True, eq=False)
class Arranged:
    """Weights as they are compared, and how each model was permuted, if it was."""

    weights: tuple[dict[str, Tensor], ...] = field(repr=False)
    permuted: tuple[dict[str, Any] | None, ...]


def arrange(
    models: Mapping[str, dict[str, Tensor]],
    permute: Permute,
    model: nn.Module,
    input_size: tuple[int, int, int],
    *,
    graph: PermutationGraph | str | Path | None = None,
    seed: int = 0,
    progress: Progress,
) -> Arranged:
    """Permute the models that are to be permuted; `model` is one of their architecture, to derive the graph from."""
    names = list(models)
    wanted = dict.fromkeys(names[1:], MATCH) if permute == MATCH else _named(permute, names)
    if not wanted:
        return Arranged(tuple(models.values()), (None,) * len(models))
    with doing(progress, "tracing the model"):
        graph = _find_graph(graph, model, input_size)
    weights: list[dict[str, Tensor]] = []
    permuted: list[dict[str, Any] | None] = []
    parameters = [name for name, _ in model.named_parameters()]
    for name, tensors in models.items():
        how = wanted.get(name)
        if how is None:
            weights.append(tensors)
            permuted.append(None)
            continue
        with doing(progress, f"permuting {name}"):
            chosen, words = _find(how, graph, models[names[0]], tensors, parameters, seed)
            weights.append(graph.apply(chosen, tensors))
        permuted.append({"by": words, "moved": _moved(chosen), "hash": hash_tensors(chosen.indices)})
    return Arranged(tuple(weights), tuple(permuted))


def _named(permute: Permute, names: Sequence[str]) -> dict[str, str | Path | Permutation]:
    if permute is None:
        return {}
    if not isinstance(permute, Mapping):
        raise RetargetError(f"models cannot be permuted by '{permute}'; say '{MATCH}', or NAME={MATCH} or NAME=FILE")
    for name in permute:
        if name not in names:
            raise RetargetError(f"there is no model '{name}' to permute; the models are {', '.join(names)}")
        if name == names[0] and permute[name] == MATCH:
            raise RetargetError(f"'{name}' is the first model, which the others are matched with; permute another one")
    return dict(permute)


def _find_graph(
    graph: PermutationGraph | str | Path | None, model: nn.Module, input_size: tuple[int, int, int]
) -> PermutationGraph:
    if isinstance(graph, PermutationGraph):
        return graph
    return PermutationGraph.load(graph) if graph is not None else derive_graph(model, input_size).graph


def _find(
    how: str | Path | Permutation,
    graph: PermutationGraph,
    first: Tensors,
    tensors: Tensors,
    parameters: Sequence[str],
    seed: int,
) -> tuple[Permutation, str]:
    if isinstance(how, Permutation):
        return how, "a given permutation"
    if how == MATCH:
        sides = ({name: side[name] for name in parameters} for side in (first, tensors))
        return match(graph, *sides, seed=seed).permutation, MATCH
    path = Path(how).expanduser()
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise PermutationError(f"there is no permutation '{path}'; give the file, the folder of a port, or '{MATCH}'")
    return load_permutation(path, graph), path.parent.name if path.name == _FILE else path.name


def _moved(permutation: Permutation) -> float:
    total = sum(index.numel() for index in permutation.indices.values())
    moved = sum(int((index != torch.arange(index.shape[-1])).sum()) for index in permutation.indices.values())
    return moved / total if total else 0.0
