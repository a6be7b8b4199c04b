"""The result of `plane`: figures, and the folder with pictures and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_retarget.errors import FinishedError, RetargetError
from hf_retarget.files import load_record, lock_folder, remove_leftovers, save_record, to_json, write_text
from hf_retarget.landscape.geometry import Shares
from hf_retarget.names import PLANE
from hf_retarget.porting.resume import find_change
from hf_retarget.report.plane import draw_plane, draw_plane_page
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, parse_json, plain, read_json

_POINTS = "points.json"
_FILES = {PLANE, "plane.csv", "plane.png", "plane.svg", "plane.html", _POINTS}

Figures = dict[str, Any]
"""JSON values: the content of plane.json, or loss, top1 and top5 of a point."""


@dataclass(frozen=True, eq=False)
class PlaneResult:
    """Scores on the line through two models, or the plane through three."""

    figures: Figures = field(repr=False)
    """The content of plane.json."""

    def __repr__(self) -> str:
        barrier = f", barrier {self.barrier}" if self.barrier else ""
        return f"PlaneResult({self.figures['kind']}, {len(self.points)} points{barrier})"

    @property
    def is_line(self) -> bool:
        """Whether it is a line between two models."""
        return bool(self.figures["kind"] == "line")

    @property
    def barrier(self) -> Figures | None:
        """The barrier of a line (see `find_barrier`); None for a plane."""
        found: Figures | None = self.figures["barrier"]
        return found

    @property
    def points(self) -> list[Figures]:
        """All points, with position, shares and scores."""
        found: list[Figures] = self.figures["points"]
        return found

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write plane.json, plane.csv, plane.png, plane.svg and plane.html."""
        place = PlaneFolder.at(folder, overwrite=overwrite)
        with place.held():
            place.write(self.figures)
        return place.path


def find_barrier(points: Sequence[Mapping[str, Any]]) -> Figures:
    """The largest rise of the loss and drop of the accuracy, relative to linear interpolation between the ends.

    Example:
        >>> ends = [{"x": 0.0, "loss": 1.0, "top1": 0.5}, {"x": 1.0, "loss": 2.0, "top1": 0.7}]
        >>> find_barrier([*ends, {"x": 0.5, "loss": 3.0, "top1": 0.25}])
        {'loss': 1.5, 'loss_at': 0.5, 'top1': 0.35, 'top1_at': 0.5}
    """
    found: Figures = {}
    between = sorted((point for point in points if 0.0 <= point["x"] <= 1.0), key=lambda point: float(point["x"]))
    for name, sign in (("loss", 1.0), ("top1", -1.0)):
        if any(point[name] is None for point in between):  # the loss is infinite
            found |= {name: None, f"{name}_at": None}
            continue
        start, end = between[0][name], between[-1][name]
        heights = [sign * (each[name] - (start + each["x"] * (end - start))) for each in between]
        highest = max(range(len(between)), key=heights.__getitem__)
        found |= {name: max(0.0, heights[highest]), f"{name}_at": between[highest]["x"]}
    return found


@dataclass(frozen=True)
class PlaneFolder:
    """The folder of pictures and figures, which are written from the first coarse grid on."""

    path: Path
    resume: bool = False
    overwrite: bool = False
    lock: bool = True

    @classmethod
    def at(cls, folder: str | Path, **options: Any) -> PlaneFolder:
        """The folder of a result; RetargetError if it cannot be one."""
        path = Path(folder).expanduser()
        if path.exists() and not path.is_dir():
            raise RetargetError(f"'{folder}' is a file; name a folder for the pictures")
        return cls(path, **options)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder, clean up after killed runs, and refuse to overwrite without `overwrite`."""
        with lock_folder(self.path.resolve(), enabled=self.lock):
            present = {each.name for each in self.path.iterdir()} if self.path.is_dir() else set()
            strange = sorted(name for name in present - _FILES if not name.startswith("."))
            if strange:
                raise RetargetError(f"'{self.path}' holds other files ('{strange[0]}'); name a separate folder")
            if _POINTS in present and not (self.resume or self.overwrite):
                raise RetargetError(
                    f"an unfinished run is in '{self.path}'; continue with --resume, or start over with --overwrite"
                )
            # With `resume`, `read_points` checks that the content belongs to this run.
            if present & _FILES and not (self.overwrite or (self.resume and present & {PLANE, _POINTS})):
                raise RetargetError(f"'{self.path}' is not empty; name another folder, or replace it with --overwrite")
            if present:
                remove_leftovers(self.path, below=False)
            yield

    def read_points(self, key: Mapping[str, Any]) -> dict[Shares, Figures]:
        """Read the known points; FinishedError if this run is finished, RetargetError if another one made them."""
        key = parse_json(to_json(key))
        if not self.resume:
            return {}
        if not (self.path / _POINTS).exists():
            self._check_finished(key)
            return {}
        try:
            kept = load_record(self.path / _POINTS)
            theirs, points = dict(kept["run"]), {tuple(shares): figures for shares, figures in kept["points"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # damaged: start over
        if changed := find_change(key, theirs):
            raise RetargetError(
                f"the unfinished run in '{self.path}' is a different one: {changed}; repeat the original command, "
                "or start over with --overwrite"
            )
        return points

    def _check_finished(self, key: Mapping[str, Any]) -> None:
        if not (self.path / PLANE).is_file():
            return
        try:
            made_from = read_json(self.path / PLANE, MAX_DOCUMENT_BYTES).get("run")
        except (OSError, ValueError, AttributeError):
            made_from = None
        if made_from == key:
            raise FinishedError(f"the run into '{self.path}' is finished; there is nothing to resume")
        if not self.overwrite:
            raise RetargetError(f"'{self.path}' was finished by a different run; replace it with --overwrite")

    def keep_points(self, key: Mapping[str, Any], points: Mapping[Shares, Figures]) -> None:
        """Save the known points."""
        save_record(self.path / _POINTS, {"run": key, "points": [[list(each), points[each]] for each in points]})

    def write(self, figures: Figures) -> None:
        """Write all files, each atomically; once finished, the saved points are removed."""
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
            if figures["finished"]:
                (self.path / _POINTS).unlink(missing_ok=True)
        except OSError as error:
            raise RetargetError(f"cannot write to '{self.path}': {error}") from error


def write_table(figures: Mapping[str, Any]) -> str:
    """All points as CSV, with shares and scores; the models come first, with their names.

    Example:
        >>> write_table({"models": [{"name": "a"}], "points": []}).strip()
        'model,x,y,share of a,loss,top1,top5'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [plain(model["name"]) for model in figures["models"]]
    writer.writerow(["model", "x", "y", *(f"share of {name}" for name in names), "loss", "top1", "top5"])
    for place, point in enumerate(figures["points"]):
        scores = (point[name] for name in ("loss", "top1", "top5"))
        writer.writerow([names[place] if place < len(names) else "", point["x"], point["y"], *point["shares"], *scores])
    return text.getvalue()
