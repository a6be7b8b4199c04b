"""Whether a port was worth it, in one line: compared with what a user would do instead, on the same test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_retarget.document import Lead
from hf_retarget.evaluation.scorer import measure_lead
from hf_retarget.words import percent

if TYPE_CHECKING:
    from hf_retarget.porting.contest import Entry


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
    unmatched = find_unmatched(entries, port)
    rivals = [each for each in others if each not in (tuned, unmatched)]
    leads = {each.contender.name: measure_lead(ours, each.test) for each in others}
    compared = "; ".join(f"{leads[each.contender.name].sentence} against {each.contender.label}" for each in rivals)
    gain = "matched steps were" if port.contender.course else "the matching itself was"
    worth = measure_lead(port.test, unmatched.test) if unmatched else None
    beside = f"; {gain} worth {worth.sentence}" if worth else ""
    facts = f"{what}: {start}{kept}{f'; {compared}' if compared else ''}{beside}"
    better = [each for each in others if each is not tuned and _is_behind(leads[each.contender.name])]
    if better:
        best = max(better, key=lambda each: each.test.top1)
        return f"Not worth it: {facts}; {best.contender.instead}."
    if port.contender.instead and not port.contender.step:
        return f"No port needed: {facts}; {port.contender.instead}."
    if not any(each.contender.is_alternative for each in rivals):
        return f"Undecided: {facts}; not compared with plain fine-tuning (--control full does)."
    if not all(leads[each.contender.name].is_clear for each in rivals):
        return f"Undecided: {facts}; more test images would tell."
    if worth and not (worth.is_clear and worth.value > 0):
        return f"Worth it, but not for its permutation: {facts}; the matching is not shown to have helped."
    further = "fine-tune longer to go further" if result is not port else "fine-tune it on to go further"
    return f"Worth it: {facts}; {further}."


def find_unmatched(entries: Sequence[Entry], port: Entry) -> Entry | None:
    """The port without its matching, if that entered."""
    return next((each for each in entries if each.contender.name == port.contender.without_matching), None)


def _is_behind(lead: Lead) -> bool:
    return lead.is_clear and lead.value < 0
