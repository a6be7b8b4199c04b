"""Splits of labelled images, and minibatches that depend only on a seed and an index."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hf_retarget.data.preprocess import Preprocess
from hf_retarget.data.tables import Rows
from hf_retarget.errors import DataError
from hf_retarget.words import plural

Batch = tuple[Any, Tensor]
"""Inputs and labels."""

_MANY = 5  # fewer broken images than this are always tolerated
_SHARE = 0.05  # of a split; more broken images are an error
_ATTEMPTS = 100  # at replacing a broken image


@dataclass(frozen=True)
class ImageData:
    """A dataset in splits, with labels numbered like the model's."""

    name: str
    labels: tuple[str, ...] | None
    """The label names in the order of their numbers, if there are any."""
    classes: int
    train: Split
    validation: Split
    test: Split
    fingerprint: str
    """Changes with the images, the labels, the options and the preprocessing."""
    revision: str | None = None
    """The commit of a Hub dataset."""
    notes: tuple[str, ...] = ()
    """Remarks for the user about choices made while loading."""
    held_out: str = ""
    """The note about held-out test images, if there was a single split."""
    labelled: bool = True
    """Whether the images have labels; if not, all targets are 0."""

    @property
    def broken_notes(self) -> list[str]:
        """One sentence for each split in which unreadable images have been found."""
        return [
            f"{plural(len(split.broken), 'image')} of '{split.name}' could not be read: "
            f"{next(iter(split.broken.values()))}"
            for split in (self.train, self.validation, self.test)
            if split.broken
        ]


@dataclass(eq=False)
class Split:
    """Some rows of a dataset, with labels numbered like the model's; `broken` grows while images are read."""

    name: str
    rows: Rows
    indices: Tensor
    """The selected rows."""
    targets: Tensor
    """Their labels."""
    preprocess: Preprocess
    broken: dict[int, str] = field(default_factory=dict, repr=False)
    """Images that could not be decoded so far: index in this split → name and error."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def readable(self) -> Tensor:
        """A mask of the images that have not been found broken so far."""
        return torch.tensor([number not in self.broken for number in range(len(self))], dtype=torch.bool)

    def image(self, number: int) -> Image:
        """Decode one image, without preprocessing; raise DataError if it cannot be read."""
        found: Image = self._read(number, self.rows.image)
        return found

    def item(self, number: int) -> Any:
        """The input of preprocessing: an image, or the dataset's item for a custom preprocessing."""
        return self._read(number, self.rows.item if self.preprocess.transform else self.rows.image)

    def _read(self, number: int, how: Callable[[int], Any]) -> Any:
        row = int(self.indices[number])
        try:
            return how(row)
        except Exception as error:  # decoders may raise anything
            # The text of an OSError contains the full path, which should not be published in a report.
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise DataError(f"{self.rows.name(row)}: {reason or type(error).__name__}") from error

    def batches(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        count: int | None = None,
        augment: bool = False,
        workers: int = 0,
        skip: int = 0,
    ) -> Iterator[Batch]:
        """Draw `count` minibatches after the first `skip`.

        Without a seed: one pass in order; the last batch may be smaller, and broken images are left out. With a seed:
        each epoch is shuffled, all batches are full, broken images are replaced, and without `count` the iterator is
        endless. Batch k depends only on the seed and k, not on `workers` or earlier batches.
        """
        if batch_size < 1 or skip < 0 or (count is not None and count < 0):
            raise DataError(f"invalid batches: size {batch_size}, count {count}, skip {skip}; give positive numbers")
        if seed is not None and not len(self):
            raise DataError(f"there are no images in '{self.name}' to draw from")
        numbers: Iterable[int] = itertools.count(skip)
        if seed is None:
            numbers = range(skip, -(-len(self) // batch_size))
        if count is not None:
            numbers = itertools.islice(numbers, count)
        return self._load(_Loader(self, batch_size, seed, augment), numbers, workers)

    def _load(self, loader: _Loader, numbers: Iterable[int], workers: int) -> Iterator[Batch]:
        loaded: Iterable[_Loaded] = map(loader.__getitem__, numbers)
        if workers:
            own = torch.Generator().manual_seed(0)  # otherwise the DataLoader uses the global generator
            loaded = DataLoader(loader, batch_size=None, sampler=numbers, num_workers=workers, generator=own)
        for inputs, labels, broken in loaded:
            self.broken.update(broken)
            many = len(self.broken) >= _MANY and len(self.broken) > _SHARE * len(self)
            if many or inputs is None or len(self.broken) == len(self):
                raise DataError(
                    f"{len(self.broken)} images of {len(self)} in '{self.name}' cannot be read: "
                    f"{'; '.join(list(self.broken.values())[:3])}{' …' if len(self.broken) > 3 else ''}. "
                    "Repair or remove them"
                )
            if len(labels):
                yield inputs, labels

    def join(self, other: Split, name: str) -> Split:
        """The union with another split of the same rows."""
        indices, targets = torch.cat([self.indices, other.indices]), torch.cat([self.targets, other.targets])
        return replace(self, name=name, indices=indices, targets=targets, broken={})

    def take(self, limit: int | None, seed: int) -> Split:
        """A random sample of at most `limit` images, in order."""
        if limit is None or limit >= len(self):
            return self
        generator = torch.Generator().manual_seed(derive_seed(seed, "limit"))
        return self._select(torch.randperm(len(self), generator=generator)[:limit].sort().values)

    def divide(self, count: int, *purpose: object) -> tuple[Split, Split]:
        """Draw `count` images, stratified by class; return these and the rest, both in order.

        `purpose` seeds the draw: draws for different purposes are independent.
        """
        # Not `train_test_split(stratify_by_column=…)`: it refuses classes with one image, and draws other images.
        generator = torch.Generator().manual_seed(derive_seed(*purpose))
        # The shuffled images of each class are spread evenly over 0 … 1; the lowest overall are drawn.
        height = torch.empty(len(self), dtype=torch.float64)
        for label in self.targets.unique():
            members = (self.targets == label).nonzero().flatten()
            rank = torch.randperm(len(members), generator=generator)
            height[members] = (rank + torch.rand((), dtype=torch.float64, generator=generator)) / len(members)
        drawn = torch.zeros(len(self), dtype=torch.bool)
        drawn[height.argsort(stable=True)[:count]] = True
        return self._select(drawn), self._select(~drawn)

    def renumber(self, numbers: Tensor) -> Split:
        """Map each label to its new number; leave out images whose new number is negative."""
        kept = numbers[self.targets] >= 0
        return replace(self._select(kept), targets=numbers[self.targets[kept]])

    def _select(self, chosen: Tensor) -> Split:
        return replace(self, indices=self.indices[chosen], targets=self.targets[chosen], broken={})


class BatchCache:
    """Cache of decoded minibatches. Minibatches that need more than `limit` bytes are not kept.

    Example:
        >>> cache = BatchCache((3, 32, 32))
        >>> cache.get("test", 0, lambda: iter([])) is cache.get("test", 0, lambda: iter([]))
        True
    """

    def __init__(self, input_size: tuple[int, ...], limit: int = 256 << 20) -> None:
        self.input_size, self.limit = input_size, limit
        self._kept: dict[str, list[Batch]] = {}

    def size(self, images: int) -> int:
        """The size of a number of images in bytes."""
        return 4 * images * prod(self.input_size)

    def get(self, key: str, images: int, draw: Callable[[], Iterable[Batch]]) -> Iterable[Batch]:
        """Return the minibatches cached under a key, or draw them; `images` is their total number of images."""
        if self.size(images) > self.limit:
            return draw()
        if key not in self._kept:
            self._kept[key] = list(draw())
        return self._kept[key]

    def forget(self, but: str) -> None:
        """Drop all minibatches except those of one key."""
        self._kept = {key: batches for key, batches in self._kept.items() if key == but}


_Loaded = tuple[Tensor | None, Tensor, dict[int, str]]
"""Inputs (None if a broken image could not be replaced), labels, and the images found broken."""


@dataclass(frozen=True, eq=False)
class _Loader(Dataset[_Loaded]):
    """A map-style dataset of minibatches for torch's DataLoader."""

    split: Split
    batch_size: int
    seed: int | None
    augment: bool

    @cached_property
    def _shape(self) -> Callable[[Any], Tensor]:
        return self.split.preprocess.shape(self.augment)

    def __getitem__(self, number: int) -> _Loaded:
        start = number * self.batch_size
        stop = start + self.batch_size if self.seed is not None else min(start + self.batch_size, len(self.split))
        pixels, chosen, broken = [], [], dict[int, str]()
        with _restored_generators():  # timm's transforms draw from the global generators
            for position in range(start, stop):
                drawn = self._draw(position, broken)
                if drawn is not None:
                    if self.augment:
                        own = derive_seed(self.seed, "sample", position)
                        random.seed(own)
                        torch.default_generator.manual_seed(own)  # torch.manual_seed would also seed other devices
                    chosen.append(drawn[0])
                    pixels.append(self._shape(drawn[1]))
                elif self.seed is not None:
                    return None, torch.empty(0, dtype=torch.long), broken
        wanted = self.split.preprocess.input_size
        odd = next((each for each in pixels if each.shape != wanted), None)
        if odd is not None:
            is_, should = ("×".join(map(str, each)) for each in (odd.shape, wanted))
            raise DataError(
                f"'{self.split.name}' has images of different sizes, {is_} and {should}; resize them with "
                "--data-image-size or --preprocess (preprocess= in Python)"
            )
        inputs = self.split.preprocess.normalise(torch.stack(pixels)) if pixels else torch.empty(0)
        return inputs, self.split.targets[chosen], broken

    def _draw(self, position: int, broken: dict[int, str]) -> tuple[int, Any] | None:
        """The image at a position of the order and its index; with a seed, a replacement if it is broken."""
        numbers: Iterable[int] = [position]
        if self.seed is not None:
            size, (epoch, place) = len(self.split), divmod(position, len(self.split))
            others = (derive_seed(self.seed, "instead", position, attempt) % size for attempt in range(_ATTEMPTS))
            numbers = itertools.chain([int(_order(self.seed, epoch, size)[place])], others)
        for number in numbers:
            if number not in self.split.broken and number not in broken:
                try:
                    return number, self.split.item(number)
                except DataError as error:
                    broken[number] = str(error)
        return None


@lru_cache(maxsize=4)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch)))


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit seed from values with a stable `repr`.

    Example:
        >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
        True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@contextmanager
def _restored_generators() -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
