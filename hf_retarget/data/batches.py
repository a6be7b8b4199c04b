"""Labelled images in splits, and minibatches of them that depend only on a seed and a number."""

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
_SHARE = 0.05  # of a split; a larger share of broken images is an error
_ATTEMPTS = 100  # to replace a broken image by another one


@dataclass(frozen=True)
class ImageData:
    """A dataset that is split, and whose labels are numbered as the model numbers them."""

    name: str
    labels: tuple[str, ...] | None
    """The label names in the order of their numbers, if there are names."""
    classes: int
    train: Split
    validation: Split
    test: Split
    fingerprint: str
    """Changes with the images, the labels, the options and the preprocessing."""
    revision: str | None = None
    """The commit of a Hub dataset."""
    notes: tuple[str, ...] = ()
    """Choices made while loading that the user should know about."""
    held_out: str = ""
    """The one of `notes` about test images that were held out, if there was a single split to divide."""
    labelled: bool = True
    """Whether the images have labels; without, all targets are 0."""

    @property
    def broken_notes(self) -> list[str]:
        """One sentence for each split with images that could not be read so far."""
        return [
            f"{plural(len(split.broken), 'image')} of '{split.name}' could not be read: "
            f"{next(iter(split.broken.values()))}"
            for split in (self.train, self.validation, self.test)
            if split.broken
        ]


@dataclass(frozen=True, eq=False)
class Split:
    """Some rows of a dataset, with labels numbered as the model numbers them."""

    name: str
    rows: Rows
    indices: Tensor
    """Which rows."""
    targets: Tensor
    """Their labels, known without decoding an image."""
    preprocess: Preprocess
    broken: dict[int, str] = field(default_factory=dict, repr=False)
    """Images found so far that cannot be decoded: number in this split → name and error."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def readable(self) -> Tensor:
        """Which images have not been found broken so far."""
        return torch.tensor([number not in self.broken for number in range(len(self))], dtype=torch.bool)

    def image(self, number: int) -> Image:
        """Decode one image, without preprocessing; a DataError names the image and says why it cannot be read."""
        found: Image = self._read(number, self.rows.image)
        return found

    def item(self, number: int) -> Any:
        """What preprocessing starts from: an image, or for one of the user's own, what the dataset holds."""
        return self._read(number, self.rows.item if self.preprocess.transform else self.rows.image)

    def _read(self, number: int, how: Callable[[int], Any]) -> Any:
        row = int(self.indices[number])
        try:
            return how(row)
        except Exception as error:  # decoders raise errors of every kind
            # The text of an OSError contains the full path, which does not belong in a published report.
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
        """Draw `count` minibatches, without the first `skip`.

        Without a seed: one pass in order; the last batch may be smaller, and broken images are left out. With a seed:
        each epoch is shuffled, all batches are full, broken images are replaced, and without `count` the iterator is
        endless. Batch k depends only on the seed and on k, not on `workers` or on earlier batches.
        """
        if batch_size < 1 or skip < 0 or (count is not None and count < 0):
            raise DataError(f"no batches of size {batch_size}, count {count}, skip {skip}; give positive numbers")
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
            own = torch.Generator().manual_seed(0)  # or the DataLoader draws from the global generator
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
        """These images and those of another split of the same rows."""
        indices, targets = torch.cat([self.indices, other.indices]), torch.cat([self.targets, other.targets])
        return replace(self, name=name, indices=indices, targets=targets, broken={})

    def take(self, limit: int | None, seed: int) -> Split:
        """At most `limit` images, drawn at random and kept in order."""
        if limit is None or limit >= len(self):
            return self
        generator = torch.Generator().manual_seed(derive_seed(seed, "limit"))
        return self._select(torch.randperm(len(self), generator=generator)[:limit].sort().values)

    def divide(self, count: int, *purpose: object) -> tuple[Split, Split]:
        """Draw `count` images, the same share of each class; return these and the others, both kept in order.

        `purpose` seeds the draw: draws for different purposes are independent.
        """
        # Not `train_test_split(stratify_by_column=…)`: it refuses classes of one image, and would draw other images.
        generator = torch.Generator().manual_seed(derive_seed(*purpose))
        # The shuffled images of each class are spread evenly over 0 … 1; the lowest of all are drawn.
        height = torch.empty(len(self), dtype=torch.float64)
        for label in self.targets.unique():
            members = (self.targets == label).nonzero().flatten()
            rank = torch.randperm(len(members), generator=generator)
            height[members] = (rank + torch.rand((), dtype=torch.float64, generator=generator)) / len(members)
        drawn = torch.zeros(len(self), dtype=torch.bool)
        drawn[height.argsort(stable=True)[:count]] = True
        return self._select(drawn), self._select(~drawn)

    def renumber(self, numbers: Tensor) -> Split:
        """Replace each label by its new number, and leave out images whose new number is negative."""
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
        """Bytes that a number of images takes."""
        return 4 * images * prod(self.input_size)

    def get(self, key: str, images: int, draw: Callable[[], Iterable[Batch]]) -> Iterable[Batch]:
        """Return the minibatches kept under a key, or draw them; `images` is how many there will be."""
        if self.size(images) > self.limit:
            return draw()
        if key not in self._kept:
            self._kept[key] = list(draw())
        return self._kept[key]

    def forget(self, but: str) -> None:
        """Forget all minibatches except those of one key."""
        self._kept = {key: batches for key, batches in self._kept.items() if key == but}


_Loaded = tuple[Tensor | None, Tensor, dict[int, str]]
"""Inputs (None if a broken image could not be replaced), labels, and the images found broken."""


@dataclass(frozen=True, eq=False)
class _Loader(Dataset[_Loaded]):
    """Batch k of a split for any k; a map-style dataset for torch's DataLoader."""

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
        with _restored_generators():  # from which timm's transforms draw
            for position in range(start, stop):
                drawn = self._draw(position, broken)
                if drawn is not None:
                    if self.augment:
                        own = derive_seed(self.seed, "sample", position)
                        random.seed(own)
                        torch.default_generator.manual_seed(own)  # torch.manual_seed would also seed all devices
                    chosen.append(drawn[0])
                    pixels.append(self._shape(drawn[1]))
                elif self.seed is not None:
                    return None, torch.empty(0, dtype=torch.long), broken
        wanted = self.split.preprocess.input_size
        odd = next((each for each in pixels if each.shape != wanted), None)
        if odd is not None:
            is_, should = ("×".join(map(str, each)) for each in (odd.shape, wanted))
            raise DataError(
                f"'{self.split.name}' has images of {is_} and of {should}, and they are used as they are; say how to "
                "make them alike with --data-image-size or --preprocess (preprocess= in Python)"
            )
        inputs = self.split.preprocess.normalise(torch.stack(pixels)) if pixels else torch.empty(0)
        return inputs, self.split.targets[chosen], broken

    def _draw(self, position: int, broken: dict[int, str]) -> tuple[int, Any] | None:
        """The image at a position of the order, or with a seed, one that replaces it; and its number."""
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
    """Derive a seed of 63 bits from anything that has a stable `repr`.

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
