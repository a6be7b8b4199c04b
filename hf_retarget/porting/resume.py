"""Unfinished work: where a long run keeps it, how it continues, and how the finished folder appears atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import TypeAdapter

from hf_retarget.document import StepFigures
from hf_retarget.errors import FinishedError, PortError, RetargetError
from hf_retarget.files import (
    load_record,
    load_tensors,
    lock_folder,
    make_folder,
    move_durably,
    remove_folder,
    remove_leftovers,
    save_record,
    save_tensors,
    sync_all,
)
from hf_retarget.names import FINETUNE, MODEL_CONFIG
from hf_retarget.run import Run, doing_now, in_main_process
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from hf_retarget.evaluation.scorer import Score
    from hf_retarget.graph import Permutation, PermutationGraph
    from hf_retarget.matching.problem import State

ENVIRONMENT = "environment"
"""The part of a run's key whose change only causes the work to start over; any other change is another run."""
_RUN = "run.json"
_FINISHED = "finished"


class PlaceArguments(TypedDict, total=False):
    """How to treat an earlier result in the output folder."""

    resume: bool
    overwrite: bool
    lock: bool


@dataclass(frozen=True)
class Workplace:
    """An output folder and the hidden folder beside it, which holds unfinished work and is removed at the end.

    Without `out`, nothing is written.

    Example:
        >>> Workplace.at("tuned").hidden.name
        '.tuned.work'
    """

    out: Path | None
    record: str = FINETUNE
    """The file in the finished folder whose entry `run` is the key of the run."""
    unfinished: str = "state.safetensors"
    """Pattern of files from which a run can continue."""
    suffix: str = "work"
    resume: bool = False
    overwrite: bool = False
    lock: bool = True
    inputs: Sequence[Any] = ()
    """References the run reads; local ones are never overwritten."""
    images: Sequence[Any] = ()
    """Those to images, below which nothing is written: it would be read as images the next time."""

    @classmethod
    def at(cls, out: str | Path | None, **options: Any) -> Workplace:
        """The workplace of a result; PortError if `out` cannot become a folder."""
        if out is None:
            if options.get("resume"):
                raise PortError("only a run with an output folder can be resumed; give out=")
            return cls(None, **options)
        path = Path(out).expanduser().resolve()
        if any("\udc80" <= letter <= "\udcff" for letter in str(path)):
            raise PortError(f"{str(out)!a} is not a name in UTF-8; name another folder")
        if path.exists() and not path.is_dir():
            raise PortError(f"'{out}' is a file; name a new folder")
        if path == Path.cwd() or path in Path.cwd().parents:
            raise PortError(f"'{out}' is the current folder, or above it; name a new folder")
        if path.is_mount():
            raise PortError(f"'{out}' is a mount point, which cannot be replaced; name a folder inside it")
        return cls(path, **options)

    @property
    def folder(self) -> Path:
        """The output folder."""
        if self.out is None:
            raise PortError("there is no output folder; give out=")
        return self.out

    @property
    def hidden(self) -> Path:
        """The hidden folder with unfinished work."""
        return self.folder.with_name(f".{self.folder.name}.{self.suffix}")

    @property
    def result(self) -> Path:
        """The folder that will become `out`."""
        return self.hidden / "result"

    @property
    def has_state(self) -> bool:
        """Whether there is unfinished work to continue."""
        patterns = (self.unfinished, "*.training.safetensors", "model/*.safetensors")
        return self.hidden.is_dir() and any(path for each in patterns for path in self.hidden.glob(each))

    @contextmanager
    def held(self) -> Iterator[Workplace]:
        """Lock the folder, clean up after killed runs, and refuse to overwrite without `overwrite`.

        Only the main process holds the lock. If the block fails before there is anything to resume, nothing is left
        behind.
        """
        with ExitStack() as stack:

            def begin() -> None:
                with naming(self.folder):
                    stack.enter_context(lock_folder(self.folder, enabled=self.lock))
                    self._recover()
                self._check()
                stack.push(self._tidy)

            if self.out is not None:
                in_main_process(begin)
            yield self

    def begin(self, key: Mapping[str, Any], run: Run) -> None:
        """Create the hidden folder, or continue in it if it was made by a run with the same `key`.

        Raises FinishedError if that run is already finished.
        """
        if self.out is not None:
            in_main_process(lambda: self._begin(json.loads(json.dumps(key)), run.progress.say))

    def finish(self, write: Callable[[Path], None], run: Run) -> None:
        """Let `write` fill a folder and move it to `out` atomically; only the main process writes."""

        def put() -> None:
            shutil.rmtree(self.result, ignore_errors=True)  # what a killed run left there
            make_folder(self.result)
            with doing_now(run.progress, "writing the result"):
                write(self.result)
            with naming(self.folder):
                if not (self.result / MODEL_CONFIG).is_file() or not any(self.result.glob("*model*.safetensors")):
                    raise PortError(
                        f"'{self.result}' holds no complete model, so '{self.out}' was not made; run it again"
                    )
                sync_all(self.result)  # before anything says that it is finished
                save_record(self.hidden / _FINISHED, {})
                self._exchange()

        if self.out is not None:
            in_main_process(put)

    def _tidy(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.has_state and not (self.hidden / _FINISHED).exists():
            shutil.rmtree(self.hidden, ignore_errors=True)

    def _begin(self, ours: dict[str, Any], say: Callable[[str], None]) -> None:
        with naming(self.hidden):
            if self.resume and self._can_continue(ours, say):
                return
            if self.resume:
                self._check_finished(ours)
            if self.hidden.exists():
                remove_folder(self.hidden)
            make_folder(self.result)
            save_record(self.hidden / _RUN, ours)

    def _exchange(self) -> None:
        """Replace the old folder by the result; can be repeated after a kill."""
        if self.result.exists():
            if self.folder.exists():
                shutil.rmtree(self.hidden / "replaced", ignore_errors=True)
                os.replace(self.folder, self.hidden / "replaced")
            move_durably(self.result, self.folder)
        remove_folder(self.hidden)

    def _recover(self) -> None:
        """Bring the state of a killed run to either finished, or unfinished with the old folder in place."""
        shutil.rmtree(self.hidden.with_name(f"{self.hidden.name}.old"), ignore_errors=True)
        if not self.hidden.is_dir():
            return
        remove_leftovers(self.hidden)
        if (self.hidden / _FINISHED).exists():
            self._exchange()

    def _check(self) -> None:
        unfinished, out = (self.hidden / _RUN).exists(), self.folder
        refuse_inside(out, self.images)
        finished = self.resume and not unfinished and self._made_from() is not None  # `begin` checks the key
        if self.overwrite and (read := next((each for each in self.inputs if _is_within(each, out)), None)) is not None:
            raise PortError(f"'{out}' holds '{read}', which this run reads, so it is not replaced; name another folder")
        if out.is_dir() and any(out.iterdir()) and not finished:
            if not (out / MODEL_CONFIG).is_file():
                raise PortError(
                    f"'{self.out}' is not empty and holds no model (no {MODEL_CONFIG}), so it is not replaced; name "
                    "another folder"
                )
            if not self.overwrite:
                raise PortError(
                    f"'{out}' is not empty; name another folder with --out, continue with --resume if this run made "
                    "it, or replace it with --overwrite"
                )
        if self.has_state and not (self.resume or self.overwrite):
            raise PortError(
                f"an unfinished run for '{out}' is in '{self.hidden}'; continue with --resume, "
                "or start over with --overwrite"
            )

    def _made_from(self) -> dict[str, Any] | None:
        """The key of the run that made the finished folder, if any."""
        try:
            found = read_json(self.folder / self.record, MAX_DOCUMENT_BYTES)["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def _can_continue(self, ours: dict[str, Any], say: Callable[[str], None]) -> bool:
        path = self.hidden / _RUN
        if not path.exists():
            return False
        try:
            theirs = load_record(path)
        except (OSError, ValueError) as error:
            say(f"the unfinished run in '{self.hidden}' is damaged ({_RUN}: {error}); starting over")
            return False
        self._compare(ours, theirs, f"the unfinished run in '{self.hidden}' is a different one")
        if changed := find_change(ours.get(ENVIRONMENT), theirs.get(ENVIRONMENT)):
            say(f"the unfinished run was made in another environment ({changed}); starting over")
            return False
        return True

    def _check_finished(self, ours: dict[str, Any]) -> None:
        """Raise FinishedError if this run made the finished folder, and PortError if another one did."""
        theirs = self._made_from()
        if theirs is None:
            return
        try:
            self._compare(ours, theirs, f"'{self.out}' was finished by a different run")
        except PortError:
            if self.overwrite:
                return
            raise
        raise FinishedError(f"the run into '{self.out}' is finished; there is nothing to resume")

    def _compare(self, ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
        mine = {name: value for name, value in ours.items() if name != ENVIRONMENT}
        other = {name: value for name, value in theirs.items() if name != ENVIRONMENT}
        if changed := find_change(mine, other):
            raise PortError(
                f"{what}: {changed}; repeat the original command, or start over with --overwrite and without --resume"
            )


def _is_within(reference: Any, folder: Path) -> bool:
    """Whether a reference is the folder or inside it; of a glob pattern, the part before the first `*` counts."""
    if isinstance(reference, (list, tuple)):
        return any(_is_within(each, folder) for each in reference)
    if not isinstance(reference, (str, Path)):
        return False
    path = Path(str(reference).removeprefix("local-dir:").partition("*")[0]).expanduser()
    return path.exists() and path.resolve().is_relative_to(folder)


def refuse_inside(out: Path, images: Sequence[Any]) -> None:
    """Refuse an output folder inside a folder of images, where the next run would take it for images or a class."""
    for each in images:
        place = Path(each).expanduser() if isinstance(each, (str, Path)) and each != "" else None
        if place is not None and place.is_dir() and out.is_relative_to(place.resolve()):
            raise PortError(f"'{out}' is inside '{each}', whose images this run reads; name a folder outside")


def find_change(ours: Any, theirs: Any) -> str:
    """Describe the first entry that differs, two levels deep; empty if none does."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return "" if ours == theirs else f"it was {theirs!r} and is {ours!r} now"
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            if isinstance(mine, dict) and isinstance(other, dict):
                inner = next(each for each in sorted({*mine, *other}) if mine.get(each) != other.get(each))
                return f"'{name}' had {inner} {other.get(inner)!r} and has {mine.get(inner)!r} now"
            return f"'{name}' was {other!r} and is {mine!r} now"
    return ""


@contextmanager
def naming(path: Path, advice: str = "") -> Iterator[None]:
    """Turn errors of reading and writing into a PortError that names the folder and gives advice."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PortError(f"cannot work in '{path}': {error}{advice and f'; {advice}'}") from error


# ---- the steps of a contender

_PERMUTATION = "permutation/"
_WEIGHTS = "weights/"


@dataclass(frozen=True, eq=False)
class BestStep:
    """The best step so far: all weights of the ported model, including BatchNorm statistics."""

    step: int
    weights: dict[str, Tensor] = field(repr=False)
    permutation: Permutation | None
    """None if nothing was matched."""
    batchnorm: dict[str, Any] = field(repr=False)
    fit: dict[str, Any] = field(repr=False)
    """How well the permutation fits, as JSON values."""


@dataclass
class Track:
    """The figures of the steps of one contender along a course, and the best of them."""

    steps: list[StepFigures] = field(default_factory=list)
    best: BestStep | None = None
    score: Score | None = None
    """Score of the best step; not saved."""

    def describe(self, steps: int) -> tuple[dict[str, str], str]:
        """Describe the last step as a table row, and as a line for use without a terminal."""
        figures = self.steps[-1]
        best = self.steps[self.best.step - 1] if self.best else figures
        better, seconds = best is figures, sum(figures.seconds.values())
        cells = {
            "step": f"{figures.step} of {steps}",
            "validation": f"{figures.top1:.1%}",
            "best": f"{best.top1:.1%}{' ★' if better else '  '}",
            "moved": f"{figures.moved:.0%}",
            "seconds": f"{seconds:.1f}",
        }
        moved = f", {figures.moved:.0%} of the neurons moved" if figures.moved else ""
        words = " (best so far)" if better else ""
        return cells, f"step {figures.step} of {steps}: validation {figures.top1:.1%}{words}{moved}, {seconds:.1f} s"


@dataclass(frozen=True)
class StepDiary:
    """The files from which a course continues: the state after its last complete step, and the best steps so far."""

    folder: Path
    name: str
    graph: PermutationGraph
    run: Run

    def read(self) -> tuple[State, dict[str, Track]] | None:
        """Read the last complete step; None if there is none, or it is damaged."""
        found = None
        if self._progress.exists():
            try:
                found = self._read()
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RetargetError) as error:
                self.run.progress.say(f"the state in '{self.folder}' is damaged ({error}); the steps are recomputed")
        self.run.accelerator.wait_for_everyone()  # every process reads before the main one writes
        return found

    def write(self, state: State, tracks: Mapping[str, Track]) -> None:
        """Save a step. Its record is written last, and only then are the files of the previous step removed."""
        if not self.run.is_main:
            return
        try:
            state.save(self._state(state.step))
            kept, facts = {self._state(state.step)}, {}
            for name, track in tracks.items():
                if track.best is not None:
                    kept.add(self._best(name, track.best.step))
                    if track.best.step == state.step:
                        self._write_best(name, track.best)
                    facts[name] = {"best": track.best.step, "steps": [asdict(each) for each in track.steps]}
            save_record(self._progress, {"step": state.step, "tracks": facts})
            for path in self.folder.glob(f"{self.name}.*.safetensors"):
                if path not in kept:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise PortError(f"cannot keep step {state.step} in '{self.folder}': {error}") from error

    def _read(self) -> tuple[State, dict[str, Track]]:
        from hf_retarget.matching.problem import State

        facts, tracks = load_record(self._progress), {}
        for name, track in facts["tracks"].items():
            steps = TypeAdapter(list[StepFigures]).validate_json(json.dumps(track["steps"]), strict=True)
            if [each.step for each in steps] != list(range(1, len(steps) + 1)) or not 1 <= track["best"] <= len(steps):
                raise ValueError(f"the steps of '{name}' are not in order")
            tracks[name] = Track(steps, self._read_best(name, track["best"]))
        state = State.load(self._state(facts["step"]), self.graph)
        if state.step != max(len(each.steps) for each in tracks.values()):
            raise ValueError(f"step {state.step} is not the last one")
        self._check(state.weights, state.permutation)
        return state, tracks

    def _read_best(self, name: str, step: int) -> BestStep:
        from hf_retarget.graph import Permutation

        tensors, about = load_tensors(self._best(name, step))
        indices = {group.name: tensors[_PERMUTATION + group.name] for group in self.graph.groups}
        weights = {name: tensors[_WEIGHTS + name] for name in about["order"]}
        permutation = Permutation(self.graph.fingerprint, indices)
        self._check(weights, permutation)
        if not self.graph.parameters <= weights.keys() or not isinstance(about["batchnorm"], dict):
            raise ValueError(f"the best step of '{name}' is not whole")
        return BestStep(step, weights, permutation, about["batchnorm"], about.get("fit", {}))

    def _check(self, weights: Mapping[str, Tensor], permutation: Permutation) -> None:
        """Raise an error for what no step leaves behind, even if its checksum fits."""
        from hf_retarget.models.weights import find_not_finite

        self.graph.apply(permutation, {})
        known = self.graph.shapes
        wrong = next((name for name, each in weights.items() if known.get(name, each.shape) != each.shape), None)
        if wrong or (wrong := find_not_finite(weights)):
            raise ValueError(f"'{wrong}' has another shape, or is not finite")

    def _write_best(self, name: str, best: BestStep) -> None:
        tensors = {_WEIGHTS + each: tensor for each, tensor in best.weights.items()}
        if best.permutation is not None:
            tensors |= {_PERMUTATION + each: index for each, index in best.permutation.indices.items()}
        facts = {"batchnorm": best.batchnorm, "fit": best.fit, "order": list(best.weights)}
        save_tensors(self._best(name, best.step), tensors, facts)

    @property
    def _progress(self) -> Path:
        return self.folder / f"{self.name}.progress.json"

    def _state(self, step: int) -> Path:
        return self.folder / f"{self.name}.state-{step}.safetensors"

    def _best(self, name: str, step: int) -> Path:
        return self.folder / f"{self.name}.best-{name}-{step}.safetensors"
