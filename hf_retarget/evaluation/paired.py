"""Two models on the same images: where they differ, and whether that is more than chance."""

from __future__ import annotations

import math

from hf_retarget.document import Lead
from hf_retarget.evaluation.scorer import Score


def measure_lead(ours: Score, theirs: Score) -> Lead:
    """How far one is ahead of the other."""
    return Lead(ours.top1 - theirs.top1, paired_error(ours, theirs))


def paired_error(ours: Score, theirs: Score) -> float:
    """The standard error of the difference of two accuracies on the same images: only where they differ counts.

    Example:
        >>> answers = ((0, 0, 0, 0), (0, 1, 1, 0))
        >>> ours, theirs = (Score(1.0, 0.5, None, 4, (), (), said, (0, 0, 1, 1)) for said in answers)
        >>> round(paired_error(ours, theirs), 3), paired_error(ours, ours)
        (0.354, 0.0)
    """
    only_ours, only_theirs = count_flips(ours, theirs)
    count = max(ours.count, 1)
    return math.sqrt(max(only_ours + only_theirs - (only_ours - only_theirs) ** 2 / count, 0)) / count


def count_flips(before: Score, after: Score) -> tuple[int, int]:
    """Images that only the model before has right (negative flips), and that only the one after has right."""
    pairs = list(zip(before.right, after.right, strict=True))
    return sum(one and not two for one, two in pairs), sum(two and not one for one, two in pairs)
