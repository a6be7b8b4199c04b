"""Whether a port was worth it, in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_retarget.evaluation.scorer import Score
from hf_retarget.words import percent

_CLEAR = 2.0  # standard errors


@dataclass(frozen=True)
class Compared:
    """What a verdict looks at: scores on the test images; None for what was not measured."""

    port: Score
    after: Score | None = None
    """Of the port after fine-tuning."""
    unmatched: Score | None = None
    """Of the port without its matching."""
    unmatched_method: str = "naive"
    alternative: Score | None = None
    """Of what a user would do instead."""
    minibatches: int = 0
    """The price of the alternative."""
    control: str = "full"


def judge_port(compared: Compared) -> str:
    """One line: the accuracy, what it is compared with, whether the difference is more than chance, and what next.

    Example:
        >>> score, other = (Score(1.0, top1, None, 400, (), (), ()) for top1 in (0.6, 0.4))
        >>> judge_port(Compared(score, alternative=other, minibatches=10)).partition(";")[0]
        'Worth it: 60.0% of 400 test images, +20.0 points (±3.5) against plain fine-tuning with the same 10 minibatches'
    """
    port, plain, unmatched = compared.port, compared.alternative, compared.unmatched
    ours = compared.after or port
    what = "port and fine-tuning" if compared.after else "the port"
    start = f"{percent(ours.top1)} of {ours.count:,} test images"
    beside = f"; the matching itself was worth {_difference(port, unmatched)}" if unmatched else ""
    if plain is None:
        why = "there is no control"
        if compared.control != "full":
            why = "not compared with plain fine-tuning; --control full does"
        return f"Undecided: {start}{beside}; {why}."
    against = f"{_difference(ours, plain)} against plain fine-tuning with the same {compared.minibatches:,} minibatches"
    if not _is_clear(ours, plain):
        return f"Undecided: {start}, {against}{beside}; {what} may be as good, more test images would tell."
    if plain.top1 > ours.top1:
        return f"Not worth it: {start}, {against}{beside}; fine-tune the new base directly."
    if unmatched and not (_is_clear(port, unmatched) and port.top1 > unmatched.top1):
        method = compared.unmatched_method
        return f"Worth it, but not for its permutation: {start}, {against}{beside}; --method {method} is as good."
    further = "fine-tune longer to go further" if compared.after else "fine-tune it on to go further"
    return f"Worth it: {start}, {against}{beside}; {further}."


def _difference(ours: Score, theirs: Score) -> str:
    words = "" if _is_clear(ours, theirs) else ", within chance"
    return f"{100 * (ours.top1 - theirs.top1):+.1f} points (±{100 * _error(ours, theirs):.1f}{words})"


def _error(ours: Score, theirs: Score) -> float:
    """The standard error of the difference, as if the two had been tested on different images: on the safe side."""
    return math.sqrt(sum(each.top1 * (1 - each.top1) / each.count for each in (ours, theirs)))


def _is_clear(ours: Score, theirs: Score) -> bool:
    return abs(ours.top1 - theirs.top1) > _CLEAR * _error(ours, theirs)
