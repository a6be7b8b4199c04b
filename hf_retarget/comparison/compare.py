"""`rt.compare` and `hf-retarget compare`: finished ports in groups, with means and deviations over their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.contenders import contenders
from hf_retarget.document import ModelFacts, PortDocument, read_document
from hf_retarget.errors import PortError, RetargetError
from hf_retarget.names import PORT
from hf_retarget.words import shorten_names

FORMAT = "hf-retarget/compare/2"

SEEDS = ("port.seed", "finetune.seed")
"""Fields that make a port a repetition of another."""
BESIDES = ("port.check", "port.control", "port.samples")
"""Fields that decide how a port is checked, compared and shown, not what it is."""
_IMPLIED = {"data": "data."}  # a field that repeats what some others show, if these differ, too
_COMPARABLE = {"data": "test images or preparation of the data", "target": "new base"}

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class FinishedPort:
    """One port, and all that decided about it."""

    name: str
    """Its folder, as short as it tells it from the others."""
    folder: str
    document: PortDocument = field(repr=False)
    fields: Mapping[str, Any] = field(repr=False)
    """Recipe fields, models and data, under names such as `port.method` and `target`."""

    @property
    def top1(self) -> dict[str, float]:
        """Test accuracies, in the order of a table."""
        return {each.name: each.test.top1 for each in self.document.table}

    @property
    def seconds(self) -> float:
        """How long it took."""
        return math.fsum(self.document.seconds.values())

    @property
    def curve(self) -> Curve:
        """Validation accuracy of the winner over its steps."""
        return [(float(each.step), each.top1) for each in self.document.port.steps]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        document = self.document
        return {
            "name": self.name,
            "folder": self.folder,
            "seeds": {name: self.fields.get(name) for name in SEEDS},
            "winner": document.winner,
            "top1": self.top1,
            "loss": {each.name: each.test.loss for each in document.table},
            "best_step": document.port.best_step,
            "minibatches": document.port.gradients,
            "seconds": round(self.seconds, 3),
            "verdict": document.verdict,
            "steps": document.steps_planned,
            "curve": _points(self.curve),
            "curves": {each.name: _points(each.curve) for each in document.contenders if each.curve},
        }


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
    runs: tuple[FinishedPort, ...]

    @property
    def port(self) -> Spread:
        """Test accuracies of the winners."""
        return Spread.of(run.document.port.test.top1 for run in self.runs)

    @property
    def top1(self) -> dict[str, Spread]:
        """Test accuracies of every contender that any of the runs has."""
        return {
            row.name: Spread.of(run.top1[row.name] for run in self.runs if row.name in run.top1)
            for row in contenders()
            if any(row.name in run.top1 for run in self.runs)
        }

    def mean_curve(self, name: str) -> Curve:
        """The mean over training images of one contender, at every place that all runs have."""
        found = [run.document.find(name) for run in self.runs]
        return _mean_curve([each.curve for each in found if each and each.curve])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = dict.fromkeys(each.name for run in self.runs for each in run.document.contenders if each.curve)
        return {
            "name": self.name,
            "settings": {name: list(v) if isinstance(v, tuple) else v for name, v in self.settings.items()},
            "port": asdict(self.port),
            "top1": {name: asdict(spread) for name, spread in self.top1.items()},
            "best_step": asdict(Spread.of(run.document.port.best_step or 0 for run in self.runs)),
            "minibatches": asdict(Spread.of(run.document.port.gradients for run in self.runs)),
            "seconds": asdict(Spread.of(run.seconds for run in self.runs)),
            "curve": _points(_mean_curve([run.curve for run in self.runs])),
            "curves": {name: _points(self.mean_curve(name)) for name in names},
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True)
class PortComparison:
    """Several ports beside each other."""

    groups: tuple[Group, ...]
    differing: tuple[str, ...]
    """The fields in which groups differ."""
    warnings: tuple[str, ...] = ()
    """Why they should not be compared, or only with care."""
    problems: tuple[str, ...] = ()
    """Folders that were left out, and why."""

    @property
    def runs(self) -> tuple[FinishedPort, ...]:
        """All ports, group by group."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def scores(self) -> tuple[str, ...]:
        """The contenders that any of them has."""
        return tuple(row.name for row in contenders() if any(row.name in group.top1 for group in self.groups))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "format": FORMAT,
            "differing": list(self.differing),
            "warnings": list(self.warnings),
            "problems": list(self.problems),
            "scores": list(self.scores),
            "chance": max(run.document.chance for run in self.runs),
            "groups": [group.to_json() for group in self.groups],
        }


def compare(folders: Sequence[str | Path], *, over: Sequence[str] = ()) -> PortComparison:
    """Put finished ports beside each other; those that differ only in their seeds are one group.

    Nor do the fields of `over` make a group: they are called as in a recipe (`port.method`), or `source`, `tuned`,
    `target`, `data`. A folder may also hold folders of ports.
    """
    runs, problems = read_ports(folders)
    if not runs:
        raise RetargetError("; ".join(problems) or "no ports were given; name their folders")
    if unknown := [name for name in over if not any(name in run.fields for run in runs)]:
        raise RetargetError(
            f"there is no field '{unknown[0]}' to average over; fields are called like port.seed, source, tuned, target"
        )
    repeated = {*SEEDS, *BESIDES, *over}
    names = dict.fromkeys(name for run in runs for name in run.fields if name not in repeated)
    differing = [name for name in names if len({repr(run.fields.get(name)) for run in runs}) > 1]
    alike: dict[str, list[FinishedPort]] = {}
    for run in runs:
        alike.setdefault(repr([run.fields.get(name) for name in differing]), []).append(run)
    shown = tuple(
        name
        for name in differing
        if not (name in _IMPLIED and any(other.startswith(_IMPLIED[name]) for other in differing))
    )
    groups = tuple(_make_group(members, shown) for members in alike.values())
    return PortComparison(groups, shown, tuple(_warn(runs, groups, over)), tuple(problems))


def read_ports(places: Iterable[str | Path]) -> tuple[list[FinishedPort], list[str]]:
    """The ports in some folders, in folders of folders, or given as port.json; and one line for each that is none.

    Example:
        >>> read_ports(["nowhere"])
        ([], ["'nowhere' is not there"])
    """
    documents: dict[Path, PortDocument] = {}
    problems = []
    for place in map(Path, places):
        paths = [place] if place.is_file() else [place / PORT] if (place / PORT).is_file() else []
        if not paths and place.is_dir():
            paths = sorted(place.glob(f"*/{PORT}"))
        if not paths:
            nothing = f"'{place}' has no {PORT}, nor have the folders in it; is it a finished port?"
            problems.append(nothing if place.is_dir() else f"'{place}' is not there")
        for path in paths:
            try:
                documents.setdefault(path, read_document(path))
            except PortError as error:
                problems.append(str(error))
    names = shorten_names(str(path.parent.resolve()) for path in documents)
    runs = []
    for (path, document), name in zip(documents.items(), names, strict=True):
        try:
            runs.append(FinishedPort(name, str(path.parent), document, _list_fields(document)))
        except (LookupError, TypeError, AttributeError) as error:
            problems.append(f"'{path}' is damaged: {type(error).__name__}: {error}; make the port again")
    return runs, problems


def _list_fields(document: PortDocument) -> dict[str, Any]:
    fields = {
        f"{section}.{key}": _plain(value)
        for section in ("port", "finetune", "data")
        for key, value in document.recipe[section].items()
    }
    fields.pop("data.reference", None)  # where the images lie does not count, only what they are
    return {
        **fields,
        **{side: _identify(facts) for side, facts in document.models.items()},
        "architecture": document.models["target"].architecture,
        "data": f"{document.data.name} ({document.data.fingerprint[:8]})",
        "head": str(document.head.get("policy")),
        "permutation": "given" if document.permutation.given else "found",
        "precision": str(document.device.get("precision", "no")),
    }


def _identify(side: ModelFacts) -> str:
    """The end of the reference for people, and the beginning of a hash for certainty."""
    hashes = "".join(side.hashes[key] for key in sorted(side.hashes))
    return f"{Path(side.reference).name} ({hashes[:8]})"


def _plain(value: Any) -> Any:
    """A value of a recipe that can be compared: a list as a tuple, what no recipe holds as text."""
    if isinstance(value, list):
        return tuple(map(str, value))
    return str(value) if isinstance(value, dict) else value


def _make_group(runs: list[FinishedPort], shown: Sequence[str]) -> Group:
    settings = {name: runs[0].fields.get(name) for name in shown}
    words = [_describe(name, value) for name, value in settings.items()]
    return Group(", ".join(words) or runs[0].document.winner, settings, tuple(runs))


def _describe(name: str, value: Any) -> str:
    if name == "port.method":
        return str(value)
    words = "none" if value is None or value == () else value
    if isinstance(words, bool):
        words = "on" if words else "off"
    if isinstance(words, tuple):
        words = "+".join(map(str, words))
    return f"{name.removeprefix('port.').replace('.', ' ').replace('_', ' ')} {words}"


def _warn(runs: Sequence[FinishedPort], groups: Sequence[Group], over: Sequence[str]) -> list[str]:
    lines = []
    for name, words in _COMPARABLE.items():
        kinds: dict[Any, list[str]] = {}
        for run in runs:
            kinds.setdefault(run.fields.get(name), []).append(run.name)
        if len(kinds) > 1 and name not in over:
            which = "; ".join(f"{kind}: {_some(members)}" for kind, members in kinds.items())
            lines.append(f"not the same {words}, so differences may not be due to the port: {which}")
    for group in groups:
        seen: dict[str, str] = {}
        for run in group.runs:
            same = repr([each for each in run.fields.items() if each[0] not in BESIDES])
            if same in seen:
                lines.append(
                    f"{run.name} is a repetition of {seen[same]} with the same seeds; it counts as one more run"
                )
            seen.setdefault(same, run.name)
    return lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    tables = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [(at, math.fsum(table[at] for table in tables) / len(tables)) for at in places]


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve]
