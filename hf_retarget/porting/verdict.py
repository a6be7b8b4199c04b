"""Whether a port was worth it, in one line: compared with what a user would do instead, on the same test images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_retarget.evaluation.scorer import Score
from hf_retarget.words import percent

if TYPE_CHECKING:
    from hf_retarget.porting.contest import Entry

_CLEAR = 2.0  # standard errors


def paired_error(ours: Score, theirs: Score) -> float:
    """The standard error of the difference of two accuracies on the same images: only where they differ counts.

    Example:
        >>> answers = ((0, 0, 0, 0), (0, 1, 1, 0))
        >>> ours, theirs = (Score(1.0, 0.5, None, 4, (), (), said, (0, 0, 1, 1)) for said in answers)
        >>> round(paired_error(ours, theirs), 3), paired_error(ours, ours)
        (0.354, 0.0)
    """
    pairs = list(zip(ours.right, theirs.right, strict=True))
    only_ours, only_theirs = (sum(one and not two for one, two in pairs), sum(two and not one for one, two in pairs))
    count = max(len(pairs), 1)
    return math.sqrt(max(only_ours + only_theirs - (only_ours - only_theirs) ** 2 / count, 0)) / count


def count_flips(before: Score, after: Score) -> tuple[int, int]:
    """Images that only the model before has right (negative flips), and that only the one after has right."""
    pairs = list(zip(before.right, after.right, strict=True))
    return sum(one and not two for one, two in pairs), sum(two and not one for one, two in pairs)


def judge_port(entries: Sequence[Entry], port: Entry, result: Entry, *, labelled: bool = True) -> str:
    """One line: what won, what it is compared with, whether differences are more than chance, and what to do next."""
    ours = result.test
    what = result.contender.label if result is port else f"{port.contender.label}, fine-tuned on"
    start = f"{percent(ours.top1)} {'' if labelled else 'agreement with the tuned model '}on {ours.count:,} test images"
    others = [each for each in entries if each.contender.instead and each is not port]
    tuned = next((each for each in others if each.contender.name == "tuned"), None)
    kept = ""
    if tuned is not None and labelled and tuned.test.top1:
        kept = f", {ours.top1 / tuned.test.top1:.0%} of the tuned model's {percent(tuned.test.top1)}"
    rivals = [each for each in others if each is not tuned]
    compared = "; ".join(f"{_difference(ours, each.test)} against {each.contender.label}" for each in rivals)
    unmatched = next((each for each in entries if each.contender.name == port.contender.without_matching), None)
    gain = "matched steps were" if port.contender.course else "the matching itself was"
    beside = f"; {gain} worth {_difference(port.test, unmatched.test)}" if unmatched else ""
    facts = f"{what}: {start}{kept}{f'; {compared}' if compared else ''}{beside}"
    better = [each for each in rivals if _is_clear(each.test, ours) and each.test.top1 > ours.top1]
    if better:
        best = max(better, key=lambda each: each.test.top1)
        return f"Not worth it: {facts}; {best.contender.instead}."
    if port.contender.instead:
        return f"No port needed: {facts}; {port.contender.instead}."
    if not any(each.contender.is_alternative for each in rivals):
        return f"Undecided: {facts}; not compared with plain fine-tuning (--control full does)."
    if not all(_is_clear(ours, each.test) for each in rivals):
        return f"Undecided: {facts}; more test images would tell."
    if unmatched and not (_is_clear(port.test, unmatched.test) and port.test.top1 > unmatched.test.top1):
        return f"Worth it, but not for its permutation: {facts}; without matching it is as good."
    further = "fine-tune longer to go further" if result is not port else "fine-tune it on to go further"
    return f"Worth it: {facts}; {further}."


def _difference(ours: Score, theirs: Score) -> str:
    words = "" if _is_clear(ours, theirs) else ", not shown to differ"
    return f"{100 * (ours.top1 - theirs.top1):+.1f} points (±{100 * paired_error(ours, theirs):.1f}{words})"


def _is_clear(ours: Score, theirs: Score) -> bool:
    return abs(ours.top1 - theirs.top1) > _CLEAR * paired_error(ours, theirs)
