"""All options of a recipe, with defaults, help and limits, in three sections: data, port and fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_retarget.contenders import method_names
from hf_retarget.errors import RecipeError
from hf_retarget.names import PORT_HEADS, SAVE_AS, TARGETS
from hf_retarget.recipe.field import fields_of

_SEED = 2**63 - 1


def _option(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, **limits})


class _Options:
    """Validates every value against the declaration of its field."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields_of(type(self), self.section):
            each.read(getattr(self, each.name))


@dataclass(frozen=True)
class DataOptions(_Options):
    """The `data:` section of a recipe.

    Example:
        >>> DataOptions(reference="fashion-mnist", limit=100).validation
        0.1
    """

    section = "data"

    reference: str = _option("", "embedded name, Hub id, image folder, or parquet/arrow file, folder or glob")
    config: str | None = _option(None, "configuration of a Hub dataset that has several")
    revision: str | None = _option(None, "commit, tag or branch of a Hub dataset")
    train_split: str | None = _option(None, "training split (detected if not given)")
    test_split: str | None = _option(
        None, "test split (detected if not given; without any, 10 % of the training split is held out)"
    )
    validation_split: str | None = _option(
        None, "split to choose on, unseen by the tuned model (drawn from the training split if not given)"
    )
    image_column: str | None = _option(None, "column of the images (detected if not given)")
    label_column: str | None = _option(None, "column of the labels (detected if not given)")
    validation: float = _option(0.1, "share of the training split held out for validation", least=0, below=1)
    seed: int = _option(0, "seed of the split into training and validation", least=0, most=_SEED)
    classes: tuple[str, ...] = _option((), "keep only these labels, renumbered in this order (all if empty)")
    limit: int | None = _option(None, "use at most this many images of each split", least=2, most=10**9)
    image_size: int | None = _option(
        None, "height and width of the model's input (the model's own if not given)", least=4, most=4096
    )


@dataclass(frozen=True)
class PortOptions(_Options):
    """The `port:` section of a recipe.

    Example:
        >>> PortOptions(steps=15).grad_batches
        5
    """

    section = "port"

    method: str = _option(
        "auto",
        "how the fine-tuning is matched and added to the new base (auto: try several, keep the best)",
        choices=method_names(),
    )
    targets: str = _option(
        "auto", "targets of gradients, heads and fine-tuning (auto: the best on validation images)", choices=TARGETS
    )
    alpha: float | None = _option(
        None,
        "factor of the fine-tuning in a naive port of `auto` (chosen on validation images if not given)",
        above=0,
        most=10,
    )
    update: float = _option(
        1.0, "share of the way from the old base to the new one, if they are related", above=0, most=1
    )
    trajectory: str = _option(
        "linear",
        "straight line to the tuned weights, or the checkpoints of the fine-tuning",
        choices=("linear", "actual"),
    )
    steps: int = _option(10, "number of steps T along the trajectory", least=1)
    schedule: str = _option("uniform", "how the steps divide a linear trajectory", choices=("uniform", "cosine"))
    batch_size: int = _option(128, "images per minibatch, for gradients and for BatchNorm", least=1)
    grad_batches: int = _option(5, "minibatches per gradient", least=1)
    micro_batch: int | None = _option(None, "images in the model at once (the whole minibatch if not given)", least=1)
    bn_batches: int = _option(5, "minibatches to re-estimate the BatchNorm statistics", least=0)
    head: str = _option("auto", "classifier that both bases get before the port", choices=PORT_HEADS)
    seed: int = _option(
        0, "seed of minibatches, head, solver, and fine-tuning (unless `finetune.seed` is given)", least=0, most=_SEED
    )
    start: str = _option(
        "warm", "where the search starts: at the previous step's permutation, or afresh", choices=("warm", "restart")
    )
    restarts: int = _option(1, "solver runs per step, in different orders; the best is kept", least=1)
    normalise: bool = _option(False, "weight all tensors equally, instead of by their norm")
    compress: float | None = _option(
        None,
        "share of the gradients' energy to keep, within the size of the model (1: all; small models keep all)",
        above=0,
        most=1,
    )
    augment: bool = _option(False, "augment the images used for gradients")
    early_stop: int | None = _option(
        None, "stop after this many steps without a better validation score (never if not given)", least=1
    )
    control: str = _option("full", "what the port is compared with", choices=("full", "naive", "none"))
    verify: bool = _option(True, "verify the permutation graph before the port")
    samples: int = _option(
        12, "test images shown in the report with the models' predictions (0: none)", least=0, most=48
    )
    eval_batch: int = _option(64, "images per minibatch in evaluations", least=1)
    save_as: str = _option("model", "save the whole model, or a PEFT adapter of the new base", choices=SAVE_AS)
    rank: int | None = _option(None, "rank of the adapter's layers, with `save_as: lora` (16 if not given)", least=1)
    energy: float | None = _option(
        None, "instead of a rank: share of the energy of each layer's change that the adapter keeps", above=0, most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.energy is not None:
            raise RecipeError(f"give a rank ({self.rank}) or a share of energy ({self.energy:g}), not both")
        if self.save_as != "lora" and (self.rank is not None or self.energy is not None):
            raise RecipeError("rank and energy only apply to adapters; add --save-as lora")


@dataclass(frozen=True)
class TrainOptions(_Options):
    """The `finetune:` section of a recipe. With neither steps nor epochs there is no fine-tuning.

    Example:
        >>> TrainOptions(epochs=2, batch_size=100).total_steps(1050)
        21
    """

    section = "finetune"

    steps: int = _option(0, "optimizer steps to take (or give epochs)", least=0)
    epochs: float = _option(0.0, "passes over the training split (or give steps)", least=0, most=10**6)
    batch_size: int = _option(128, "images per step", least=1)
    optimizer: str = _option("sgd", "optimizer of the fine-tuning", choices=("sgd", "adamw"))
    lr: float = _option(0.01, "peak learning rate", above=0)
    momentum: float = _option(0.9, "momentum of SGD, or the first beta of AdamW", least=0, below=1)
    weight_decay: float = _option(1e-4, "weight decay, on all parameters", least=0, most=10**6)
    schedule: str = _option(
        "cosine", "learning rate after the warm-up: cosine (down to 0) or constant", choices=("cosine", "constant")
    )
    warmup: int = _option(0, "steps of linear warm-up of the learning rate", least=0)
    label_smoothing: float = _option(0.0, "share of a label that is spread over all classes", least=0, below=1)
    clip: float = _option(0.0, "maximum norm of the gradient (0: no clipping)", least=0)
    augment: bool = _option(False, "augment the images, as timm does for training")
    freeze: tuple[str, ...] = _option((), "names of modules or parameters to freeze (layer1, blocks.0.attn, …)")
    seed: int = _option(0, "seed of the order of the images, augmentation and dropout", least=0, most=_SEED)
    evaluate_every: int = _option(0, "steps between evaluations, the start included (0: only at the end)", least=0)
    checkpoint_every: int = _option(0, "steps between checkpoints (0: a tenth of the training)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise RecipeError(f"give steps ({self.steps}) or epochs ({self.epochs:g}), not both; set one of them to 0")

    def total_steps(self, samples: int) -> int:
        """The number of steps on a split of this many images: minibatches are full, across epochs."""
        return self.steps or math.ceil(round(self.epochs * samples / self.batch_size, 6))

    def learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, out of `steps`.

        Example:
            >>> [round(TrainOptions(lr=1, warmup=2).learning_rate(step, 6), 2) for step in range(6)]
            [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - self.warmup) / (steps - self.warmup))) / 2
