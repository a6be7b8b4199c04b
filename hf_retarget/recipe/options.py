"""What a recipe can say about the port itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_retarget.recipe.field import fields_of


def _option(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, **limits})


# By name, because to import the methods is to import torch; a test compares them with the registered ones.
METHODS = ("fgmt", "fgmt-sign", "gmt", "naive", "naive-sign", "oracle", "permuted-source", "rebasin")
HEADS = ("auto", "zero", "shared", "given", "own")
CONTROLS = ("full", "naive", "none")


@dataclass(frozen=True)
class PortOptions:
    """The `port:` section of a recipe.

    Example:
        >>> PortOptions(steps=15).grad_batches
        5
    """

    method: str = _option("fgmt-sign", "how the permutation is found, and what is added of it", choices=METHODS)
    trajectory: str = _option(
        "linear",
        "straight line to the tuned weights, or the checkpoints of the fine-tuning",
        choices=("linear", "actual"),
    )
    steps: int = _option(10, "number of steps T along the trajectory", least=1)
    schedule: str = _option("uniform", "how the steps divide a linear trajectory", choices=("uniform", "cosine"))
    batch_size: int = _option(128, "images in a minibatch, for gradients and for BatchNorm", least=1)
    grad_batches: int = _option(5, "minibatches behind each gradient", least=1)
    micro_batch: int | None = _option(None, "images that go through the model at once (all if not given)", least=1)
    bn_batches: int = _option(5, "minibatches that re-estimate the BatchNorm statistics", least=0)
    head: str = _option("auto", "classifier that both bases get before the port", choices=HEADS)
    seed: int = _option(0, "seed of minibatches, head and solver", least=0)
    start: str = _option("restart", "solver starts at the identity, or at the step before", choices=("restart", "warm"))
    restarts: int = _option(1, "times that the solver runs at each step, in other orders; the best counts", least=1)
    normalise: bool = _option(False, "let all tensors count alike, instead of by their norm")
    compress: float | None = _option(
        None,
        "share of the gradients' energy to keep, within the size of the model (1: all; small models keep all)",
        above=0,
        most=1,
    )
    augment: bool = _option(False, "augment the images on which gradients are taken")
    early_stop: int | None = _option(
        None, "stop after this many steps without a better validation score (never if not given)", least=1
    )
    control: str = _option("full", "what the port is compared with", choices=CONTROLS)
    check: bool = _option(True, "verify the permutation graph before the port")
    samples: int = _option(
        12, "test images that the report shows, with what the models say (0: none)", least=0, most=48
    )
    eval_batch: int = _option(256, "images in a minibatch of an evaluation", least=1)

    def __post_init__(self) -> None:
        for each in fields_of(PortOptions, "port"):
            each.read(getattr(self, each.name))
