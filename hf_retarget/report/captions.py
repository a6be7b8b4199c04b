"""What one sees in each chart and whether it is good, in a sentence or two that hold for the port at hand; and what
the rows of its tables are called."""

from __future__ import annotations

from hf_retarget.document import ContenderFigures, PortDocument
from hf_retarget.report.classes import list_classes
from hf_retarget.report.figures import list_paid
from hf_retarget.words import number, percent


def caption_curve(document: PortDocument) -> str:
    """On the accuracy along the trajectory."""
    best, port = document.best, document.trail
    if best is None:
        return ""
    if port.row.axis == "factor":
        return (
            f"The fine-tuning is added to the new base as it is, by several factors, without gradients. Best is "
            f"{best.far:g}: {percent(best.top1)}; guessing gives {percent(document.chance)}."
        )
    words = (
        f"Each step adds a little more of the fine-tuning to the new base. The port is best at step {best.step}: "
        f"{percent(best.top1)}; guessing gives {percent(document.chance)}. "
    )
    if unmatched := document.unmatched:
        what, top = unmatched.row.label.partition(",")[0], percent(unmatched.validation)
        words += f"Without matching ({what}) it gets to {top}."
        if lead := document.matching_lead:
            words += f" On the test images, the matching is worth {lead.sentence}."
    last = port.steps[-1]
    if best.top1 > last.top1 + 0.02:
        words += f" After the best step it falls to {percent(last.top1)}, so the port stops at the best one."
    return words.strip()


def caption_price(document: PortDocument) -> str:
    """On the accuracy at the same price."""
    words = "The same price means: as many training images behind the gradients. "
    ends = {each.name: each.curve[-1][1] for each in list_paid(document)}
    plain, ours = document.alternative, document.result
    if plain is None or plain.name not in ends:
        return words + "Plain fine-tuning was not run."
    what = "Port and fine-tuning" if ours.role == "after" else "The port"
    end = percent(ends.get(ours.name, ours.validation))
    return (
        words + f"{what} ends at {end} of the validation images, plain fine-tuning of the new base at "
        f"{percent(ends[plain.name])}. A port pays where its line is above that one."
        + (f" On the test images, it is ahead by {plain.lead.sentence}." if plain.lead else "")
    )


def caption_cosines(document: PortDocument) -> str:
    """On the cosines of the gradients."""
    steps = [each.cosines for each in document.trail.steps if each.cosines]
    means: dict[str, float | None] = {}
    for key in ("before", "unseen", "after"):
        known = [value for each in steps[1:] or steps if (value := each.get(key)) is not None]
        means[key] = sum(known) / len(known) if known else None
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


def caption_moved(document: PortDocument) -> str:
    """On the neurons that moved."""
    groups = document.matching.get("groups", ())
    still = sum(not group["moved"] for group in groups)
    words = "Networks that were trained apart keep alike features in different places: to move most neurons is normal. "
    if still:
        words += f"{still} of {len(groups)} groups stayed as they were."
    return words.strip()


def caption_groups(document: PortDocument) -> str:
    """On the fit of each group."""
    known = [group for group in document.matching.get("groups", ()) if group.get("after") is not None]
    best = max(known, key=lambda group: group["after"] - group["before"])
    return (
        "Where the blue dot is far above the orange square, matching found neurons that learn alike. Most was gained "
        f"in {best['name']}: {number(best['before'], 2)} → {number(best['after'], 2)}. "
        "Neighbouring groups share tensors, and so the credit."
    )


def caption_sweeps(document: PortDocument) -> str:
    """On the sweeps of the search."""
    best = document.best
    if best is None:
        return ""
    return (
        f"The search at step {best.step} went over all groups until nothing improved: {best.sweeps} sweeps. "
        "100% would mean that every neuron has an exact twin, which no two networks have."
    )


def caption_batchnorm(document: PortDocument) -> str:
    """On the BatchNorm reset."""
    return (
        f"The ported network gets statistics of its own, from {document.batchnorm['batches']} minibatches. Where the "
        "lines part, the statistics of the new base would no longer have fitted; that they part is normal."
    )


def caption_classes(document: PortDocument) -> str:
    """On the accuracy on each class."""
    rows = [row for row in list_classes(document) if row[1] is not None]
    rival = document.rival
    if not rival:
        return "There is nothing to compare with."
    up, down = (sum(sign * ((mine or 0) - (other or 0)) > 0 for _, mine, other in rows) for sign in (1, -1))
    what = "port and fine-tuning" if document.result.role == "after" else "the port"
    few = "" if len(rows) <= 30 else " Shown are the 15 with the largest lead and the 15 with the largest lag."
    return f"On {up} of {len(rows)} classes {what} is above {rival.row.short}, on {down} below.{few}"


def describe_result(figures: ContenderFigures, document: PortDocument) -> str:
    """The label of a contender in a table of results, with what was chosen for it, its best step or its price."""
    if figures.detail:
        return f"{figures.row.label} ({figures.detail})"
    if figures.best_step:
        planned = f" of {document.steps_planned}" if figures.name == document.winner else ""
        return f"{figures.row.label} (best step {figures.best_step}{planned})"
    return (
        f"{figures.row.label} ({figures.gradients:,} minibatches)" if figures.row.is_alternative else figures.row.label
    )


def describe_flips(figures: ContenderFigures) -> str:
    """Test images lost and won against the tuned model: `12 / 3`."""
    return "–" if figures.flips is None else "{:,} / {:,}".format(*figures.flips)
