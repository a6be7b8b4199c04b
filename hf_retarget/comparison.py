"""`rt.compare` and `hf-retarget compare`: group finished ports, with means and deviations over seeds."""

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
"""Fields in which repetitions of a port differ."""
BESIDES = (
    "port.verify",
    "port.check",
    "port.control",
    "port.eval_batch",
    "port.samples",
    "port.save_as",
    "port.rank",
    "port.energy",
)
"""Fields about checking, comparing, displaying and saving, which do not affect the port itself."""
_COMPARABLE = {"data": "test images or preparation of the data", "target": SIDES["target"]}

Curve = Sequence[tuple[float, float]]
"""Pairs of a position (step or number of training images) and an accuracy."""


@dataclass(frozen=True)
class FinishedPort:
    """One port: its figures and its settings."""

    name: str
    """Its folder, shortened as far as it stays unique."""
    folder: str
    seeds: Mapping[str, Any]
    winner: str
    top1: Mapping[str, float]
    """Test accuracies of all contenders, in table order."""
    loss: Mapping[str, float | None]
    best_step: int | None
    minibatches: int
    seconds: float
    verdict: str
    steps: int
    """Number of planned steps."""
    curve: Curve
    """Validation accuracy of the winner by step."""
    curves: Mapping[str, Curve]
    """Validation accuracy by training images, for contenders that took gradients."""
    fields: Mapping[str, Any] = field(repr=False)
    """Recipe fields, models and data, under names such as `port.method` and `target`."""
    chance: float

    @classmethod
    def of(cls, name: str, folder: str, document: PortDocument) -> FinishedPort:
        """Extract from a port.json what a comparison needs."""
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
    """Mean and deviation of repeated measurements."""

    mean: float
    deviation: float | None
    """Sample standard deviation (n − 1) between runs; None for a single run."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        found = list(values)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class PortGroup:
    """Repetitions of one port."""

    name: str
    """What distinguishes it from other groups."""
    settings: Mapping[str, Any]
    """Values of the fields that differ between groups."""
    port: Spread
    """Test accuracies of the winners."""
    top1: Mapping[str, Spread]
    """Test accuracies of all contenders in any of the runs."""
    best_step: Spread
    minibatches: Spread
    seconds: Spread
    curve: Curve
    """Mean of the runs' curves, at the positions they share."""
    curves: Mapping[str, Curve]
    runs: tuple[FinishedPort, ...]

    @classmethod
    def of(cls, runs: Sequence[FinishedPort], differing: Sequence[str]) -> PortGroup:
        """Group at least one run; `differing` are the fields in which groups differ."""
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


@dataclass(frozen=True, repr=False)
class PortComparison:
    """A comparison of several ports."""

    groups: tuple[PortGroup, ...]
    differing: tuple[str, ...]
    """The fields in which groups differ."""
    warnings: tuple[str, ...] = ()
    """Reasons not to compare them, or only with care."""
    problems: tuple[str, ...] = ()
    """Folders that were left out, with reasons."""

    def __repr__(self) -> str:
        return f"PortComparison({', '.join(f'{each.name}: {each.port.mean:.1%}' for each in self.groups)})"

    @property
    def runs(self) -> tuple[FinishedPort, ...]:
        """All ports, by group."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the contenders in any of the ports."""
        return tuple(row.name for row in contenders() if any(row.name in group.top1 for group in self.groups))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
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
    """Compare finished ports; those that differ only in seeds, or in the fields of `over`, form a group.

    Fields are named as in a recipe (`port.method`), or `source`, `tuned`, `target`, `data`. A folder may be a port or
    contain folders of ports.
    """
    runs, problems = read_ports(folders)
    if not runs:
        raise RetargetError("; ".join(problems) or "no ports given; name their folders")
    if unknown := [name for name in over if not any(name in run.fields for run in runs)]:
        raise RetargetError(
            f"there is no field '{unknown[0]}' to average over; examples of fields are port.seed, tuned, "
            "source (the old base) and target (the new base)"
        )
    names = dict.fromkeys(name for run in runs for name in run.fields if name not in (*SEEDS, *BESIDES, *over))
    differing = [name for name in names if len({_key(run.fields.get(name)) for run in runs}) > 1]
    alike = _collect((str([_key(run.fields.get(name)) for name in differing]), run) for run in runs)
    if any(name.startswith("data.") for name in differing):  # these describe the difference more precisely
        differing = [name for name in differing if name != "data"]
    groups = tuple(PortGroup.of(members, differing) for members in alike.values())
    return PortComparison(groups, tuple(differing), tuple(_warn(runs, groups, over)), tuple(problems))


def read_ports(places: Iterable[str | Path]) -> tuple[list[FinishedPort], list[str]]:
    """Read the ports in folders, their subfolders, or port.json files; also returns a line for each that fails.

    Example:
        >>> read_ports(["nowhere"])
        ([], ["'nowhere' does not exist"])
    """
    documents: dict[Path, PortDocument] = {}
    problems = []
    for place in map(Path, places):
        paths = [place] if place.is_file() else [place / PORT] if (place / PORT).is_file() else []
        if not paths and place.is_dir():
            paths = sorted(place.glob(f"*/{PORT}"))
        if not paths:
            nothing = f"'{place}' has no {PORT}, and neither do the folders in it; name a finished port"
            problems.append(nothing if place.is_dir() else f"'{place}' does not exist")
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
    fields.pop("data.reference", None)  # the content of the images counts, not their location
    models = {}
    for side, facts in document.models.items():  # the end of the reference for display, part of a hash for certainty
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
    """A setting as part of a group's name."""
    if name == "port.method":
        return str(value)
    words = "+".join(value) or None if isinstance(value, list) else value
    if words is None or isinstance(words, bool):
        words = {None: "none", True: "on", False: "off"}[words]
    named = SIDES.get(name) or name.removeprefix("port.").replace(".", " ").replace("_", " ")
    return f"{named} {words}"


def _warn(runs: Sequence[FinishedPort], groups: Sequence[PortGroup], over: Sequence[str]) -> list[str]:
    lines = []
    for name, words in _COMPARABLE.items():
        kinds = _collect((run.fields.get(name), run.name) for run in runs)
        if len(kinds) > 1 and name not in over:
            more = {kind: f" and {len(members) - 4} more" * (len(members) > 4) for kind, members in kinds.items()}
            which = "; ".join(f"{kind}: {', '.join(members[:4])}{more[kind]}" for kind, members in kinds.items())
            lines.append(f"different {words}, so results may differ for other reasons than the port: {which}")
    for group in groups:
        for first, *others in _collect_same(group.runs):
            words = f"repeats {first.name} with the same seeds and is not counted"
            lines += [f"{each.name} {words}" for each in others]
    return lines


def _collect_same(runs: Sequence[FinishedPort]) -> Iterable[list[FinishedPort]]:
    """Collect runs with identical settings and seeds, the one with the most contenders first."""
    most = sorted(runs, key=lambda run: -len(run.top1))
    deciding = ([each for each in run.fields.items() if each[0] not in BESIDES] for run in most)
    return _collect(zip(map(repr, deciding), most, strict=True)).values()


def _key(value: Any) -> str:
    """A key that distinguishes values, but not 0 from 0.0."""
    return repr(float(value) if type(value) is int else value)


# Not pandas: its `groupby` drops None and refuses lists, which settings may be.
def _collect(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Collect the second elements by the first, keeping their order."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    tables = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*map(set, tables)))
    return [(at, statistics.fmean(table[at] for table in tables)) for at in places]
