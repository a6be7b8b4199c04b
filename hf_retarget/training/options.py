"""What a recipe can say about fine-tuning, and the two figures that follow from it: steps and learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from hf_retarget.errors import RecipeError

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class TrainOptions:
    """The `finetune:` section of a recipe. With neither steps nor epochs there is no fine-tuning.

    Example:
        >>> TrainOptions(epochs=2, batch_size=100).total_steps(1050)
        21
    """

    steps: int = field(default=0, metadata={"help": "optimizer steps to take (or give epochs)", "least": 0})
    epochs: float = field(default=0.0, metadata={"help": "passes over the training split (or give steps)", "least": 0})
    batch_size: int = field(default=128, metadata={"help": "images in a step", "least": 1})
    optimizer: str = field(default="sgd", metadata={"help": "how the weights are updated", "choices": OPTIMIZERS})
    lr: float = field(default=0.01, metadata={"help": "learning rate at its highest", "above": 0})
    momentum: float = field(
        default=0.9, metadata={"help": "momentum of SGD, or the first beta of AdamW", "least": 0, "below": 1}
    )
    weight_decay: float = field(default=1e-4, metadata={"help": "weight decay, on all parameters", "least": 0})
    schedule: str = field(
        default="cosine",
        metadata={"help": "the learning rate after the warm-up: cosine (down to 0) or constant", "choices": SCHEDULES},
    )
    warmup: int = field(
        default=0, metadata={"help": "steps in which the learning rate rises to its highest", "least": 0}
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "share of a label that is spread over all classes", "least": 0, "below": 1}
    )
    clip: float = field(
        default=0.0, metadata={"help": "largest norm of a gradient; longer ones are shortened (0: never)", "least": 0}
    )
    augment: bool = field(default=False, metadata={"help": "augment the images, as timm does for training"})
    freeze: tuple[str, ...] = field(
        default=(),
        metadata={"help": "names of modules or parameters that stay as they are (layer1, blocks.0.attn, …)"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the order of the images, augmentation and dropout"})
    evaluate_every: int = field(
        default=0, metadata={"help": "steps between two scores, the start included (0: only at the end)", "least": 0}
    )
    checkpoint_every: int = field(
        default=0, metadata={"help": "steps between two checkpoints (0: a tenth of the training)", "least": 0}
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), **each.metadata)
        if self.steps and self.epochs:
            raise RecipeError(f"give steps ({self.steps}) or epochs ({self.epochs:g}), not both; set one of them to 0")

    def total_steps(self, samples: int) -> int:
        """How many steps to take on a split of so many images: all minibatches are full, across epochs."""
        return self.steps or math.ceil(round(self.epochs * samples / self.batch_size, 6))

    def learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of so many.

        Example:
            >>> [round(TrainOptions(lr=1, warmup=2).learning_rate(step, 6), 2) for step in range(6)]
            [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - self.warmup) / (steps - self.warmup))) / 2


def _check(
    name: str,
    value: float | str,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    if choices and value not in choices:
        raise RecipeError(f"{name} cannot be '{value}'; choose one of {', '.join(choices)}")
    if isinstance(value, (int, float)):
        if least is not None and not value >= least:
            raise RecipeError(f"{name} must be at least {least}, not {value}")
        if above is not None and not value > above:
            raise RecipeError(f"{name} must be above {above}, not {value}")
        if below is not None and not value < below:
            raise RecipeError(f"{name} must be below {below}, not {value}")
