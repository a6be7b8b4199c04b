"""Minibatches that are wanted again: kept while they are small, drawn anew otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from hf_retarget.data.images import Batch


@dataclass(frozen=True)
class Drawn:
    """Decoded images by what they are for. Each use may take up to `room` bytes; what needs more is not kept.

    Example:
        >>> drawn = Drawn((3, 32, 32))
    """

    image: tuple[int, ...]
    """The shape of one."""
    room: int = 256 << 20
    _kept: dict[str, list[Batch]] = field(default_factory=dict, repr=False)

    def size(self, images: int) -> int:
        """Bytes of so many images.

        Example:
            >>> Drawn((3, 32, 32)).size(100)
            1228800
        """
        return 4 * images * prod(self.image)

    def get(self, what: str, images: int, draw: Callable[[], Iterable[Batch]]) -> Iterable[Batch]:
        """The minibatches for a use: as they were kept, or as `draw` makes them."""
        if self.size(images) > self.room:
            return draw()
        if what not in self._kept:
            self._kept[what] = list(draw())
        return self._kept[what]

    def forget(self, but: str) -> None:
        """Make room for one use."""
        for what in set(self._kept) - {but}:
            del self._kept[what]
