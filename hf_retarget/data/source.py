"""What a reference leads to: splits that are not opened before they are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_retarget.data.labels import suggest
from hf_retarget.data.options import DataOptions
from hf_retarget.data.rows import Rows
from hf_retarget.errors import DataError

TRAIN = ("train", "training")
TEST = ("test", "testing", "validation", "valid", "val", "dev")
SPLITS = (*TRAIN, *TEST)
"""What splits are called, best first."""


@dataclass(frozen=True)
class Source:
    """A dataset that was found; its splits are functions, as not all may be needed."""

    name: str
    splits: Mapping[str, Callable[[], Rows]]
    revision: str | None = None
    notes: tuple[str, ...] = ()


def choose_splits(source: Source, options: DataOptions) -> tuple[str, str | None]:
    """The split to train on, and the one to test on if there is one.

    Example:
        >>> splits = dict.fromkeys(["validation", "train", "extra"], list)
        >>> choose_splits(Source("pets", splits), DataOptions())
        ('train', 'validation')
    """
    there = list(source.splits)
    for asked in (options.train_split, options.test_split):
        if asked is not None and asked not in there:
            raise DataError(f"'{source.name}' has no split '{asked}'; {suggest(asked, there)}")
    if options.test_split is not None and options.test_split == options.train_split:
        raise DataError(f"'{options.test_split}' cannot be both the training and the test split; leave out one")
    by_name = {name.casefold(): name for name in reversed(there)}
    train = options.train_split or next((by_name[name] for name in TRAIN if name in by_name), None)
    if train is None and len(there) > 1:
        raise DataError(
            f"'{source.name}' has the splits {', '.join(map(repr, there))}; say which to train on "
            "with 'train_split' (--data-train-split)"
        )
    train = train or there[0]
    found = (by_name[name] for name in TEST if name in by_name)
    return train, options.test_split or next((name for name in found if name != train), None)
