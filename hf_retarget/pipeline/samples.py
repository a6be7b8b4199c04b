"""A few test images with what two models say about them, for people to look at."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_retarget.data import Split
from hf_retarget.data.images import derive_seed
from hf_retarget.evaluate import Score

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("only ours", "only theirs", "neither", "both")
"""Who is right."""

_RIVALS = ("control", "masked", "naive")  # the first that there is, unless it is the port itself
_SIDE = 112  # pixels, at most
_SMALL = 4096  # bytes up to which a picture is kept exactly
_RULE = "as many of each kind as there are, up to a share; within a kind drawn at random with the seed of the port"


@dataclass(frozen=True)
class Samples:
    """The chosen images, and how often each kind occurs among all test images."""

    ours: str
    """Whose predictions are shown: the name of a score."""
    theirs: str | None
    counts: Mapping[str, int] = field(default_factory=dict)
    images: tuple[dict[str, Any], ...] = ()
    thumbnails: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """By the number of the image in the test split: a small PNG or JPEG."""

    def to_json(self) -> dict[str, Any]:
        """All but the pictures, as plain JSON values."""
        return {
            "ours": self.ours,
            "theirs": self.theirs,
            "rule": _RULE,
            "counts": dict(self.counts),
            "images": list(self.images),
        }


def draw_samples(test: Split, scores: Mapping[str, Score], count: int, seed: int) -> Samples:
    """Choose images on which the port and what it is compared with agree and disagree, as the rule says."""
    ours = "finetuned" if "finetuned" in scores else "port"
    theirs = next((name for name in _RIVALS if name in scores and scores[name] is not scores[ours]), None)
    mine = scores[ours].predictions
    other = scores[theirs].predictions if theirs else mine
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    read = (number for number in range(len(test)) if number not in test.broken)  # a broken one has no prediction
    for number, one, two in zip(read, mine, other, strict=False):
        label = int(test.targets[number])
        said = {ours: one} | ({theirs: two} if theirs else {})
        kinds[_kind(one == label, two == label)].append(
            (number, {"number": number, "label": label, "predictions": said})
        )
    chosen: list[dict[str, Any]] = []
    thumbnails: dict[int, bytes] = {}
    present = [kind for kind in KINDS if kinds[kind]]
    for place, kind in enumerate(present):
        share = (count - len(chosen)) // (len(present) - place)
        order = random.Random(derive_seed(seed, "samples", kind)).sample(kinds[kind], min(share, len(kinds[kind])))
        for number, facts in sorted(order, key=lambda each: each[0]):
            if (picture := _thumbnail(test, number)) is not None:
                thumbnails[number] = picture
                chosen.append(facts | {"kind": kind})
    return Samples(ours, theirs, {kind: len(each) for kind, each in kinds.items()}, tuple(chosen), thumbnails)


def _kind(ours: bool, theirs: bool) -> str:
    return "both" if ours and theirs else "only ours" if ours else "only theirs" if theirs else "neither"


def _thumbnail(test: Split, number: int) -> bytes | None:
    """The image, small, as PNG or JPEG; None if it cannot be shown, which is no reason to fail."""
    try:
        image = test.image(number)
        small = image.convert("L" if image.mode in ("1", "L") else "RGB")
        small.thumbnail((_SIDE, _SIDE))
        exact = _encode(small, format="PNG")
        return exact if len(exact) <= _SMALL else min(exact, _encode(small, format="JPEG", quality=80), key=len)
    except Exception:  # decoders raise whatever they like
        return None


def _encode(image: Image, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **how)
    return buffer.getvalue()
