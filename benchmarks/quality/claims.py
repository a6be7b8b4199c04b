"""The claims under test, and whether the measurements support them: one line for each claim and task."""

from __future__ import annotations

from typing import Any

from quality.tables import Run, make_table, mean, ratio_of, savings, select, tasks_in
from quality.tasks import TASKS

CLAIMS = (
    "FGMT beats naive",
    "FGMT within 3 points of the oracle, or above",
    "GMT within 3 points of FGMT",
    "fgmt-sign 5 points above FGMT",
    "fgmt-sign 5 points above the oracle",
    "95 % in half the steps (fgmt)",
    "95 % in half the steps (fgmt-sign)",
)


def judge_claims(runs: list[Run], task: str) -> list[str]:
    """For each claim, yes or no with the deciding figure; – if it was not measured.

    A margin over naive is clear if it exceeds two points and twice its standard error over seeds.
    """
    fgmt, oracle = _accuracy(runs, task, "fgmt"), _accuracy(runs, task, "oracle")
    sign = _accuracy(runs, task, "fgmt-sign")
    return [
        _margin(runs, task),
        _points(fgmt, oracle, -3.0),
        _points(fgmt, _accuracy(runs, task, "gmt"), -3.0, both=True),
        _points(sign, fgmt, 5.0),
        _points(sign, oracle, 5.0),
        _half(runs, task, "fgmt"),
        _half(runs, task, "fgmt-sign"),
    ]


def tabulate_claims(runs: list[Run]) -> str:
    """All claims for all tasks."""
    rows = [[f"`{task}`", *judge_claims(runs, task)] for task in tasks_in(runs)]
    return make_table(["task", *CLAIMS], rows)


def _accuracy(runs: list[Run], task: str, method: str) -> float | None:
    return mean(run["test"]["port"] for run in select(runs, task, method))


def _margin(runs: list[Run], task: str) -> str:
    naive = {run["seed"]: run["test"]["port"] for run in select(runs, task, "naive")}
    gains = [run["test"]["port"] - naive[run["seed"]] for run in select(runs, task, "fgmt") if run["seed"] in naive]
    if not gains:
        return "–"
    average = sum(gains) / len(gains)
    squares = sum((gain - average) ** 2 for gain in gains)
    error = (squares / max(1, len(gains) - 1) / len(gains)) ** 0.5
    return f"{_yes(average > max(2 * error, 0.02))} ({100 * average:+.1f})"


def _points(ours: float | None, theirs: float | None, least: float, both: bool = False) -> str:
    if ours is None or theirs is None:
        return "–"
    gain = 100 * (ours - theirs)
    holds = abs(gain) <= -least if both else gain >= least
    return f"{_yes(holds)} ({gain:+.1f})"


def _half(runs: list[Run], task: str, method: str) -> str:
    some: list[dict[str, Any]] = [run for run in select(runs, task, method) if run["after"]]
    if not some or (task in TASKS and not TASKS[task].after):
        return "–"
    pairs = [savings(run, 0.95) for run in some]
    ratio = ratio_of(pairs)
    return "no (not reached)" if ratio is None else f"{_yes(ratio <= 0.5)} ({ratio:.2f})"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
