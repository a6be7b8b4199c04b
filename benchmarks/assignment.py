"""Assignments on real gains, against SciPy in the same run.

    python benchmarks/assignment.py                      # all networks, some minutes
    python benchmarks/assignment.py mlp mobilenetv2      # only these

The gains are what a descent over real gradients asks for: of each size, at its first and at its last assignment.
MobileNetV2 is taken from two published checkpoints in ../shared, and left out if they are missing; the other networks
begin with random weights and are trained for a few steps. Where neurons are dead, several permutations are equally
good; *same* then says that the gain is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import click
import numpy as np
import timm
import torch
from quality.networks import MLP
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from solver import real_gradients
from torch import nn

from hf_retarget.matching import descent
from hf_retarget.matching.assignment import SOLVERS, assign
from hf_retarget.matching.objective import Stacks

CHECKPOINTS = Path(__file__).resolve().parents[2] / "shared" / "weights" / "mobilenetv2_100"

Gains = dict[int, list[np.ndarray]]
Solved = TypeVar("Solved")


class Network(NamedTuple):
    """Two models of one architecture, the images they take, and for how many steps they are trained first."""

    make: Callable[[], list[nn.Module]]
    shape: tuple[int, int, int]
    training: int


def _published() -> list[nn.Module]:
    models = []
    for file in ("google", "torchvision"):
        model = timm.create_model("mobilenetv2_100")
        model.load_state_dict(load_file(CHECKPOINTS / f"{file}.safetensors"))
        models.append(model)
    return models


NETWORKS = {
    "mlp": Network(lambda: [MLP(4096), MLP(4096)], (1, 28, 28), 25),
    "mobilenetv2": Network(_published, (3, 96, 96), 0),
    "vit_small": Network(
        lambda: [timm.create_model("vit_small_patch16_224", img_size=64) for _ in range(2)], (3, 64, 64), 5
    ),
    "resnet50": Network(lambda: [timm.create_model("resnet50") for _ in range(2)], (3, 64, 64), 5),
}


@contextmanager
def listen() -> Iterator[Gains]:
    """Keep what descents ask for: the first and the latest gains of each size."""
    heard: Gains = {}

    def spy(gains: np.ndarray) -> Callable[[], tuple[np.ndarray, float]]:
        heard[len(gains)] = [*heard.get(len(gains), [])[:1], gains.copy()]
        return lambda: assign(gains)

    before, SOLVERS.assign = SOLVERS.assign, spy
    try:
        yield heard
    finally:
        SOLVERS.assign = before


def measure(name: str, gains: np.ndarray, when: str) -> None:
    """Solve both ways and print one row: seconds of the processor, so that other programs do not count."""
    scipy, theirs = _best(lambda: linear_sum_assignment(gains, maximize=True)[1], len(gains))
    auction, (ours, gain) = _best(lambda: assign(gains), len(gains))
    same = "same" if np.array_equal(ours, theirs) else "equal"
    if same == "equal" and not np.isclose(gain, gains[np.arange(len(gains)), theirs].sum(), rtol=1e-12):
        same = "DIFFERENT"
    print(f"{name:12} {len(gains):5} {when:6} {scipy:8.3f} {auction:8.3f} {scipy / auction:6.1f}  {same}", flush=True)


def _best(solve: Callable[[], Solved], size: int) -> tuple[float, Solved]:
    seconds = []
    for _ in range(5 if size < 1000 else 1):
        began = time.process_time()
        result = solve()
        seconds.append(time.process_time() - began)
    return min(seconds), result


@click.command(help=__doc__)
@click.argument("networks", nargs=-1, type=click.Choice(list(NETWORKS)))
@click.option("--least", default=256, show_default=True, help="Size of the smallest assignments shown.")
@click.option("--steps", default=2, show_default=True, help="Pairs of gradients.")
def main(networks: tuple[str, ...], least: int, steps: int) -> None:
    """Print seconds of SciPy and ours, and their ratio."""
    print(f"{'network':12} {'n':>5} {'':6} {'SciPy s':>8} {'ours s':>8} {'ratio':>6}  permutation")
    for name in networks or NETWORKS:
        if name == "mobilenetv2" and not CHECKPOINTS.is_dir():
            print(f"{name:12} left out: there are no checkpoints in ../shared")
            continue
        torch.manual_seed(0)
        network = NETWORKS[name]
        graph, pairs = real_gradients(network.make(), steps, network.shape, network.training)
        stacks = Stacks(graph)
        for target, source in pairs:
            stacks.add(target, source)
        with listen() as heard:
            descent.descend(stacks, max_sweeps=3)
        for size in sorted(size for size in heard if size >= least):
            for when, gains in zip(("first", "last"), heard[size], strict=False):
                measure(name, gains, when)


if __name__ == "__main__":
    main()
