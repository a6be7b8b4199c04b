"""`rt.compare` and `hf-retarget compare`: finished ports in groups, with means and deviations over their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.contenders import contenders
from hf_retarget.document import PortDocument, read_document
from hf_retarget.errors import PortError, RetargetError
from hf_retarget.names import PORT, SIDES
from hf_retarget.words import shorten_names

FORMAT = "hf-retarget/compare/2"

SEEDS = ("port.seed", "finetune.seed")
"""Fields that make a port a repetition of another."""
BESIDES = ("port.check", "port.control", "port.eval_batch", "port.samples", "port.save_as", "port.rank", "port.energy")
"""Fields that decide how a port is checked, compared, shown and saved, not what it is."""
_COMPARABLE = {"data": "test images or preparation of the data", "target": SIDES["target"]}

Curve = Sequence[tuple[float, float]]
"""Pairs of a place (steps or training images) and an accuracy."""


@dataclass(frozen=True)
class FinishedPort:
    """One port: its figures, and all that decided about it."""

    name: str
    """Its folder, as short as it tells it from the others."""
    folder: str
    seeds: Mapping[str, Any]
    winner: str
    top1: Mapping[str, float]
    """Test accuracies of all contenders, in the order of a table."""
    loss: Mapping[str, float | None]
    best_step: int | None
    minibatches: int
    seconds: float
    verdict: str
    steps: int
    """As many as were planned."""
    curve: Curve
    """Validation accuracy of the winner over its steps."""
    curves: Mapping[str, Curve]
    """Validation accuracy over training images, of the contenders that took gradients."""
    fields: Mapping[str, Any] = field(repr=False)
    """Recipe fields, models and data, under names such as `port.method` and `target`."""
    chance: float

    @classmethod
    def of(cls, name: str, folder: str, document: PortDocument) -> FinishedPort:
        """What a comparison needs of a port.json."""
        fields = _list_fields(document)
        return cls(
            name,
            folder,
            seeds={seed: fields.get(seed) for seed in SEEDS},
            winner=document.winner,
            top1={each.name: each.test.top1 for each in document.table},
            loss={each.name: each.test.loss for each in document.table},
            best_step=document.trail.best_step,
            minibatches=document.port.gradients,
            seconds=round(math.fsum(document.seconds.values()), 3),
            verdict=document.verdict,
            steps=document.steps_planned,
            curve=[(float(each.step), each.top1) for each in document.trail.steps],
            curves={each.name: each.curve for each in document.contenders if each.curve},
            fields=fields,
            chance=document.chance,
        )


@dataclass(frozen=True)
class Spread:
    """Some measurements of one thing: their mean, and how far apart they are."""

    mean: float
    deviation: float | None
    """Between single runs (with n − 1); None if there is only one."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        found = list(values)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Group:
    """Repetitions of one port."""

    name: str
    """What tells it from the others."""
    settings: Mapping[str, Any]
    """The fields that differ between groups, and their values here."""
    port: Spread
    """Test accuracies of the winners."""
    top1: Mapping[str, Spread]
    """Test accuracies of every contender that any of the runs has."""
    best_step: Spread
    minibatches: Spread
    seconds: Spread
    curve: Curve
    """The mean of the curves of all runs, at every place that all of them have."""
    curves: Mapping[str, Curve]
    runs: tuple[FinishedPort, ...]

    @classmethod
    def of(cls, runs: Sequence[FinishedPort], differing: Sequence[str]) -> Group:
        """At least one run, and the names of the fields in which groups differ."""
        settings = {name: runs[0].fields.get(name) for name in differing}
        counted = [same[0] for same in _collect_same(runs)]
        known = {row.name: [run.top1[row.name] for run in counted if row.name in run.top1] for row in contenders()}
        paid = dict.fromkeys(name for run in counted for name in run.curves)
        return cls(
            ", ".join(_describe(*each) for each in settings.items()) or runs[0].winner,
            settings,
            port=Spread.of(run.top1[run.winner] for run in counted),
            top1={name: Spread.of(values) for name, values in known.items() if values},
            best_step=Spread.of(run.best_step or 0 for run in counted),
            minibatches=Spread.of(run.minibatches for run in counted),
            seconds=Spread.of(run.seconds for run in counted),
            curve=_mean_curve([run.curve for run in counted]),
            curves={name: _mean_curve([run.curves[name] for run in counted if name in run.curves]) for name in paid},
            runs=tuple(runs),
        )


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
        groups = [asdict(group) for group in self.groups]
        for run in (run for group in groups for run in group["runs"]):
            del run["fields"], run["chance"]
        return {
            "format": FORMAT,
            "differing": list(self.differing),
            "warnings": list(self.warnings),
            "problems": list(self.problems),
            "scores": list(self.scores),
            "chance": max(run.chance for run in self.runs),
            "groups": groups,
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
            f"there is no field '{unknown[0]}' to average over; fields are called like port.seed, tuned, "
            "source (the old base), target (the new base)"
        )
    names = dict.fromkeys(name for run in runs for name in run.fields if name not in (*SEEDS, *BESIDES, *over))
    differing = [name for name in names if len({_key(run.fields.get(name)) for run in runs}) > 1]
    alike = _collect((str([_key(run.fields.get(name)) for name in differing]), run) for run in runs)
    if any(name.startswith("data.") for name in differing):  # these say more exactly how the data differ
        differing = [name for name in differing if name != "data"]
    groups = tuple(Group.of(members, differing) for members in alike.values())
    return PortComparison(groups, tuple(differing), tuple(_warn(runs, groups, over)), tuple(problems))


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
            runs.append(FinishedPort.of(name, str(path.parent), document))
        except PortError as error:
            problems.append(f"'{path}': {error}")
        except (LookupError, TypeError, AttributeError) as error:
            problems.append(f"'{path}' is damaged: {type(error).__name__}: {error}; make the port again")
    return runs, problems


def _list_fields(document: PortDocument) -> dict[str, Any]:
    fields = {
        f"{section}.{key}": [str(each) for each in value] if isinstance(value, list) else value
        for section in ("port", "finetune", "data")
        for key, value in document.recipe[section].items()
    }
    fields.pop("data.reference", None)  # where the images lie does not count, only what they are
    models = {}
    for side, facts in document.models.items():  # the end of the reference for people, some of a hash for certainty
        hashes = "".join(facts.hashes[key] for key in sorted(facts.hashes))
        models[side] = f"{Path(facts.reference).name} ({hashes[:8]})"
    return {
        **fields,
        "port.targets": document.targets,
        **models,
        "architecture": document.models["target"].architecture,
        "data": f"{document.data.name} ({document.data.fingerprint[:8]})",
        "head": str(document.head.get("policy")),
        "permutation": "given" if document.permutation.given else "found",
        "precision": str(document.device.get("precision", "no")),
    }


def _describe(name: str, value: Any) -> str:
    """A setting in the name of a group."""
    if name == "port.method":
        return str(value)
    words = "+".join(value) or None if isinstance(value, list) else value
    if words is None or isinstance(words, bool):
        words = {None: "none", True: "on", False: "off"}[words]
    named = SIDES.get(name) or name.removeprefix("port.").replace(".", " ").replace("_", " ")
    return f"{named} {words}"


def _warn(runs: Sequence[FinishedPort], groups: Sequence[Group], over: Sequence[str]) -> list[str]:
    lines = []
    for name, words in _COMPARABLE.items():
        kinds = _collect((run.fields.get(name), run.name) for run in runs)
        if len(kinds) > 1 and name not in over:
            more = {kind: f" and {len(members) - 4} more" * (len(members) > 4) for kind, members in kinds.items()}
            which = "; ".join(f"{kind}: {', '.join(members[:4])}{more[kind]}" for kind, members in kinds.items())
            lines.append(f"not the same {words}, so differences may not be due to the port: {which}")
    for group in groups:
        for first, *others in _collect_same(group.runs):
            words = f"is a repetition of {first.name} with the same seeds, and is not counted"
            lines += [f"{each.name} {words}" for each in others]
    return lines


def _collect_same(runs: Sequence[FinishedPort]) -> Iterable[list[FinishedPort]]:
    """The runs that had the same seeds and everything else, together; that with the most contenders first."""
    most = sorted(runs, key=lambda run: -len(run.top1))
    deciding = ([each for each in run.fields.items() if each[0] not in BESIDES] for run in most)
    return _collect(zip(map(repr, deciding), most, strict=True)).values()


def _key(value: Any) -> str:
    """What tells values apart: 0 and 0.0 are the same."""
    return repr(float(value) if type(value) is int else value)


def _collect(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second values under each first value, all in their order."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    tables = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*map(set, tables)))
    return [(at, statistics.fmean(table[at] for table in tables)) for at in places]
