"""Ports that differ only in their seeds are one group: means and deviations over it, and what tells groups apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.comparison.runs import BESIDES, SCORES, SEEDS, Curve, Run, read_runs
from hf_retarget.errors import RetargetError

FORMAT = "hf-retarget/compare/1"

_IMPLIED = {"data": "data."}  # a field that says the same as some others, if these differ, too
_COMPARABLE = {"data": "test images or preparation of the data", "target": "new base"}


@dataclass(frozen=True)
class Spread:
    """Some measurements of one thing: their mean, and how far apart they are."""

    mean: float
    deviation: float | None
    """Between single runs (with n − 1); None if there is one only."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        found = list(values)
        return cls(math.fsum(found) / len(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Group:
    """Repetitions of one port."""

    name: str
    """What tells it from the others."""
    settings: Mapping[str, Any]
    """The fields that differ between groups, and their values here."""
    runs: tuple[Run, ...]
    top1: Mapping[str, Spread]
    best_step: Spread
    minibatches: Spread
    control_minibatches: Spread
    seconds: Spread

    @property
    def curve(self) -> Curve:
        """The mean of the runs at every step that all of them have."""
        return _mean_curve([run.curve for run in self.runs])

    def mean_curve(self, name: str) -> Curve:
        """The same for a curve over training images: `finetuned` or `control`."""
        return _mean_curve([run.curves[name] for run in self.runs if name in run.curves])


@dataclass(frozen=True)
class PortComparison:
    """Several ports beside each other."""

    groups: tuple[Group, ...]
    differing: tuple[str, ...]
    """The fields in which groups differ."""
    warnings: tuple[str, ...] = ()
    """Why they should not be compared, or only with care."""
    problems: tuple[str, ...] = field(default=())
    """Folders that were left out, and why."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All ports, group by group."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def scores(self) -> tuple[str, ...]:
        """The test accuracies that any of them has."""
        return tuple(name for name in SCORES if any(name in group.top1 for group in self.groups))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "format": FORMAT,
            "differing": list(self.differing),
            "warnings": list(self.warnings),
            "problems": list(self.problems),
            "scores": list(self.scores),
            "chance": max(run.chance for run in self.runs),
            "groups": [_group_to_json(group) for group in self.groups],
        }


def compare_ports(folders: Sequence[str | Path], *, over: Sequence[str] = ()) -> PortComparison:
    """Put finished ports beside each other; those that differ only in their seeds are one group.

    Nor do the fields of `over` make a group: they are called as in a recipe (`port.method`), or `source`, `tuned`,
    `target`, `data`.
    """
    runs, problems = read_runs(folders)
    if not runs:
        raise RetargetError("; ".join(problems) or "no ports were given; name their folders")
    unknown = [name for name in over if not any(name in run.fields for run in runs)]
    if unknown:
        raise RetargetError(
            f"there is no field '{unknown[0]}' to average over; say it like port.seed, data.seed, source, tuned, target"
        )
    repeated = {*SEEDS, *BESIDES, *over}
    differing = _find_differing(runs, repeated)
    sorted_runs: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        sorted_runs.setdefault(tuple(run.fields.get(name) for name in differing), []).append(run)
    shown = _without_implied(differing)
    groups = tuple(_make_group(members, shown) for members in sorted_runs.values())
    return PortComparison(groups, shown, tuple(_warn(runs, groups, over)), tuple(problems))


def _find_differing(runs: Sequence[Run], repeated: set[str]) -> tuple[str, ...]:
    names = dict.fromkeys(name for run in runs for name in run.fields if name not in repeated)
    return tuple(name for name in names if len({repr(run.fields.get(name)) for run in runs}) > 1)


def _without_implied(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        name for name in names if not (name in _IMPLIED and any(other.startswith(_IMPLIED[name]) for other in names))
    )


def _make_group(runs: list[Run], shown: Sequence[str]) -> Group:
    settings = {name: runs[0].fields.get(name) for name in shown}
    words = [_describe(name, value) for name, value in settings.items()]
    return Group(
        name=", ".join(words) or str(runs[0].fields.get("port.method")),
        settings=settings,
        runs=tuple(runs),
        top1={
            name: Spread.of(run.top1[name] for run in runs if name in run.top1)
            for name in SCORES
            if any(name in run.top1 for run in runs)
        },
        best_step=Spread.of(run.best_step for run in runs),
        minibatches=Spread.of(run.minibatches for run in runs),
        control_minibatches=Spread.of(run.control_minibatches for run in runs),
        seconds=Spread.of(run.seconds for run in runs),
    )


def _describe(name: str, value: Any) -> str:
    if name == "port.method":
        return str(value)
    words = "none" if value is None or value == () else value
    if isinstance(words, bool):
        words = "on" if words else "off"
    if isinstance(words, tuple):
        words = "+".join(map(str, words))
    return f"{name.removeprefix('port.').replace('.', ' ').replace('_', ' ')} {words}"


def _warn(runs: Sequence[Run], groups: Sequence[Group], over: Sequence[str]) -> list[str]:
    lines = []
    for name, words in _COMPARABLE.items():
        kinds: dict[Any, list[str]] = {}
        for run in runs:
            kinds.setdefault(run.fields.get(name), []).append(run.name)
        if len(kinds) > 1 and name not in over:
            which = "; ".join(f"{kind}: {_some(members)}" for kind, members in kinds.items())
            lines.append(f"not the same {words}, so differences may not be due to the port: {which}")
    for group in groups:
        seeds = [tuple(repr(each) for each in run.fields.items() if each[0] not in BESIDES) for run in group.runs]
        for number, run in enumerate(group.runs):
            if seeds[number] in seeds[:number]:
                other = group.runs[seeds.index(seeds[number])]
                lines.append(
                    f"{run.name} is a repetition of {other.name} with the same seeds; it counts as one more run"
                )
    return lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    if not curves:
        return ()
    tables = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*(set(table) for table in tables)))
    return tuple((at, math.fsum(table[at] for table in tables) / len(tables)) for at in places)


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve]


def _group_to_json(group: Group) -> dict[str, Any]:
    figures = {"best_step": group.best_step, "minibatches": group.minibatches, "seconds": group.seconds}
    return {
        "name": group.name,
        "settings": {name: list(v) if isinstance(v, tuple) else v for name, v in group.settings.items()},
        "top1": {name: asdict(spread) for name, spread in group.top1.items()},
        **{name: asdict(spread) for name, spread in figures.items()},
        "control_minibatches": asdict(group.control_minibatches),
        "curve": _points(group.curve),
        "curves": {name: _points(group.mean_curve(name)) for name in ("finetuned", "control")},
        "runs": [
            {
                "name": run.name,
                "folder": run.folder,
                "seeds": {name: run.fields.get(name) for name in SEEDS},
                "top1": dict(run.top1),
                "loss": dict(run.loss),
                "best_step": run.best_step,
                "minibatches": run.minibatches,
                "seconds": round(run.seconds, 3),
                "verdict": run.verdict,
                "steps": run.steps,
                "curve": _points(run.curve),
                "curves": {name: _points(curve) for name, curve in run.curves.items()},
            }
            for run in group.runs
        ],
    }
