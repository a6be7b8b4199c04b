"""Whether a port was worth it, in one honest line."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hf_retarget.evaluate import Score

_CLEAR = 2.0  # standard errors


def judge_port(scores: Mapping[str, Score], *, minibatches: int, control: str) -> str:
    """One line: the accuracy, what it is compared with, whether the difference is more than chance, and what next.

    `minibatches` is the price of the control. What the matching is worth is seen against the port without it: the
    naive one, or, if its steps were masked, the one with the mask alone. Fine-tuning after the port does not count.

    Example:
        >>> score = Score(1.0, 0.6, None, 400, (), (), ())
        >>> other = Score(1.0, 0.4, None, 400, (), (), ())
        >>> line = judge_port({"port": score, "control": other}, minibatches=10, control="full")
        >>> line.partition(";")[0]
        'Worth it: 60.0% of 400 test images, +20.0 points (±3.5) against plain fine-tuning with the same 10 minibatches'
    """
    name = "finetuned" if "finetuned" in scores else "port"
    ours = scores[name]
    what = "port and fine-tuning" if name == "finetuned" else "the port"
    start = f"{ours.top1:.1%} of {ours.count:,} test images"
    rival = "masked" if "masked" in scores else "naive"
    port, other = scores["port"], scores.get(rival)
    if other is port:  # the port is the naive one
        other = None
    beside = f"; the matching itself was worth {_difference(port, other)}" if other else ""
    if "control" not in scores:
        why = "not compared with plain fine-tuning; --control full does" if control != "full" else "there is no control"
        return f"Undecided: {start}{beside}; {why}."
    plain = scores["control"]
    against = f"{_difference(ours, plain)} against plain fine-tuning with the same {minibatches:,} minibatches"
    if not _is_clear(ours, plain):
        return f"Undecided: {start}, {against}{beside}; {what} may be as good, more test images would tell."
    if plain.top1 > ours.top1:
        return f"Not worth it: {start}, {against}{beside}; fine-tune the new base directly."
    if other and not (_is_clear(port, other) and port.top1 > other.top1):
        method = "naive-sign" if rival == "masked" else "naive"
        return f"Worth it, but not for its permutation: {start}, {against}{beside}; --method {method} is as good."
    further = "fine-tune it on to go further" if name == "port" else "fine-tune longer to go further"
    return f"Worth it: {start}, {against}{beside}; {further}."


def _difference(ours: Score, theirs: Score) -> str:
    words = "" if _is_clear(ours, theirs) else ", within chance"
    return f"{100 * (ours.top1 - theirs.top1):+.1f} points (±{100 * _error(ours, theirs):.1f}{words})"


def _error(ours: Score, theirs: Score) -> float:
    """The standard error of the difference, as if the two had been tested on different images: on the safe side."""
    return math.sqrt(sum(each.top1 * (1 - each.top1) / each.count for each in (ours, theirs)))


def _is_clear(ours: Score, theirs: Score) -> bool:
    return abs(ours.top1 - theirs.top1) > _CLEAR * _error(ours, theirs)
