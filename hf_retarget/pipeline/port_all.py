"""Port every fine-tuning of a base to a new one: one after the other, each on its own, and go on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from hf_retarget.devices import choose_device, from_main_process, in_main_process
from hf_retarget.errors import FinishedError, PortError, RecipeError, RetargetError
from hf_retarget.files import remove_leftovers, write_json
from hf_retarget.locks import lock_folder
from hf_retarget.pipeline.inputs import Reference, settle_recipe
from hf_retarget.pipeline.jobs import PortJob, check_name, list_jobs
from hf_retarget.pipeline.port import PortPlace, port
from hf_retarget.pipeline.reuse import PERMUTATION
from hf_retarget.progress import SILENT, Progress
from hf_retarget.publish.paths import identify, shorten_all, shorten_path
from hf_retarget.recipe import Recipe
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

FORMAT = "hf-retarget/port-all/1"
SUMMARY = "port-all.json"
REUSABLE = ("fgmt", "fgmt-sign", "gmt", "rebasin")
"""Methods that find a permutation between the bases, which the other fine-tunings can use as well."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    model: str
    folder: str
    """Below that of all."""
    status: str
    """`ported`, `there` (by an earlier run), or `failed`."""
    error: str | None = None
    top1: Mapping[str, float] = field(default_factory=dict)
    """Accuracy on the test images: port, and finetuned, naive, control, tuned, as far as they were measured."""
    verdict: str | None = None
    permutation_from: str | None = None
    """The folder whose permutation was used instead of searching for one."""
    seconds: float = 0.0


@dataclass(frozen=True)
class PortedAll:
    """What became of all models."""

    out: Path
    outcomes: tuple[Outcome, ...]
    permutation_from: str | None = None
    """The folder whose permutation the others use, if they were told to."""

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Those that could not be ported."""
        return tuple(each for each in self.outcomes if each.status == "failed")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        outcomes = [asdict(each) for each in self.outcomes]
        return {"format": FORMAT, "permutation_from": self.permutation_from, "models": outcomes}


def port_all(
    src_base: Reference,
    new_base: Reference,
    models: Iterable[str | Path | PortJob] = (),
    data: Any = None,
    *,
    out: str | Path,
    models_file: str | Path | None = None,
    recipe: Recipe | str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    reuse_permutation: bool = False,
    overwrite: bool = False,
    lock: bool = True,
    progress: Progress = SILENT,
    **options: Any,
) -> PortedAll:
    """Port fine-tunings of one base to another, each into a folder below `out`; one that fails does not stop the rest.

    `models` are references, or `PortJob`s with data and options of their own. A second call skips what is finished and
    goes on with what is not. With `reuse_permutation`, the permutation of the first port that succeeds serves for all
    others, which then take no gradients. Other options are those of `port`.
    """
    common, images = settle_recipe(data, recipe, preset, overrides)
    jobs = list_jobs(models, models_file)
    options["lock"] = lock
    run = _Run(src_base, new_base, common, images, Path(out).expanduser(), overwrite, progress, options)
    choose_device(options.get("device"), options.get("precision", "no"))
    with ExitStack() as stack:
        in_main_process(lambda: stack.enter_context(_held(run.out, lock)))
        done = PortedAll(run.out, (), run.find_donor() if reuse_permutation else None)
        for number, job in enumerate(jobs, start=1):
            progress.say(f"[{number} of {len(jobs)}] {job.model}")
            outcome = run.port(job, done.permutation_from)
            if outcome.error:
                progress.say(f"failed: {outcome.error}")
            found = done.permutation_from
            if reuse_permutation and found is None and run.found_permutation(job, outcome):
                found = outcome.folder
            done = replace(done, outcomes=(*done.outcomes, outcome), permutation_from=found)
            _write(done)
    return done


@contextmanager
def _held(out: Path, lock: bool) -> Iterator[None]:
    with lock_folder(out.resolve(), enabled=lock):
        if out.is_dir():
            remove_leftovers(out, below=False)  # folders below have locks of their own
        yield


@dataclass(frozen=True)
class _Run:
    src_base: Reference
    new_base: Reference
    common: Recipe
    images: Any
    out: Path
    overwrite: bool
    progress: Progress
    options: dict[str, Any]

    def port(self, job: PortJob, donor: str | None) -> Outcome:
        """Port one model, or find that it was; whatever goes wrong with it stays with it."""
        began = time.monotonic()
        try:
            recipe = job.settle(self.common)
            if (figures := self._finished(job, recipe)) is not None:
                self.progress.say("it is there already, and left as it is")
                return _outcome(job, "there", figures)
            place = PortPlace.at(self.out / job.folder)
            donor = donor if donor != job.folder and recipe.port.method in REUSABLE else None
            if donor:
                whole = ", and whole steps are taken" if recipe.port.method == "fgmt-sign" else ""
                self.progress.say(f"with the permutation of '{donor}': no gradients are needed{whole}")
            images = self.images if job.data is None and job.recipe is None else ""
            if isinstance(images, str) and not recipe.data.reference:
                raise PortError(f"there is no data for '{job.model}'; name it with --data, or in the models file")
            result = port(
                self.src_base,
                job.model,
                self.new_base,
                None if isinstance(images, str) else images,
                recipe=recipe,
                out=place.out,
                permutation=self.out / donor / PERMUTATION if donor else None,
                resume=from_main_process(place.state.exists()) and not self.overwrite,
                overwrite=self.overwrite,
                progress=self.progress,
                **self.options,
            )
        except FinishedError:  # it was, but for the last move
            return _outcome(job, "there", read_json(self.out / job.folder / "port.json", MAX_DOCUMENT_BYTES))
        except RetargetError as error:
            return Outcome(job.model, job.folder, "failed", str(error))
        except Exception as error:  # of whatever kind: a model that breaks something must not stop the others
            return Outcome(job.model, job.folder, "failed", f"{type(error).__name__}: {error}")
        seconds = round(time.monotonic() - began, 1)
        return replace(_outcome(job, "ported", result.figures), seconds=seconds)

    def found_permutation(self, job: PortJob, outcome: Outcome) -> bool:
        """Whether this port searched for a permutation, and found one that the others can use."""
        method = job.settle(self.common).port.method if outcome.status != "failed" else ""
        return method in REUSABLE and outcome.permutation_from is None

    def find_donor(self) -> str | None:
        """Whose permutation an earlier run between these bases used: a run that goes on must use the same."""
        try:
            name = check_name(str(read_json(self.out / SUMMARY, MAX_DOCUMENT_BYTES)["permutation_from"]))
            inputs = read_json(self.out / name / "port.json", MAX_DOCUMENT_BYTES)["inputs"]
            bases = [_known_as(inputs[side]) for side in ("source", "target")]
        except (OSError, ValueError, KeyError, TypeError, RecipeError):
            return None
        same = bases == [_name(self.src_base), _name(self.new_base)]
        return str(name) if same and (self.out / name / PERMUTATION).is_file() and not self.overwrite else None

    def _finished(self, job: PortJob, recipe: Recipe) -> dict[str, Any] | None:
        """The figures of an earlier port of the same to the same; one of something else is an error."""
        path = self.out / job.folder / "port.json"
        if self.overwrite or not path.is_file():
            return None
        try:
            figures: dict[str, Any] = read_json(path, MAX_DOCUMENT_BYTES)
            before = {side: _known_as(figures["inputs"][side]) for side in ("source", "tuned", "target")}
            stored = figures["recipe"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PortError(f"'{path}' cannot be read: {error}; remove the folder, or say --overwrite") from error
        now = {"source": _name(self.src_base), "tuned": _name(job.model), "target": _name(self.new_base)}
        if (side := next((side for side in now if now[side] != before[side]), None)) is not None:
            raise PortError(
                f"'{path.parent}' holds another port: its {side} was '{before[side][0]}' and is '{now[side][0]}' now; "
                "choose another folder with --out, or replace it with --overwrite"
            )
        images = figures["inputs"]["data"].get("location")
        moved = "the data was elsewhere" if images and images != identify(recipe.data.reference) else ""
        if changed := moved or _changed(stored, shorten_all(recipe.to_dict())):
            raise PortError(
                f"'{path.parent}' was ported with another recipe: {changed}; replace it with --overwrite, "
                "or repeat the same command"
            )
        return figures


def _name(reference: Reference) -> tuple[str, str | None]:
    """What port.json calls a model: the last part of its path, and what tells it from others of that name."""
    if not isinstance(reference, (str, Path)):
        return type(reference).__name__, None
    return shorten_path(str(reference)), identify(reference)


def _known_as(side: Mapping[str, Any]) -> tuple[str, str | None]:
    if "location" in side:
        return side["reference"], side["location"]
    return _name(side["reference"])  # of a version that wrote whole paths


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for section in ("data", "port", "finetune"):
        ours, theirs = now[section], before.get(section) or {}
        for name in ours:
            if ours[name] != theirs.get(name):
                return f"{section}.{name} was {theirs.get(name)!r} and is {ours[name]!r} now"
    return ""


def _outcome(job: PortJob, status: str, figures: Mapping[str, Any]) -> Outcome:
    scores = {name: score["top1"] for name, score in figures["test"].items()}
    origin = figures["permutation"].get("from")
    return Outcome(job.model, job.folder, status, None, scores, figures["verdict"], origin)


def _write(done: PortedAll) -> None:
    if PartialState().is_main_process:
        write_json(done.out / SUMMARY, done.to_json())
