"""Scores at many points between models, each kept as soon as it is known, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_retarget.data import ImageData, Split
from hf_retarget.data.images import Batch, derive_seed
from hf_retarget.errors import NotFiniteError, RetargetError
from hf_retarget.evaluate import evaluate
from hf_retarget.files import write_text
from hf_retarget.landscape import Grid
from hf_retarget.pipeline.drawn import Drawn
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import PortOptions
from hf_retarget.training.batchnorm import reset_batchnorm
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, parse_json, read_bytes

Shares = tuple[float, ...]
Figures = dict[str, Any]
"""loss, top1, top5: plain JSON values, null for a number that is none."""
_NOTHING: Figures = {"loss": None, "top1": 0.0, "top5": None}
"""Of a model that answers with NaN: none of its answers is right."""


@dataclass(frozen=True)
class Surveyor:
    """One model, in which the weights of all points take their turn."""

    model: nn.Module
    data: ImageData
    split: Split
    classes: int
    options: PortOptions
    accelerator: Accelerator
    workers: int = 0
    progress: Progress = SILENT

    @cached_property
    def drawn(self) -> Drawn:
        """Images for every point: each sees the same ones."""
        return Drawn(self.split.preprocess.input_size)

    def score(self, weights: Mapping[str, Tensor]) -> Figures:
        """Put weights into the model, estimate the BatchNorm statistics that fit them, and score it.

        As a port does it: from the same minibatches, so that a ported model has the score that its port.json says.
        """
        options = self.options
        self.model.load_state_dict(dict(weights))
        if options.bn_batches:
            other = derive_seed(options.seed, "batchnorm")

            def draw() -> Iterable[Batch]:
                train = self.data.train
                return train.batches(options.batch_size, seed=other, count=options.bn_batches, workers=self.workers)

            drawn = self.drawn.get("batchnorm", options.bn_batches * options.batch_size, draw)
            try:
                reset_batchnorm(self.model, drawn, accelerator=self.accelerator, progress=self.progress)
            except NotFiniteError:
                return dict(_NOTHING)
        try:
            return self._evaluate()
        except NotFiniteError:  # far from the models, weights may be of no use at all
            return dict(_NOTHING)

    def _evaluate(self) -> Figures:
        options = self.options
        found = evaluate(
            self.model,
            self.drawn.get(
                "split", len(self.split), lambda: self.split.batches(options.eval_batch, workers=self.workers)
            ),
            self.classes,
            accelerator=self.accelerator,
            progress=self.progress,
            total=-(-len(self.split) // options.eval_batch),
        )
        return {"loss": found.loss if math.isfinite(found.loss) else None, "top1": found.top1, "top5": found.top5}


def take(split: Split, limit: int | None, seed: int) -> Split:
    """Some images of a split, drawn by a seed and in their old order; all if there are no more."""
    if limit is None or limit >= len(split):
        return split
    generator = torch.Generator().manual_seed(derive_seed(seed, "limit"))
    chosen = torch.randperm(len(split), generator=generator)[:limit].sort().values
    return replace(split, indices=split.indices[chosen], targets=split.targets[chosen], broken={})


@dataclass(frozen=True)
class Diary:
    """Finished points in a file: one line says what the run is, and each further line holds a point."""

    path: Path | None
    key: Mapping[str, Any]
    done: dict[Shares, Figures] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path | None, key: Mapping[str, Any], *, resume: bool, writing: bool = True) -> Diary:
        """A new diary, or one that goes on if it belongs to the same run; without a path it is only remembered."""
        diary = cls(path, json.loads(json.dumps(key)))
        if path is not None and resume and path.exists():
            diary._read(path)
        if path is not None and writing:
            lines = [{"run": diary.key}, *(_line(shares, figures) for shares, figures in diary.done.items())]
            write_text(path, "".join(map(_sealed, lines)))  # anew: a line that a kill has cut in two is gone
        return diary

    def add(self, shares: Shares, figures: Figures, *, writing: bool = True) -> None:
        """Keep a point, so that it survives whatever comes."""
        self.done[shares] = figures
        if self.path is not None and writing:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_sealed(_line(shares, figures)))
                file.flush()
                os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        entries = list(_entries(path))
        theirs = entries[0].get("run") if entries else None
        if not isinstance(theirs, dict):
            raise RetargetError(f"'{path}' does not say what run it belongs to; begin anew with --overwrite")
        for name in dict.fromkeys((*self.key, *theirs)):
            if self.key.get(name) != theirs.get(name):
                raise RetargetError(
                    f"the unfinished run in '{path.parent}' was another one: '{name}' was {theirs.get(name)!r} and is "
                    f"{self.key.get(name)!r} now; repeat the same command, or begin anew with --overwrite"
                )
        for entry in entries[1:]:
            self.done[tuple(entry["shares"])] = entry["figures"]


def _line(shares: Shares, figures: Figures) -> dict[str, Any]:
    return {"shares": list(shares), "figures": figures}


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in read_bytes(path, MAX_DOCUMENT_BYTES).decode(errors="replace").splitlines():
        try:
            content = parse_json(line)["content"]
        except (ValueError, KeyError, TypeError):
            return  # cut off in the middle of a line: what is before it counts
        if _sealed(content) != f"{line}\n":
            return  # what was damaged, and all after it, is scored again
        yield content


def _sealed(content: dict[str, Any]) -> str:
    """A line with a checksum of its own."""
    text = json.dumps(content)
    return f'{{"content": {text}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()[:16]}"}}\n'


def survey(
    grid: Grid,
    weights: Callable[[Shares], Mapping[str, Tensor]],
    surveyor: Surveyor,
    diary: Diary,
    after: Callable[[int], None],
) -> None:
    """Score all points that the diary does not have yet, level by level; `after` hears of each level but the last."""
    writing = surveyor.accelerator.is_main_process
    levels = [[point for point in level if point.shares not in diary.done] for level in grid.levels]
    left = [
        (number, place + 1 == len(level), point)
        for number, level in enumerate(levels)
        for place, point in enumerate(level)
    ]
    for number, last, point in surveyor.progress.track(left, "scoring points", len(left)):
        diary.add(point.shares, surveyor.score(weights(point.shares)), writing=writing)
        if last and number + 1 < len(levels):
            after(number)
