"""What was found between models: figures, tables and pictures, and the folder they are in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.errors import FinishedError, RetargetError
from hf_retarget.files import load_record, lock_folder, remove_leftovers, save_record, to_json, write_text
from hf_retarget.landscape.geometry import Basis, Grid, Point, Shares
from hf_retarget.models import Checkpoint
from hf_retarget.names import PLANE, REPORT
from hf_retarget.publish.contents import shorten_all
from hf_retarget.report.plane import add_plane, draw_plane, draw_plane_page
from hf_retarget.run import list_versions
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, parse_json, read_bytes, read_json

FORMAT = "hf-retarget/plane/1"
IN_PORT = "plane"
"""The folder of a plane inside that of a port."""
_POINTS = "points.json"
_FILES = (PLANE, "plane.csv", "plane.png", "plane.svg", "plane.html", _POINTS)

Figures = dict[str, Any]
"""loss, top1, top5: plain JSON values, null for a number that is not finite."""


@dataclass(frozen=True, eq=False)
class PlaneResult:
    """Scores over the line through two models, or the plane through three."""

    figures: dict[str, Any] = field(repr=False)
    """What plane.json holds."""

    @property
    def is_line(self) -> bool:
        """Whether there are two models."""
        return bool(self.figures["kind"] == "line")

    @property
    def barrier(self) -> dict[str, Any] | None:
        """How much worse the worst point of a line is than a straight line between the ends; None for a plane."""
        found: dict[str, Any] | None = self.figures["barrier"]
        return found

    @property
    def points(self) -> list[dict[str, Any]]:
        """Every point: where it is, what it is made of, and its scores."""
        found: list[dict[str, Any]] = self.figures["points"]
        return found

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write plane.json, plane.csv, plane.png, plane.svg and plane.html."""
        place = PlaneFolder.at(folder, overwrite=overwrite)
        with place.held():
            place.write(self.figures)
        return place.path


@dataclass(frozen=True, eq=False)
class Surveyed:
    """The models, where they are, and the points between them that are known so far."""

    sides: Mapping[str, Checkpoint]
    permuted: Sequence[Mapping[str, Any] | None]
    basis: Basis
    grid: Grid
    known: dict[Shares, Figures] = field(default_factory=dict)

    def compose(self, level: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """All figures up to one level of the grid, as plain JSON values."""
        versions, grid = list_versions(), self.grid
        across, down = grid.axes[level]
        models = [
            _describe(name, side, corner, how) | self.known[corner.shares]
            for (name, side), corner, how in zip(self.sides.items(), grid.corners, self.permuted, strict=True)
        ]
        points = [asdict(point) | self.known[point.shares] for each in grid.levels[: level + 1] for point in each]
        document = {
            "format": FORMAT,
            "version": versions["hf-retarget"],
            "kind": "line" if self.basis.is_line else "plane",
            "finished": level + 1 == len(grid.levels),
            "models": models,
            "distances": [list(row) for row in self.basis.distances],
            "barrier": find_barrier(points) if self.basis.is_line else None,
            "grid": {"x": [grid.x[i] for i in across], "y": [grid.y[j] for j in down], "planned": len(grid.x)},
            "points": [{**point, "shares": list(point["shares"])} for point in points],
            **facts,
            "versions": versions,
        }
        return dict(shorten_all(document))  # without the paths of this machine: it may be published


def find_barrier(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest rise of the loss, and the largest fall of the accuracy, against a straight line between the ends.

    Example:
        >>> ends = [{"x": 0.0, "loss": 1.0, "top1": 0.5}, {"x": 1.0, "loss": 2.0, "top1": 0.7}]
        >>> find_barrier([*ends, {"x": 0.5, "loss": 3.0, "top1": 0.25}])
        {'loss': 1.5, 'loss_at': 0.5, 'top1': 0.35, 'top1_at': 0.5}
    """
    found: dict[str, Any] = {}
    ends = [next(point for point in points if point["x"] == place) for place in (0.0, 1.0)]
    between = sorted((point for point in points if 0.0 <= point["x"] <= 1.0), key=lambda point: float(point["x"]))
    for name, sign in (("loss", 1.0), ("top1", -1.0)):
        if any(point[name] is None for point in between):  # a loss beyond all numbers has no height
            found |= {name: None, f"{name}_at": None}
            continue
        start, end = (each[name] for each in ends)
        heights = [sign * (each[name] - (start + each["x"] * (end - start))) for each in between]
        highest = max(range(len(between)), key=heights.__getitem__)
        found |= {name: max(0.0, heights[highest]), f"{name}_at": between[highest]["x"]}
    return found


def _describe(name: str, side: Checkpoint, corner: Point, permuted: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "name": name,
        "reference": side.reference,
        "architecture": side.architecture,
        "classes": side.num_classes,
        "revision": side.revision,
        "hashes": dict(side.hashes),
        "permuted": dict(permuted) if permuted else None,
        "x": corner.x,
        "y": corner.y,
    }


@dataclass(frozen=True)
class PlaneFolder:
    """Where pictures and figures go; they are there from the first coarse grid on."""

    path: Path
    resume: bool = False
    overwrite: bool = False
    lock: bool = True

    @classmethod
    def at(cls, folder: str | Path, **options: Any) -> PlaneFolder:
        """The place for a result; refuses what cannot become a folder."""
        path = Path(folder).expanduser()
        if path.exists() and not path.is_dir():
            raise RetargetError(f"'{folder}' is a file; name a folder for the pictures")
        return cls(path, **options)

    @property
    def picture(self) -> Path:
        """The picture, for a person who watches."""
        return self.path / "plane.png"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out, remove what a killed one left, and refuse to overwrite without `overwrite`."""
        with lock_folder(self.path.resolve(), enabled=self.lock):
            self._check()
            if self.path.is_dir():
                remove_leftovers(self.path, below=False)
            yield

    def _check(self) -> None:
        present = {each.name for each in self.path.iterdir()} if self.path.is_dir() else set()
        strange = sorted(name for name in present.difference(_FILES) if not name.startswith("."))
        if strange:
            raise RetargetError(f"'{self.path}' holds other files ('{strange[0]}'); name a folder of its own")
        if self.overwrite or (self.resume and _POINTS in present):
            return
        if _POINTS in present:
            raise RetargetError(
                f"an unfinished run is in '{self.path}'; continue with --resume, or start again with --overwrite"
            )
        if self.resume and PLANE in present:
            return  # `read_points` sees whether it is this run
        if present.intersection(_FILES):
            raise RetargetError(f"'{self.path}' is not empty; name another folder, or replace it with --overwrite")

    def read_points(self, key: Mapping[str, Any]) -> dict[Shares, Figures]:
        """The points that are known; raises FinishedError if this run is finished, and an error if it was another."""
        key, path = parse_json(to_json(key)), self.path / _POINTS
        if not self.resume:
            return {}
        if not path.exists():
            self._check_finished(key)
            return {}
        try:
            kept = load_record(path)
            theirs, points = dict(kept["run"]), {tuple(shares): figures for shares, figures in kept["points"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # damaged: everything is scored again
        for name in dict.fromkeys((*key, *theirs)):
            if key.get(name) != theirs.get(name):
                raise RetargetError(
                    f"the unfinished run in '{self.path}' was another one: '{name}' was {theirs.get(name)!r} and is "
                    f"{key.get(name)!r} now; repeat the same command, or start again with --overwrite"
                )
        return points

    def keep_points(self, key: Mapping[str, Any], points: Mapping[Shares, Figures]) -> None:
        """Keep the points that are known."""
        save_record(self.path / _POINTS, {"run": key, "points": [[list(each), points[each]] for each in points]})

    def _check_finished(self, key: Mapping[str, Any]) -> None:
        path = self.path / PLANE
        if not path.is_file():
            return
        try:
            made_from = read_json(path, MAX_DOCUMENT_BYTES).get("run")
        except (OSError, ValueError, AttributeError):
            made_from = None
        if made_from == key:
            raise FinishedError(f"the run into '{self.path}' is finished; there is nothing to resume")
        if not self.overwrite:
            raise RetargetError(f"'{self.path}' is finished, and was another run; replace it with --overwrite")

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write everything, each file wholly or not at all."""
        chart = draw_plane(figures)
        texts = {
            PLANE: to_json(figures) + "\n",
            "plane.csv": write_table(figures),
            "plane.html": draw_plane_page(figures, chart),
        }
        try:
            chart.save(self.path)
            for name, text in texts.items():
                write_text(self.path / name, text)
        except OSError as error:
            raise RetargetError(f"cannot write to '{self.path}': {error}") from error

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Write everything, and forget the points."""
        self.write(figures)
        (self.path / _POINTS).unlink(missing_ok=True)


def find_report(ported: str | Path) -> Path:
    """The report of a port."""
    path = Path(ported).expanduser() / REPORT
    if not path.is_file():
        raise RetargetError(f"there is no {REPORT} in '{ported}'; --report takes the folder of a port")
    return path


def show_in_report(report: Path, figures: Mapping[str, Any]) -> None:
    """Put the picture into the report of a port, instead of the one that it may have had."""
    page = add_plane(read_bytes(report, MAX_DOCUMENT_BYTES).decode(), figures)
    if page is None:
        raise RetargetError(f"'{report}' is no report of a port; nothing was added to it")
    write_text(report, page)


def write_table(figures: Mapping[str, Any]) -> str:
    """All points as CSV: what each is made of, and its scores; the models are marked with their names.

    Example:
        >>> write_table({"models": [{"name": "a", "x": 0, "y": 0}], "points": []}).strip()
        'model,x,y,share of a,loss,top1,top5'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [model["name"] for model in figures["models"]]
    writer.writerow(["model", "x", "y", *(f"share of {name}" for name in names), "loss", "top1", "top5"])
    corners = {tuple(float(i == number) for i in range(len(names))): name for number, name in enumerate(names)}
    for point in figures["points"]:
        whole = corners.get(tuple(point["shares"]), "")
        writer.writerow([whole, point["x"], point["y"], *point["shares"], point["loss"], point["top1"], point["top5"]])
    return text.getvalue()
