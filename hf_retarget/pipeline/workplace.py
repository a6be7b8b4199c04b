"""Where a long run keeps its unfinished work, and how the finished folder appears: all at once, one run at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_retarget.devices import in_main_process
from hf_retarget.errors import FinishedError, PortError
from hf_retarget.files import load_record, make_folder, move_durably, remove_folder, remove_leftovers, save_record
from hf_retarget.locks import lock_folder
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

ENVIRONMENT = "environment"
"""The part of a run's key that may change without making it another run: then the work is done again."""
_RUN = "run.json"
_MODEL = "config.json"
_FINISHED = "finished"


@dataclass(frozen=True)
class Workplace:
    """A hidden folder beside the folder that is to be made. It goes when the work is done, and stays if it is not.

    Example:
        >>> Workplace.at("tuned").hidden.name
        '.tuned.work'
    """

    out: Path
    suffix: ClassVar[str] = "work"
    record: ClassVar[str] = "finetune.json"
    """The file in the finished folder that says, under `run`, what it was made from."""

    @classmethod
    def at(cls, out: str | Path) -> Workplace:
        """The place for a result; refuses what cannot become a folder."""
        path = Path(out).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise PortError(f"'{out}' is a file; name a folder that is to be made")
        if path == Path.cwd() or path in Path.cwd().parents:
            raise PortError(f"'{out}' is the folder you are in, or above it; name one that is to be made")
        if path.is_mount():
            raise PortError(f"'{out}' is where another file system begins; name a folder inside it")
        return cls(path)

    @property
    def hidden(self) -> Path:
        """Where the unfinished work is."""
        return self.out.with_name(f".{self.out.name}.{self.suffix}")

    @property
    def result(self) -> Path:
        """The folder that becomes `out`."""
        return self.hidden / "result"

    @property
    def state(self) -> Path:
        """The file from which a run goes on."""
        return self.hidden / "state.safetensors"

    @contextmanager
    def held(self, *, resume: bool = False, overwrite: bool = False, lock: bool = True) -> Iterator[None]:
        """Keep all other runs out, mend what a killed one has left, and refuse to overwrite without `overwrite`.

        Only the main process holds the lock. If the block fails before there is anything to resume from, nothing is
        left behind.
        """
        with ExitStack() as stack:

            def begin() -> None:
                with _naming(self.out):
                    stack.enter_context(lock_folder(self.out, enabled=lock))
                    self._recover()
                self._check(resume=resume, overwrite=overwrite)
                stack.push(self._tidy)

            in_main_process(begin)
            yield

    def _tidy(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.state.exists() and not (self.hidden / _FINISHED).exists():
            shutil.rmtree(self.hidden, ignore_errors=True)

    def open(
        self,
        key: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make the hidden folder, or go on in it if it belongs to the same run: `key` is all that decides about it.

        Raises FinishedError if that very run is finished already.
        """
        ours = json.loads(json.dumps(key))
        with _naming(self.hidden):
            if resume and self._can_go_on(ours, say):
                return
            if resume:
                self._check_finished(ours, overwrite)
            if self.hidden.exists():
                remove_folder(self.hidden)
            make_folder(self.result)
            save_record(self.hidden / _RUN, ours)

    def fresh_result(self) -> Path:
        """The empty folder into which the result is written, whatever a killed run has left there."""
        shutil.rmtree(self.result, ignore_errors=True)
        make_folder(self.result)
        return self.result

    def finish(self) -> None:
        """Put the result in its place, all at once, and remove the hidden folder."""
        with _naming(self.out):
            if not (self.result / _MODEL).is_file() or not any(self.result.glob("model*.safetensors")):
                raise PortError(f"'{self.result}' holds no whole model, and does not become '{self.out}'; run it again")
            save_record(self.hidden / _FINISHED, {})
            self._exchange()

    def _exchange(self) -> None:
        """Once more if need be: whatever was done before a kill is left as it is."""
        if self.result.exists():
            if self.out.exists():
                shutil.rmtree(self.hidden / "replaced", ignore_errors=True)
                os.replace(self.out, self.hidden / "replaced")  # as it is: nobody has to sync what goes
            move_durably(self.result, self.out)
        remove_folder(self.hidden)

    def _recover(self) -> None:
        """Bring what a killed run left into one of two states: finished, or unfinished with the old folder in place."""
        shutil.rmtree(self.hidden.with_name(f"{self.hidden.name}.old"), ignore_errors=True)
        if not self.hidden.is_dir():
            return
        remove_leftovers(self.hidden)
        if (self.hidden / _FINISHED).exists():
            self._exchange()

    def _check(self, *, resume: bool, overwrite: bool) -> None:
        unfinished = (self.hidden / _RUN).exists()
        finished = resume and not unfinished and self._made_from() is not None  # `open` sees whether it is this run
        if self.out.is_dir() and any(self.out.iterdir()) and not finished:
            if not overwrite:
                raise PortError(
                    f"'{self.out}' is not empty; name another folder with --out, go on with --resume if it is of this "
                    "run, or replace it with --overwrite"
                )
            if not (self.out / _MODEL).is_file():
                raise PortError(f"'{self.out}' holds no model (no {_MODEL}) and is not replaced; name another folder")
        if self.state.exists() and not (resume or overwrite):
            raise PortError(
                f"an unfinished run for '{self.out}' is in '{self.hidden}'; go on with --resume, "
                "or begin anew with --overwrite"
            )

    def _made_from(self) -> dict[str, Any] | None:
        """The key of the run that made the finished folder; None if it does not say."""
        try:
            found = read_json(self.out / self.record, MAX_DOCUMENT_BYTES)["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def _can_go_on(self, ours: dict[str, Any], say: Callable[[str], None]) -> bool:
        path = self.hidden / _RUN
        if not path.exists():
            return False
        try:
            theirs = load_record(path)
        except (OSError, ValueError) as error:
            say(f"the unfinished run in '{self.hidden}' is damaged ({_RUN}: {error}), and is computed again")
            return False
        self._compare(ours, theirs, f"the unfinished run in '{self.hidden}' was another one")
        if changed := _find_change(ours.get(ENVIRONMENT), theirs.get(ENVIRONMENT)):
            say(f"the unfinished run was made elsewhere ({changed}), and is computed again")
            return False
        return True

    def _check_finished(self, ours: dict[str, Any], overwrite: bool) -> None:
        """Say that there is nothing to do, or that the finished folder, which may not be replaced, is another one."""
        theirs = self._made_from()
        if theirs is None:
            return
        try:
            self._compare(ours, theirs, f"'{self.out}' is finished, and was another run")
        except PortError:
            if overwrite:
                return
            raise
        raise FinishedError(f"the run into '{self.out}' is finished; there is nothing to resume")

    def _compare(self, ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
        mine = {name: value for name, value in ours.items() if name != ENVIRONMENT}
        other = {name: value for name, value in theirs.items() if name != ENVIRONMENT}
        if changed := _find_change(mine, other):
            raise PortError(
                f"{what}: {changed}; repeat the same command, or begin anew with --overwrite and without --resume"
            )


def _find_change(ours: Any, theirs: Any) -> str:
    """The first entry that differs, two levels deep, in words; empty if all is the same."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return "" if ours == theirs else f"it was {theirs!r} and is {ours!r} now"
    for name in sorted({*ours, *theirs}):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            if isinstance(mine, dict) and isinstance(other, dict):
                inner = next(each for each in sorted({*mine, *other}) if mine.get(each) != other.get(each))
                return f"'{name}' had {inner} {other.get(inner)!r} and has {mine.get(inner)!r} now"
            return f"'{name}' was {other!r} and is {mine!r} now"
    return ""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise PortError(f"cannot work in '{path}': {error}") from error
