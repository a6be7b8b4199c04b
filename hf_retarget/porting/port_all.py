"""Port all fine-tunings of a base to a new one, on one machine or several, resuming after interruptions."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.advice import choose_action
from hf_retarget.contenders import find_contender
from hf_retarget.document import PortDocument, read_document
from hf_retarget.errors import FinishedError, PortError, RecipeError, RetargetError
from hf_retarget.files import lock_folder, remove_leftovers, write_json, write_text
from hf_retarget.hub import one_line
from hf_retarget.models import Reference
from hf_retarget.models.hub import split_revision
from hf_retarget.names import PERMUTATION, PORT, PORT_ALL, PORT_ALL_PAGE, SIDES
from hf_retarget.porting.port import PortArguments, port, port_place
from hf_retarget.progress import Progress
from hf_retarget.publish.contents import identify, shorten_all, shorten_path
from hf_retarget.recipe import Recipe, choose_recipe, finish_recipe, load_yaml
from hf_retarget.report.comparison import draw_port_all_page
from hf_retarget.run import Run, check_arguments, from_main_process, in_main_process, pick
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json
from hf_retarget.words import nearest, plural

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = "hf-retarget/port-all/1"
_SUMMARY = re.compile(r"port-all(-\d{1,5}-of-\d{1,5})?\.json", re.ASCII)

PORTED, THERE, FAILED, WAITING = "ported", "there", "failed", "waiting"
"""Status of a model: ported now, or by an earlier run; failed; not started or not finished."""


# ---- jobs


@dataclass(frozen=True)
class PortJob:
    """One fine-tuning to port; fields that are not set are common to all.

    Example:
        >>> PortJob("me/resnet18-birds", data="cub", overrides={"port.steps": 15}).folder
        'resnet18-birds'
    """

    model: str
    data: str | None = None
    """Recipe, Hub dataset, folder or file."""
    recipe: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe to change, as in {'port.steps': 15}."""
    name: str | None = None
    """Subfolder for the result; by default the last part of the model's name."""

    @property
    def folder(self) -> str:
        """The subfolder for the result."""
        return Path(split_revision(self.model)[0]).name if self.name is None else self.name

    def settle(self, common: Recipe) -> Recipe:
        """The recipe of this job: its own, or the common one with its own data."""
        if self.recipe is not None:
            return choose_recipe(self.data, self.recipe, None, self.overrides)
        if self.data is not None:
            common = common.changed({"data": choose_recipe(self.data).to_dict()["data"]})
        return common.override(**dict(self.overrides))


def list_jobs(models: Iterable[str | Path | PortJob], file: str | Path | None = None) -> tuple[PortJob, ...]:
    """Combine a list of models and a models file into jobs with distinct folders.

    Example:
        >>> [job.folder for job in list_jobs(["me/birds", "you/birds", "me/pets@v2"])]
        ['me--birds', 'you--birds', 'pets']
    """
    jobs = [each if isinstance(each, PortJob) else PortJob(str(each)) for each in models]
    if file is not None:
        jobs += read_jobs(file)
    if not jobs:
        raise RecipeError("no models to port; name them with --models, or in a file with --models-file")
    for job in jobs:
        check_name(job.folder)
    return _distinct(jobs)


def check_name(name: str) -> str:
    """Return the name of a subfolder; RecipeError if it would be hidden or lie elsewhere.

    Example:
        >>> check_name("../birds")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.RecipeError: '../birds' cannot be the name of a folder; ...
    """
    if not name or name.startswith((".", "~")) or any(letter in name for letter in "/\\\0") or len(name) > 200:
        raise RecipeError(f"{name!r} cannot be the name of a folder; give another 'name' in the models file")
    return name


def read_jobs(path: str | Path) -> list[PortJob]:
    """Read a YAML list of models, or of entries with `model`, `data`, `recipe`, `overrides` and `name`."""
    document = load_yaml(path, "models file")
    if isinstance(document, Mapping) and set(document) == {"models"}:
        document = document["models"]
    if not isinstance(document, list):
        raise RecipeError(f"models file '{path}' is not a list; write one model per line, as in '- org/name'")
    return [_read_job(entry, f"models file '{path}', entry {number}") for number, entry in enumerate(document, 1)]


def _read_job(entry: Any, where: str) -> PortJob:
    if isinstance(entry, str):
        return PortJob(entry)
    known = [each.name for each in fields(PortJob)]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
        raise RecipeError(f"{where}: no model is named; write '- org/name', or '- model: org/name' with further fields")
    for key, value in entry.items():
        if key not in known:
            raise RecipeError(f"{where}: unknown field '{key}'{nearest(key, known)} (known: {', '.join(known)})")
        expected = Mapping if key == "overrides" else str
        if not isinstance(value, expected):
            words = "fields such as 'port.steps: 15'" if key == "overrides" else "a text"
            raise RecipeError(f"{where}: {key} is {value!r}, but must be {words}")
    return PortJob(**entry)


def _distinct(jobs: Sequence[PortJob]) -> tuple[PortJob, ...]:
    """Prefix models of the same name with their organisation or parent folder."""
    counts = Counter(job.folder for job in jobs)
    named = []
    for job in jobs:
        path = Path(split_revision(job.model)[0])
        longer = f"{path.parent.name}--{path.name}" if path.parent.name else path.name
        named.append(job if counts[job.folder] == 1 or job.name else replace(job, name=longer))
    twice = next((name for name, count in Counter(job.folder for job in named).items() if count > 1), None)
    if twice is not None:
        raise RecipeError(f"two models would go to the folder '{twice}'; give one of them a 'name' in the models file")
    return tuple(named)


# ---- several machines


@dataclass(frozen=True)
class Shard:
    """One part of the models, to be ported on one of several machines.

    Example:
        >>> jobs = list_jobs(["me/d", "me/b", "me/a", "me/c"])
        >>> [job.folder for job in Shard(1, 2).choose(jobs)]
        ['b', 'd']
    """

    number: int = 0
    """From 0."""
    count: int = 1

    @property
    def summary(self) -> str:
        """The file with the outcomes of its models."""
        return PORT_ALL if self.count == 1 else f"{Path(PORT_ALL).stem}-{self.number}-of-{self.count}.json"

    def choose(self, jobs: Sequence[PortJob]) -> tuple[PortJob, ...]:
        """Every N-th job, sorted by folder: independent of their order, and disjoint from other parts."""
        ordered = jobs if self.count == 1 else sorted(jobs, key=lambda job: job.folder)
        return tuple(ordered[self.number :: self.count])


def read_shard(text: str | None, environment: Mapping[str, str]) -> Shard:
    """Parse `I/N`; without it, use the index in a Slurm job array, if there is one.

    Example:
        >>> read_shard("2/8", {})
        Shard(number=2, count=8)
        >>> array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "16"}
        >>> read_shard(None, array).summary
        'port-all-4-of-16.json'
    """
    if text is None and (task := environment.get("SLURM_ARRAY_TASK_ID")):
        wanted = (("MIN", "0"), ("STEP", "1"), ("COUNT", ""))
        first, step, count = (environment.get(f"SLURM_ARRAY_TASK_{name}", default) for name, default in wanted)
        text = f"task {task} of Slurm"  # unless the array is a plain range, such as --array=0-7
        with suppress(ValueError, ZeroDivisionError):
            text = f"{(int(task) - int(first)) / int(step):g}/{int(count)}"
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", "0/1" if text is None else text, re.ASCII)
    if not match or int(match[1]) >= int(match[2]):
        raise PortError(f"'{text}' is not a valid part; write --shard I/N with I from 0 to N-1, such as 0/8")
    return Shard(int(match[1]), int(match[2]))


# ---- porting


@dataclass(frozen=True)
class Outcome:
    """The outcome for one model."""

    model: str
    folder: str
    """Subfolder of the result."""
    status: str
    """`ported`, `there` (by an earlier run), `failed`, or `waiting`."""
    error: str | None = None
    winner: str | None = None
    top1: Mapping[str, float] = field(default_factory=dict)
    """Test accuracy of each contender."""
    action: str | None = None
    """The recommended action: `port`, `fit a head`, `retrain` or `keep`."""
    verdict: str | None = None
    permutation_from: str | None = None
    """The folder whose permutation was used instead of searching for one."""
    seconds: float = 0.0


@dataclass(frozen=True)
class PortedAll:
    """The outcomes for all models."""

    out: Path
    outcomes: tuple[Outcome, ...]
    permutation_from: str | None = None
    """The folder whose permutation the others reuse, if requested."""
    shard: Shard = Shard()
    problems: tuple[str, ...] = ()
    """Messages about parts without a result."""

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The models that could not be ported."""
        return tuple(each for each in self.outcomes if each.status == FAILED)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        content = {key: value for key, value in asdict(self).items() if key != "out"}
        return {"format": FORMAT, "models": content.pop("outcomes"), **content}

    def write(self, *, page: bool = False) -> None:
        """Write the summary, and optionally the page."""
        write_json(self.out / self.shard.summary, self.to_json())
        if page:
            write_text(self.out / PORT_ALL_PAGE, draw_port_all_page(self.to_json()))


class PortAllArguments(PortArguments, total=False):
    """Further options of `port_all`: those of `port`, and three of its own."""

    models_file: str | Path | None
    reuse_permutation: bool
    shard: Shard


def port_all(
    src_base: Reference,
    new_base: Reference,
    models: Iterable[str | Path | PortJob] = (),
    data: Any = None,
    *,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    **options: Unpack[PortAllArguments],
) -> PortedAll:
    """Port fine-tunings of one base to another, each into a subfolder of `out`; a failure does not stop the rest.

    `models` are references, or `PortJob`s with their own data and options; `models_file` lists more. A second call
    skips finished ports and continues the others. With `reuse_permutation`, all ports reuse the permutation of the
    first one that succeeds, without gradients. With `shard`, only a part of the models is ported; `collect_ports`
    joins the parts. The other options are those of `port`.
    """
    check_arguments("port_all", options, PortAllArguments)
    rest: dict[str, Any] = {**options}
    file, reuse, shard = rest.pop("models_file", None), rest.pop("reuse_permutation", False), rest.pop("shard", Shard())
    overwrite, run = rest.pop("overwrite", False), Run(**pick(rest, Run))
    progress = rest["progress"] = run.progress
    common, images = finish_recipe(data, recipe, rest.pop("preset", None), rest.pop("overrides", None))
    every = list_jobs(models, file)
    jobs = shard.choose(every)
    work = _PortAll(src_base, new_base, common, images, Path(out).expanduser(), overwrite, progress, rest)
    is_main, donor = run.is_main, work.find_donor() if reuse else None
    if shard.count > 1:
        progress.say(f"part {shard.number} of {shard.count} (from 0): {len(jobs)} of {plural(len(every), 'model')}")
        if reuse and donor is None:
            raise PortError(
                f"'{out}' has no permutation yet that all parts could use; port one model there first, "
                "with --reuse-permutation and without --shard"
            )
    with ExitStack() as stack:
        in_main_process(lambda: stack.enter_context(_held(work.out, shard, rest.get("lock", True))))
        done = PortedAll(work.out, tuple(Outcome(job.model, job.folder, WAITING) for job in jobs), donor, shard)
        for number, job in enumerate(jobs):
            if is_main:
                done.write()
            progress.say(f"[{number + 1} of {len(jobs)}] {job.model}")
            outcome = work.port(job, done.permutation_from)
            if outcome.error:
                progress.say(f"failed: {outcome.error}")
            found = done.permutation_from
            if reuse and found is None and outcome.status != FAILED and outcome.permutation_from is None:
                searched = find_contender(job.settle(common).port.method).finds_permutation
                found = outcome.folder if searched else None
            outcomes = (*done.outcomes[:number], outcome, *done.outcomes[number + 1 :])
            done = replace(done, outcomes=outcomes, permutation_from=found)
        if is_main:
            done.write(page=shard.count == 1)
    return done


def collect_ports(out: str | Path) -> PortedAll:
    """Join the results of all parts in a folder, and any other ports in it, into one summary and one page."""
    folder = Path(out).expanduser()
    summaries = [path for path in folder.glob("port-all*.json") if _SUMMARY.fullmatch(path.name)]
    summaries.sort(key=lambda path: path.stat().st_mtime)
    known = {each.folder: each for path in summaries for each in _read_outcomes(path)}
    for path in folder.glob(f"*/{PORT}"):
        known.setdefault(path.parent.name, Outcome(path.parent.name, path.parent.name, WAITING))
    if not known:
        raise PortError(f"there are no ports in '{out}'; name the folder that was given as --out for all parts")
    counts = [int(count) for path in summaries for count in re.findall(r"-of-(\d+)", path.name)]
    parts = [Shard(number, counts[-1]) for number in range(counts[-1] if counts else 0)]
    absent = [f"{each.number}/{each.count}" for each in parts if not (folder / each.summary).is_file()]
    problems = tuple(f"part {each} has no result; run it with --shard {each}" for each in absent)
    outcomes = tuple(_look_again(folder, known[name]) for name in sorted(known))
    donor = next((each.permutation_from for each in outcomes if each.permutation_from), None)
    done = PortedAll(folder, outcomes, donor, problems=problems)
    done.write(page=True)
    return done


def _read_outcomes(path: Path) -> list[Outcome]:
    from pydantic import TypeAdapter, ValidationError

    try:
        found = TypeAdapter(list[Outcome]).validate_python(read_json(path, MAX_DOCUMENT_BYTES)["models"])
        return [each for each in found if check_name(each.folder)]
    except (OSError, ValueError, KeyError, TypeError, ValidationError, RecipeError) as error:
        raise PortError(f"'{path}' is damaged ({one_line(error)}); remove it, and run its part again") from error


def _look_again(folder: Path, outcome: Outcome) -> Outcome:
    """Update an outcome by what its folder holds now: the port may have been finished since, or removed."""
    path = folder / outcome.folder / PORT
    if path.is_file():
        try:
            document = read_document(path)
        except PortError as error:
            return replace(outcome, status=FAILED, error=str(error))
        return _outcome(PortJob(outcome.model, name=outcome.folder), THERE, document)
    if outcome.status in (PORTED, THERE):
        return Outcome(outcome.model, outcome.folder, FAILED, f"'{path.parent}' is gone; port it again")
    return outcome


@contextmanager
def _held(out: Path, shard: Shard, lock: bool) -> Iterator[None]:
    """Lock this part against a second run; the folders of single models have their own locks."""
    place = out.resolve()
    with lock_folder(place if shard.count == 1 else place / shard.summary, enabled=lock):
        if out.is_dir() and shard.count == 1:
            remove_leftovers(out, below=False)
        yield


@dataclass(frozen=True)
class _PortAll:
    src_base: Reference
    new_base: Reference
    common: Recipe
    images: Any
    out: Path
    overwrite: bool
    progress: Progress
    options: dict[str, Any]

    def port(self, job: PortJob, donor: str | None) -> Outcome:
        """Port one model unless that is done already; any error becomes part of its outcome."""
        began = time.monotonic()
        try:
            recipe = job.settle(self.common)
            place = port_place(self.out / job.folder, resume=True, lock=self.options.get("lock", True))
            if (document := self._finished(job, recipe)) is not None:
                self.progress.say("already finished; left as it is")
                with suppress(RetargetError), place.held():
                    pass  # cleans up after a killed run
                return _outcome(job, THERE, document)
            donor = donor if donor != job.folder and find_contender(recipe.port.method).finds_permutation else None
            if donor:
                self.progress.say(f"reusing the permutation of '{donor}': whole steps, without gradients")
            images = self.images if job.data is None and job.recipe is None else ""
            if isinstance(images, str) and not recipe.data.reference:
                raise PortError(f"no data was given for '{job.model}'; name it with --data, or in the models file")
            result = port(
                self.src_base,
                job.model,
                self.new_base,
                None if isinstance(images, str) else images,
                recipe=recipe,
                out=place.out,
                permutation=self.out / donor / PERMUTATION if donor else None,
                resume=from_main_process(place.has_state) and not self.overwrite,
                overwrite=self.overwrite,
                **self.options,
            )
        except FinishedError:  # only the final move was missing
            return _outcome(job, THERE, read_document(self.out / job.folder / PORT))
        except RetargetError as error:
            return Outcome(job.model, job.folder, FAILED, str(error))
        except Exception as error:  # of any kind: one model must not stop the others
            return Outcome(job.model, job.folder, FAILED, f"{type(error).__name__}: {error}")
        seconds = round(time.monotonic() - began, 1)
        return replace(_outcome(job, PORTED, result.document), seconds=seconds)

    def find_donor(self) -> str | None:
        """The folder whose permutation an earlier run between these bases used, for a resumed run."""
        try:
            name = check_name(str(read_json(self.out / PORT_ALL, MAX_DOCUMENT_BYTES)["permutation_from"]))
            models = read_document(self.out / name / PORT).models
            bases = [(models[side].reference, models[side].location) for side in ("source", "target")]
        except (OSError, ValueError, KeyError, TypeError, RetargetError):
            return None
        same = bases == [_name(self.src_base), _name(self.new_base)]
        return str(name) if same and (self.out / name / PERMUTATION).is_file() and not self.overwrite else None

    def _finished(self, job: PortJob, recipe: Recipe) -> PortDocument | None:
        """The document of an earlier, identical port; PortError if the folder holds a different one."""
        path = self.out / job.folder / PORT
        if self.overwrite or not path.is_file():
            return None
        document = read_document(path)
        for side, model in (("source", self.src_base), ("tuned", job.model), ("target", self.new_base)):
            known, (name, place) = document.models[side], _name(model)
            if (known.reference, known.location) != (name, place):
                raise PortError(
                    f"'{path.parent}' holds another port: its {SIDES[side]} was '{known.reference}' and is '{name}' "
                    "now; choose another folder with --out, or replace it with --overwrite"
                )
        now, before, images = shorten_all(recipe.to_dict()), document.recipe, document.data.location
        changes = ["the data was elsewhere"] if images and images != identify(recipe.data.reference) else []
        changes += [
            f"{part}.{name} was {before.get(part, {}).get(name)!r} and is {value!r} now"
            for part in ("data", "port", "finetune")
            for name, value in now[part].items()
            if value != before.get(part, {}).get(name)
        ]
        if changes:
            raise PortError(
                f"'{path.parent}' was ported with another recipe: {changes[0]}; replace it with --overwrite, "
                "or repeat the same command"
            )
        return document


def _name(reference: Reference) -> tuple[str, str | None]:
    """The name of a model in port.json, and the hash of its path, if it is one."""
    if not isinstance(reference, (str, Path)):
        return type(reference).__name__, None
    return shorten_path(str(reference)), identify(reference)


def _outcome(job: PortJob, status: str, document: PortDocument) -> Outcome:
    return Outcome(
        job.model,
        job.folder,
        status,
        winner=document.result.name if document.contenders else None,
        top1={each.name: each.test.top1 for each in document.contenders},
        action=choose_action(document),
        verdict=document.verdict,
        permutation_from=document.permutation.origin,
        seconds=round(sum(document.seconds.values()), 1),
    )
