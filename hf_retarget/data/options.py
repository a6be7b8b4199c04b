"""What a recipe can say about its images and labels."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataOptions:
    """The `data:` section of a recipe.

    Example:
        >>> DataOptions(reference="fashion-mnist", limit=100).validation
        0.1
    """

    reference: str = field(
        default="",
        metadata={"help": "embedded name, Hub id, image folder, or parquet/arrow file, folder or glob"},
    )
    config: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    revision: str | None = field(default=None, metadata={"help": "commit, tag or branch of a Hub dataset"})
    train_split: str | None = field(default=None, metadata={"help": "split to train on (found if not given)"})
    test_split: str | None = field(
        default=None,
        metadata={"help": "split to test on (found if not given; without any, 10 % of the training split is held out)"},
    )
    image_column: str | None = field(default=None, metadata={"help": "column of the images (found if not given)"})
    label_column: str | None = field(default=None, metadata={"help": "column of the labels (found if not given)"})
    validation: float = field(
        default=0.1, metadata={"help": "share of the training split kept for validation", "least": 0, "below": 1}
    )
    seed: int = field(default=0, metadata={"help": "seed of the split into training and validation", "least": 0})
    classes: tuple[str, ...] = field(
        default=(), metadata={"help": "keep only these labels, renumbered in this order (all if empty)"}
    )
    limit: int | None = field(default=None, metadata={"help": "use at most this many images of each split", "least": 2})
    image_size: int | None = field(
        default=None,
        metadata={"help": "height and width of the model's input (the model's own if not given)", "least": 1},
    )
