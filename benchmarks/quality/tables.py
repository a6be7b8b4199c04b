"""Markdown tables of finished runs: means, deviations over seeds, steps saved, and claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from quality.curves import steps_to
from quality.tasks import TASKS

Run = dict[str, Any]

METHODS = ("naive", "rebasin", "permuted-source", "fgmt", "gmt", "fgmt-sign", "naive-sign", "oracle")
SHARES = (0.90, 0.95, 0.99)
EMPTY = "–"


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are figures.

    Example:
        >>> print(make_table(["task", "top-1"], [["tiny", "0.5"]]))
        | task | top-1 |
        |---|---:|
        | tiny | 0.5 |
    """
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return "*Not measured yet.*"
    return "\n".join([f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|", *body])


def spread(values: Iterable[float | None], digits: int = 1, scale: float = 100.0) -> str:
    """Mean ± standard deviation, in per cent by default; without ± for a single value.

    Example:
        >>> spread([0.5, 0.6]), spread([0.5]), spread([])
        ('55.0 ± 7.1', '50.0', '–')
    """
    known = [value * scale for value in values if value is not None]
    if not known:
        return EMPTY
    mean = sum(known) / len(known)
    if len(known) == 1:
        return f"{mean:.{digits}f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def select(runs: Iterable[Run], task: str, method: str | None = None) -> list[Run]:
    """The runs of a task, of one method or all, ordered by seed."""
    some = [run for run in runs if run["task"] == task and method in (None, run["method"])]
    return sorted(some, key=lambda run: run["seed"])


def tasks_in(runs: Iterable[Run]) -> list[str]:
    """The measured tasks, in the order of their declaration."""
    there = {run["task"] for run in runs}
    return [name for name in TASKS if name in there] + sorted(there - set(TASKS))


def title(task: str) -> str:
    """The description of a task."""
    return f"`{task}`: {TASKS[task].title}" if task in TASKS else f"`{task}`"


def tabulate_ports(runs: list[Run]) -> str:
    """Test accuracy at the best step, by task and method."""
    used = [method for method in METHODS if any(run["method"] == method for run in runs)]
    rows = []
    for task in tasks_in(runs):
        ports = [spread(run["test"]["port"] for run in select(runs, task, method)) for method in used]
        rows.append([f"`{task}`", *ports])
    return make_table(["task", *used], rows)


def tabulate_bounds(runs: list[Run]) -> str:
    """What ports are compared with: tuned model, direct fine-tuning, and plain fine-tuning at the same price."""
    rows = []
    for task in tasks_in(runs):
        some = select(runs, task, "fgmt") or select(runs, task)
        test = {name: spread(run["test"][name] for run in some) for name in ("source", "direct", "control")}
        price = f"{some[0]['gradients']} × {_batch(task)}" if some[0]["gradients"] else EMPTY
        rates = " / ".join(f"{some[0]['lr'][name]:g}" for name in ("source", "direct"))
        rows.append([title(task), test["source"], test["direct"], test["control"], price, rates, str(len(some))])
    head = ["task", "tuned model", "direct fine-tuning", "control", "price of FGMT", "lr source / direct", "seeds"]
    return make_table(head, rows)


def tabulate_prices(runs: list[Run]) -> str:
    """Ports and plain fine-tuning with the same number of gradients, from cheap to expensive."""
    rows = []
    for task in tasks_in(runs):
        priced = [run for run in select(runs, task) if run["test"]["control"] is not None]
        usual = {run["method"]: run["gradients"] for run in priced}
        for method, price in sorted(usual.items(), key=lambda pair: pair[1]):
            if "+" in method and price == usual.get(method.partition("+")[0]):
                continue  # a variant at the same price: see the decisions
            some = select(priced, task, method)
            tests = [spread(run["test"][name] for run in some) for name in ("port", "control")]
            gains = [run["test"]["port"] - run["test"]["control"] for run in some]
            rows.append(
                [f"`{task}`", f"`{method}`", f"{price} × {_batch(task)}", *tests, _signed(gains), str(len(some))]
            )
    return make_table(["task", "method", "gradients", "port", "plain fine-tuning", "difference", "seeds"], rows)


def _batch(task: str) -> int:
    return TASKS[task].batch if task in TASKS else 128


def tabulate_after(runs: list[Run]) -> str:
    """Test accuracy at the points of fine-tuning, plain and after each port."""
    parts = []
    for task in tasks_in(runs):
        some = [run for run in select(runs, task) if run["after"]]
        if not some:
            continue
        steps = [row["step"] for row in some[0]["plain"]]
        first = some[0]["method"]
        rows = [["plain", *_points([run["plain"] for run in select(some, task, first)])]]
        for method in dict.fromkeys(run["method"] for run in some):
            rows.append([f"after `{method}`", *_points([run["after"] for run in select(some, task, method)])])
        parts.append(f"{title(task)}\n\n{make_table(['steps', *map(str, steps)], rows)}")
    return "\n\n".join(parts) or "*Not measured yet.*"


def _points(curves: Sequence[Sequence[dict[str, float]]]) -> list[str]:
    return [spread(row["test"] for row in rows) for rows in zip(*curves, strict=True)]


def savings(run: Run, share: float) -> tuple[float | None, float | None]:
    """Steps of plain fine-tuning, and of fine-tuning after the port, to reach a share of the direct accuracy."""
    wanted = share * run["test"]["direct"]
    return steps_to(run["plain"], wanted), steps_to(run["after"], wanted)


def tabulate_savings(runs: list[Run]) -> str:
    """Steps to reach 90, 95, 99 % of the directly fine-tuned accuracy, their ratio, and the price of the port."""
    rows = []
    for task in tasks_in(runs):
        some = [run for run in select(runs, task) if run["after"]]
        for method in dict.fromkeys(run["method"] for run in some):
            chosen = select(some, task, method)
            cells = []
            for share in SHARES:
                cells.append(_saved([savings(run, share) for run in chosen]))
            price = mean(run["price"] for run in chosen) or 0.0
            rows.append([f"`{task}`", f"`{method}`", *cells, f"{price:.0f}", _in_all(chosen)])
    shares = [f"to {share:.0%}" for share in SHARES]
    return make_table(
        ["task", "after", *shares, "price of the port, in such steps", "ratio to 95%, price included"], rows
    )


def _in_all(runs: Sequence[Run]) -> str:
    pairs = [savings(run, 0.95) for run in runs]
    priced = [
        (plain, None if after is None else after + run["price"])
        for (plain, after), run in zip(pairs, runs, strict=True)
    ]
    ratio = ratio_of(priced)
    return EMPTY if ratio is None else f"{ratio:.2f}"


def _saved(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    plain, after = ([pair[side] for pair in pairs] for side in (0, 1))
    text = f"{_count(after)} : {_count(plain)}"
    ratio = ratio_of(pairs)
    return text + (f" = {ratio:.2f}" if ratio is not None else "")


def _count(steps: Sequence[float | None]) -> str:
    never = sum(step is None for step in steps)
    known = mean(steps)
    text = EMPTY if known is None else f"{known:.0f}"
    return text + (f" ({never} never)" if never and known is not None else "")


def ratio_of(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """The ratio of steps after the port to steps of plain fine-tuning; None if either never reaches it."""
    if not pairs or any(None in pair for pair in pairs):
        return None
    plain, after = (sum(pair[side] or 0.0 for pair in pairs) for side in (0, 1))
    return after / plain if plain else None


def tabulate_twists(runs: list[Run]) -> str:
    """Each method and its variants, on the same seeds."""
    rows = []
    for task in tasks_in(runs):
        for method in dict.fromkeys(run["method"] for run in select(runs, task) if "+" in run["method"]):
            changed = select(runs, task, method)
            seeds = {run["seed"] for run in changed}
            plain = [run for run in select(runs, task, method.partition("+")[0]) if run["seed"] in seeds]
            pairs = {run["seed"]: run["test"]["port"] for run in plain}
            gains = [run["test"]["port"] - pairs[run["seed"]] for run in changed if run["seed"] in pairs]
            tests = [spread(run["test"]["port"] for run in some) for some in (plain, changed)]
            rows.append([f"`{task}`", f"`{method}`", *tests, _signed(gains)])
    return make_table(["task", "changed", "as it is", "changed to this", "difference"], rows)


def _signed(gains: Sequence[float]) -> str:
    text = spread(gains)
    return text if text.startswith("-") or text == EMPTY else f"+{text}"


def tabulate_gap(runs: list[Run]) -> str:
    """Accuracy on test images and its gap to training images, where measured (figure 8)."""
    rows = []
    for task in tasks_in(runs):
        some = [run for run in select(runs, task) if run["after"] and "train" in run["after"][-1]]
        if not some:
            continue
        first = select(some, task, some[0]["method"])
        rows.append([f"`{task}`", "plain", *_gap([run["plain"] for run in first])])
        for method in dict.fromkeys(run["method"] for run in some):
            curves = [run["after"] for run in select(some, task, method)]
            rows.append([f"`{task}`", f"after `{method}`", *_gap(curves)])
        rows.append([f"`{task}`", "tuned model", spread(run["test"]["source"] for run in first), EMPTY])
    return make_table(["task", "", "test accuracy at the end", "gap to training images"], rows)


def _gap(curves: Sequence[Sequence[dict[str, float]]]) -> list[str]:
    ends = [curve[-1] for curve in curves]
    return [spread(row["test"] for row in ends), spread(row["train"] - row["test"] for row in ends)]


def tabulate_seconds(runs: list[Run]) -> str:
    """Seconds of a port by stage, one thread."""
    stages = ("loading", "tracing", "images", "gradients", "matching", "batchnorm", "evaluation", "after")
    rows = []
    for task in tasks_in(runs):
        for method in ("fgmt", "gmt"):
            some = select(runs, task, method)
            if some:
                means = [mean(run["seconds"].get(stage, 0.0) for run in some) or 0.0 for stage in stages]
                rows.append([f"`{task}`", f"`{method}`", *(f"{value:.1f}" for value in means)])
    return make_table(["task", "method", *stages], rows)


def tabulate_ensembles(rows: Iterable[dict[str, Any]]) -> str:
    """Ensembles at each point of fine-tuning after the port, against plain ones."""
    lines = []
    for row in rows:
        points = " / ".join(str(step) for step in row["after"])
        both = [" / ".join(_percent(value) for value in row[kind].values()) for kind in ("after", "plain")]
        lines.append(
            [f"`{row['task']}`", f"`{row['method']}`", points, *both, _percent(row["full"]), _percent(row["single"])]
        )
    head = [
        "task",
        "members",
        "steps",
        "ported, after steps",
        "plain, after steps",
        "full",
        "one full member",
    ]
    return make_table(head, lines)


def tabulate_cosines(found: dict[str, list[dict[str, Any]]]) -> str:
    """Cosine of the two trajectories before and after matching, by task and width."""

    def order(name: str) -> tuple[bool, str, int]:
        stem, _, width = name.rpartition("-")
        return (not width.isdecimal(), stem, int(width)) if width.isdecimal() else (True, name, 0)

    rows = [
        [f"`{task}`", *(spread((each[kind] for each in found[task]), 2, 1.0) for kind in ("identity", "matched"))]
        for task in sorted(found, key=order)
    ]
    return make_table(["task (or hidden width)", "as they are", "matched"], rows)


def tabulate_basins(found: dict[str, list[dict[str, Any]]]) -> str:
    """The drop of accuracy on the way from the directly fine-tuned new base, in points."""
    rows = [
        [f"`{task}`", *(spread(each["barriers"][end] for each in some) for end in ("ported", "source"))]
        for task, some in found.items()
    ]
    return make_table(["task", "to the port, fine-tuned further", "to the tuned model, permuted"], rows)


def _percent(value: float | None) -> str:
    return EMPTY if value is None else f"{100 * value:.1f}"
