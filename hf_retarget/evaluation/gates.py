"""Gates: sanity checks before any verdict, so that no port is recommended on inputs that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_retarget.document import CLEAR, GateFacts, RelationFacts
from hf_retarget.evaluation.scorer import Score, measure_lead
from hf_retarget.words import percent, plural

_FAR_BELOW = 3.0  # standard errors below chance from which labels must be in another order
UNLIKE = 0.2
"""Cosine of the old base and the tuned model below which it was tuned from another base: models that were trained apart
have less, and even long training from random weights leaves more."""
_NAMED = 3  # missing classes to name


@dataclass(frozen=True)
class Evidence:
    """The input of gates; None where unknown."""

    relation: RelationFacts | None = None
    """The distances between the three models."""
    head_tuned: bool | None = None
    """Whether the head of the tuned model differs from the old base's."""
    counts: Mapping[str, Sequence[int]] | None = None
    """The number of `training` and `test` images of each class."""
    labels: Sequence[str] | None = None
    """The names of the classes."""
    tuned: Score | None = None
    """The tuned model's score on the images to choose by: accuracy or, without labels, agreement with itself."""
    labelled: bool = True
    """Whether that score is an accuracy."""
    tests: Mapping[str, Score] | None = None
    """Test scores of the port (`""`) and, by label, of contenders without gradients."""


@dataclass(frozen=True)
class Gate:
    """One sanity check."""

    name: str
    looks_at: str
    needs: str
    """The field of the evidence that is required."""
    find: Callable[[Evidence, Any], str]
    """Describes what is wrong, given the evidence and that field; empty if nothing is."""
    advice: str
    is_error: bool = False
    """Whether it rules out a port; otherwise it is a warning that leads the verdict."""
    in_verdict: bool = False
    """Whether the verdict itself already says so."""


def _find_untuned(seen: Evidence, bases: RelationFacts) -> str:
    same = bases.length == 0 and not seen.head_tuned
    return "the tuned model is the old base: there is no fine-tuning to move" if same else ""


def _find_head_only(seen: Evidence, bases: RelationFacts) -> str:
    only = bases.length == 0 and seen.head_tuned
    return "the weights of the tuned model are those of the old base, except for its head" if only else ""


def _find_same_base(seen: Evidence, bases: RelationFacts) -> str:
    return "the new base is the old base: the tuned model is on it already" if bases.apart == 0 else ""


def _find_tuned_base(seen: Evidence, bases: RelationFacts) -> str:
    return "the new base is the tuned model: there is nothing to move" if bases.to_new == 0 != bases.apart else ""


def _find_swapped(seen: Evidence, bases: RelationFacts) -> str:
    if bases.to_new is None or bases.length is None or not 0 < bases.to_new < bases.length:
        return ""
    digits = next(n for n in range(9) if f"{bases.to_new:.{n}%}" != f"{bases.length:.{n}%}" or n == 8)
    far = f"{bases.to_new:.{digits}%} of the old base's norm away, not {bases.length:.{digits}%}"
    return f"the tuned model is closer to the new base than to the old one ({far})"


def _find_another_base(seen: Evidence, bases: RelationFacts) -> str:
    if bases.resemblance is None or bases.resemblance >= UNLIKE:
        return ""
    return f"the tuned model does not resemble the old base (cosine {bases.resemblance:.3f})"


def _find_missing(seen: Evidence, counts: Mapping[str, Sequence[int]]) -> str:
    words = []
    for what, images in counts.items():
        names = [f"'{seen.labels[each]}'" if seen.labels else str(each) for each, n in enumerate(images) if not n]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        words += [f"there is no {what} image of {', '.join(names[:_NAMED])}{more}"] if names else []
    return ", and ".join(words)


def _find_below_chance(seen: Evidence, tuned: Score) -> str:
    chance, error = _guess(tuned)
    if not seen.labelled or tuned.top1 >= chance - _FAR_BELOW * error:
        return ""
    return f"the tuned model has {percent(tuned.top1)} of the images right, and guessing {percent(chance)}"


def _find_chance(seen: Evidence, tuned: Score) -> str:
    if not seen.labelled:
        same = len(set(tuned.predictions)) == 1 and tuned.count > 1
        return f"the tuned model gives the same answer to all {tuned.count:,} images" if same else ""
    chance, error = _guess(tuned)
    if tuned.top1 > chance + CLEAR * error:
        return ""
    right = f"{percent(tuned.top1)} of {plural(tuned.count, 'image')} right"
    return f"the tuned model has {right}, not significantly more than guessing ({percent(chance)})"


def _guess(score: Score) -> tuple[float, float]:
    """The accuracy of guessing, and its standard error on this number of images."""
    chance = 1 / max(len(score.per_class), 2)
    return chance, math.sqrt(chance * (1 - chance) / max(score.count, 1))


def _find_simpler(seen: Evidence, tests: Mapping[str, Score]) -> str:
    ours = tests[""]
    leads = {label: measure_lead(score, ours) for label, score in tests.items() if label}
    ahead = [label for label, lead in leads.items() if lead.is_clear and lead.value > 0]
    if not ahead:
        return ""
    best = max(ahead, key=lambda label: leads[label].value)
    return f"{best} has {percent(tests[best].top1)} of the test images right, and the port {percent(ours.top1)}"


GATES = (
    Gate(
        "untuned",
        "whether the tuned model differs from the old base",
        "relation",
        _find_untuned,
        "name the fine-tuned model with --src-ft",
        is_error=True,
    ),
    Gate(
        "same base",
        "whether the new base differs from the old one",
        "relation",
        _find_same_base,
        "name another one with --new-base",
        is_error=True,
    ),
    Gate(
        "tuned base",
        "whether the new base differs from the tuned model",
        "relation",
        _find_tuned_base,
        "name another one with --new-base",
        is_error=True,
    ),
    Gate(
        "head only",
        "whether more than the head was tuned",
        "relation",
        _find_head_only,
        "a head is fitted on the new base in seconds (--method head)",
    ),
    Gate(
        "swapped",
        "whether the tuned model is closer to the old base than to the new one",
        "relation",
        _find_swapped,
        "if they were mistaken for each other, swap --src-base and --new-base",
    ),
    Gate(
        "another base",
        "whether the tuned model resembles the old base",
        "relation",
        _find_another_base,
        "name the base that it was tuned from with --src-base",
    ),
    Gate(
        "missing classes",
        "whether there are training and test images of every class",
        "counts",
        _find_missing,
        "add some, or say which classes there are with --data-classes",
    ),
    Gate(
        "below chance",
        "whether the tuned model is worse than guessing",
        "tuned",
        _find_below_chance,
        "bring the labels into the order of the model, and use the images that it was tuned on",
        is_error=True,
    ),
    Gate(
        "chance",
        "whether the tuned model is better than guessing",
        "tuned",
        _find_chance,
        "see whether these are the images, labels and preprocessing that it was tuned with",
    ),
    Gate(
        "simpler",
        "whether nothing without gradients is better than the port",
        "tests",
        _find_simpler,
        "take that instead",
        in_verdict=True,
    ),
)
"""All gates, in order."""


def look_at_gates(seen: Evidence) -> tuple[GateFacts, ...]:
    """The findings of all gates."""
    found = []
    for gate in GATES:
        needed = getattr(seen, gate.needs)
        words = None if needed is None else gate.find(seen, needed)
        found.append(GateFacts(gate.name, gate.looks_at, f"{words}; {gate.advice}" if words else words))
    return tuple(found)


def list_errors(found: Iterable[GateFacts]) -> list[str]:
    """Findings that rule out a port."""
    errors = {gate.name for gate in GATES if gate.is_error}
    return [each.found for each in found if each.found and each.name in errors]


def list_warnings(found: Iterable[GateFacts]) -> list[str]:
    """Findings that lead the verdict."""
    leading = {gate.name for gate in GATES if not gate.is_error and not gate.in_verdict}
    return [each.found for each in found if each.found and each.name in leading]
