"""Labelled images, split and ready to be drawn in batches that depend on nothing but a seed and a number."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hf_retarget.data.preprocess import Preprocess
from hf_retarget.data.rows import Rows
from hf_retarget.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Batch = tuple[Any, Tensor]
"""Inputs and labels."""

_FEW = 5  # broken images that are always forgiven, less one
_SHARE = 0.05  # of the images of a split that may be broken
_ATTEMPTS = 100  # to replace a broken image by another one


@dataclass(frozen=True)
class ImageData:
    """Everything a port needs to know about its data."""

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
    """What was decided on the way and the user should know."""


@dataclass(frozen=True, eq=False)
class Split:
    """Some rows of a source, with the labels the model knows."""

    name: str
    rows: Rows
    indices: Tensor
    """Which rows."""
    targets: Tensor
    """Their labels, without decoding an image."""
    preprocess: Preprocess
    broken: dict[int, str] = field(default_factory=dict, repr=False)
    """The images met so far that cannot be decoded: their number in this split → their name and what is wrong."""

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, number: int) -> Image:
        """One picture as it was before preprocessing, for people to look at."""
        row = int(self.indices[number])
        try:
            return self.rows.image(row)
        except Exception as error:  # decoders raise whatever they like
            raise DataError(f"{self.name}: {_complaint(self.rows, row, error)}") from error

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
        """Draw batches, `count` of them after leaving out the first `skip`.

        Without a seed: one pass in order; the last batch may be smaller, and broken images are left out. With a seed:
        shuffled anew for each epoch, all batches full, broken images replaced, endless without `count`. What is in
        batch k depends only on the seed and on k, not on `workers` nor on what was drawn before.
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
        return self._checked(_Loader(self, batch_size, seed, augment), numbers, workers)

    def _checked(self, loader: _Loader, numbers: Iterable[int], workers: int) -> Iterator[Batch]:
        found = _in_processes(loader, numbers, workers) if workers else map(loader.__getitem__, numbers)
        for inputs, labels, broken in found:
            self.broken.update(broken)
            many = len(self.broken) >= _FEW and len(self.broken) > _SHARE * len(self)
            if many or inputs is None or len(self.broken) == len(self):
                raise DataError(
                    f"{len(self.broken)} images of {len(self)} in '{self.name}' cannot be read: "
                    f"{'; '.join(list(self.broken.values())[:3])}{' …' if len(self.broken) > 3 else ''}. "
                    "Mend or remove them"
                )
            if len(labels):
                yield inputs, labels


_Loaded = tuple[Tensor | None, Tensor, dict[int, str]]
"""Inputs (None if a broken image could not be replaced), labels, and what was found to be broken."""


@dataclass(frozen=True, eq=False)
class _Loader(Dataset[_Loaded]):
    """Batch k of a split for any k; a map-style dataset for torch's DataLoader."""

    split: Split
    batch_size: int
    seed: int | None
    augment: bool

    def __getitem__(self, number: int) -> _Loaded:
        start = number * self.batch_size
        stop = start + self.batch_size if self.seed is not None else min(start + self.batch_size, len(self.split))
        shape = _shape(self.split.preprocess, self.augment)
        pixels, chosen, broken = [], [], dict[int, str]()
        with _own_randomness():
            for position in range(start, stop):
                for candidate in self._candidates(position):
                    picture = self._picture(candidate, broken)
                    if picture is not None:
                        if self.augment:
                            _seed_all(derive_seed(self.seed, "sample", position))
                        pixels.append(shape(picture))
                        chosen.append(candidate)
                        break
                else:
                    if self.seed is not None:
                        return None, torch.empty(0, dtype=torch.long), broken
        inputs = self.split.preprocess.normalise(torch.stack(pixels)) if pixels else torch.empty(0)
        return inputs, self.split.targets[chosen], broken

    def _candidates(self, position: int) -> Iterator[int]:
        """The image whose turn it is, and if a seed allows to replace it, others."""
        size = len(self.split)
        if self.seed is None:
            yield position
            return
        epoch, place = divmod(position, size)
        yield int(_order(self.seed, epoch, size)[place])
        for attempt in range(_ATTEMPTS):
            yield derive_seed(self.seed, "instead", position, attempt) % size

    def _picture(self, number: int, broken: dict[int, str]) -> Image | None:
        if number in self.split.broken or number in broken:
            return None
        row = int(self.split.indices[number])
        try:
            return self.split.rows.image(row)
        except Exception as error:  # decoders raise whatever they like
            broken[number] = _complaint(self.split.rows, row, error)
            return None


def _in_processes(loader: _Loader, numbers: Iterable[int], workers: int) -> Iterator[_Loaded]:
    # A generator of its own: else the DataLoader draws from the global one.
    own = torch.Generator().manual_seed(0)
    return iter(DataLoader(loader, batch_size=None, sampler=numbers, num_workers=workers, generator=own))


@lru_cache(maxsize=4)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch)))


@lru_cache(maxsize=4)
def _shape(preprocess: Preprocess, augment: bool) -> Callable[[Image], Tensor]:
    return preprocess.shape(augment)


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from anything that has a stable `repr`.

    Example:
        >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
        True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@contextmanager
def _own_randomness() -> Iterator[None]:
    """timm's transforms draw from the global generators; leave these as they were."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would change those of all devices


def _complaint(rows: Rows, row: int, error: Exception) -> str:
    # An error of the system names the whole path, which is nobody's business who reads a report.
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{rows.name(row)}: {words or type(error).__name__}"
