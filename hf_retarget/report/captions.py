"""What one sees in each chart and whether it is good, in a sentence or two that hold for the port at hand."""

from __future__ import annotations

from typing import Any

from hf_retarget.report.classes import list_classes, ours, theirs
from hf_retarget.report.curves import chance, list_paid, list_walks
from hf_retarget.report.neurons import list_groups
from hf_retarget.report.page import number, percent

Document = dict[str, Any]


def caption_curve(document: Document) -> str:
    """On the accuracy along the trajectory."""
    best, guess = document["steps"][document["best_step"] - 1], chance(document)
    words = (
        f"Each step adds a little more of the fine-tuning to the new base. The port is best at step {best['step']}: "
        f"{percent(best['top1'])}; guessing gives {percent(guess)}. "
    )
    walks = list_walks(document)
    rival = "masked" if "masked" in walks else "naive"
    if rival in walks:
        words += _compare(document, rival, best["top1"], max(each["top1"] for each in walks[rival]))
    last = document["steps"][-1]
    if best["top1"] > last["top1"] + 0.02:
        words += f" After the best step it falls to {percent(last['top1'])}, so the port stops at the best one."
    return words.strip()


def _compare(document: Document, rival: str, best: float, top: float) -> str:
    """On what the port would be without matching."""
    mask = "the mask, which takes of each step only what goes downhill for the new base"
    if document["recipe"]["port"]["method"] == "naive-sign" and not document["permutation"]["given"]:
        return f"No neuron is matched here; without {mask}, the naive port gets to {percent(top)}."
    what = f"{mask}, alone" if rival == "masked" else "the naive port"
    if best > top + 0.05:
        return f"Without matching, {what} gets no further than {percent(top)}: the matching does the work."
    return f"Without any matching, {what} gets to {percent(top)}: here, the matching does little."


def caption_price(document: Document) -> str:
    """On the accuracy at the same price."""
    paid = list_paid(document)
    words = "The same price means: as many training images behind the gradients. "
    if "control" not in paid:
        return words + "Plain fine-tuning was not run."
    last = paid["finetuned" if "finetuned" in paid else "port"][-1][1]
    plain = paid["control"][-1][1]
    what = "Port and fine-tuning" if "finetuned" in paid else "The port"
    return (
        words + f"{what} ends at {percent(last)} of the validation images, plain fine-tuning of the new base at "
        f"{percent(plain)}. A port pays where its line is above that one. The verdict is about the test images."
    )


def caption_cosines(document: Document) -> str:
    """On the cosines of the gradients."""
    steps = [each["cosines"] for each in document["steps"] if each.get("cosines")]
    means = {key: _mean([each.get(key) for each in steps[1:] or steps]) for key in ("before", "unseen", "after")}
    words = (
        "The method assumes that, with the neurons matched, both networks want to learn in the same direction: "
        f"cosine 1 is the same direction, 0 is none in common. As they are: "
        f"{number(means['before'], 2)} on average; matched: {number(means['after'], 2)}"
    )
    if means["unseen"] is not None:
        words += (
            f", and {number(means['unseen'], 2)} on gradients that the matching had not seen yet, the honest figure"
        )
    if means["before"] is None or means["unseen"] is None:
        return words + "."
    holds = means["unseen"] > means["before"] + 0.02
    return words + (". Above the orange line is good." if holds else ". No better than unmatched: expect little.")


def caption_moved(document: Document) -> str:
    """On the neurons that moved."""
    groups = list_groups(document)
    still = sum(not group["moved"] for group in groups)
    words = "Networks that were trained apart keep alike features in different places: to move most neurons is normal. "
    if still:
        words += f"{still} of {len(groups)} groups stayed as they were."
    return words.strip()


def caption_groups(document: Document) -> str:
    """On the fit of each group."""
    known = [group for group in list_groups(document) if group.get("after") is not None]
    best = max(known, key=lambda group: group["after"] - group["before"])
    return (
        "Where the blue dot is far above the orange square, matching found neurons that learn alike. Most was gained "
        f"in {best['name']}: {number(best['before'], 2)} → {number(best['after'], 2)}. "
        "Neighbouring groups share tensors, and so the credit."
    )


def caption_sweeps(document: Document) -> str:
    """On the sweeps of the search."""
    best = document["steps"][document["best_step"] - 1]
    return (
        f"The search at step {best['step']} looked at all groups again and again until nothing improved: "
        f"{best['sweeps']} sweeps. 100% would mean that every neuron has an exact twin, which no two networks have."
    )


def caption_batchnorm(document: Document) -> str:
    """On the BatchNorm reset."""
    facts = document["batchnorm"]
    return (
        f"The ported network gets statistics of its own, from {facts['batches']} minibatches. Where the lines part, "
        "the statistics of the new base would no longer have fitted; that they part is normal."
    )


def caption_classes(document: Document) -> str:
    """On the accuracy on each class."""
    rows = [row for row in list_classes(document) if row[1] is not None]
    them = theirs(document)
    if not them:
        return "There is nothing to compare with."
    up, down = (sum(sign * ((mine or 0) - (other or 0)) > 0 for _, mine, other in rows) for sign in (1, -1))
    what = "port and fine-tuning" if ours(document) == "finetuned" else "the port"
    whom = {"control": "plain fine-tuning", "masked": "the mask alone", "naive": "the naive port"}[them]
    few = "" if len(rows) <= 30 else " Shown are the 15 with the largest lead and the 15 with the largest lag."
    return f"On {up} of {len(rows)} classes {what} is above {whom}, on {down} below.{few}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
