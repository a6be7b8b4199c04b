"""Where a long run keeps its unfinished work, and how the finished folder appears: all at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_retarget.errors import PortError
from hf_retarget.files import atomic_path

_RUN = "run.json"
_MODEL = "config.json"


@dataclass(frozen=True)
class Workplace:
    """A hidden folder beside the folder that is to be made. It goes when the work is done, and stays if it is not.

    Example:
        >>> Workplace.at("tuned").hidden.name
        '.tuned.work'
    """

    out: Path

    @classmethod
    def at(cls, out: str | Path) -> Workplace:
        """The place for a result; refuses what cannot become a folder."""
        path = Path(out).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise PortError(f"'{out}' is a file; name a folder that is to be made")
        if path == Path.cwd() or path in Path.cwd().parents:
            raise PortError(f"'{out}' is the folder you are in, or above it; name one that is to be made")
        return cls(path)

    @property
    def hidden(self) -> Path:
        """Where the unfinished work is."""
        return self.out.with_name(f".{self.out.name}.work")

    @property
    def result(self) -> Path:
        """The folder that becomes `out`."""
        return self.hidden / "result"

    @property
    def state(self) -> Path:
        """The file from which a run goes on."""
        return self.hidden / "state.safetensors"

    def check(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Refuse to destroy anything that nobody has said may be destroyed."""
        if self.out.is_dir() and any(self.out.iterdir()):
            if not overwrite:
                raise PortError(f"'{self.out}' is not empty; name another folder, or replace it with --overwrite")
            if not (self.out / _MODEL).is_file():
                raise PortError(f"'{self.out}' holds no model (no {_MODEL}) and is not replaced; name another folder")
        if self.state.exists() and not (resume or overwrite):
            raise PortError(
                f"an unfinished run for '{self.out}' is in '{self.hidden}'; go on with --resume, "
                "or begin anew with --overwrite"
            )

    def open(self, key: Mapping[str, Any], *, resume: bool = False) -> None:
        """Make the hidden folder, or go on in it if it belongs to the same run: `key` is all that decides about it."""
        with _naming(self.hidden):
            run = self.hidden / _RUN
            if resume and run.exists():
                self._compare(json.loads(json.dumps(key)), json.loads(run.read_text(encoding="utf-8")))
                return
            if self.hidden.exists():
                shutil.rmtree(self.hidden)
            self.result.mkdir(parents=True)
            with atomic_path(run) as temporary:
                temporary.write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def tidying(self) -> Iterator[None]:
        """If the block fails before there is anything to go on from, leave nothing behind."""
        try:
            yield
        except BaseException:
            if not self.state.exists():
                shutil.rmtree(self.hidden, ignore_errors=True)
            raise

    def publish(self) -> None:
        """Put the result in its place, all at once, and remove the hidden folder."""
        with _naming(self.out):
            replaced = self.hidden / "replaced"
            if self.out.exists() and not replaced.exists():
                self.out.rename(replaced)
            os.replace(self.result, self.out)
            shutil.rmtree(self.hidden)

    def _compare(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        for name in sorted({*ours, *theirs}):
            mine, other = ours.get(name), theirs.get(name)
            if mine != other:
                raise PortError(
                    f"the unfinished run in '{self.hidden}' was another one: '{name}' {_difference(other, mine)}; "
                    "repeat the same command, or begin anew with --overwrite and without --resume"
                )


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
        return f"had {name} {before.get(name)!r} and has {now.get(name)!r} now"
    return f"was {before!r} and is {now!r} now"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise PortError(f"cannot work in '{path}': {error}") from error
