"""One run at a time in an output folder: a lock that says who holds it, and ends with its process."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_retarget.errors import LockedError
from hf_retarget.files import make_folder, to_json
from hf_retarget.untrusted import plain, read_json

_TRIES = 100  # holders that may remove the lock while we reach for it
_NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path, *, enabled: bool = True) -> Iterator[None]:
    """Hold the lock of an output folder while the block runs; a second run fails at once and learns who is first.

    The lock is the hidden file `.NAME.lock` beside the folder. A killed process leaves it behind, but does not hold it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place, lock_folder(Path(place, "ported")):
        ...     with lock_folder(Path(place, "ported")):
        ...         pass
        Traceback (most recent call last):
        ...
        hf_retarget.errors.LockedError: another run is working on ...
    """
    if not enabled:
        yield
        return
    note = folder.with_name(f".{folder.name}.lock.json")

    def refuse() -> None:
        raise LockedError(f"another run is working on '{folder}'{_describe_owner(note)}")

    with _locked(folder.with_name(f".{folder.name}.lock"), refuse):
        _sign(note)
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


@contextmanager
def lock_entry(path: Path, say: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of one file that runs share; `say` is called if another run has to be waited for."""
    with _locked(path.with_name(f".{path.name}.lock"), say):
        yield


@contextmanager
def _locked(path: Path, taken: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file; if another process does, call `taken`, and if that does not raise, wait."""
    from filelock import FileLock, Timeout

    made: list[Path] = []
    seen: list[os.stat_result] = []
    # A soft lock would outlive its process, and is not asked for.
    lock = FileLock(path, fallback_to_soft=False, on_acquired=lambda handle: seen.append(os.fstat(handle)))
    try:
        with _without_locks(path):
            for _ in range(_TRIES):
                made += make_folder(path.parent)
                try:
                    try:
                        lock.acquire(timeout=0)
                    except Timeout:
                        taken()
                        lock.acquire(timeout=-1)
                except FileNotFoundError:
                    continue  # its last holder has removed the folder, too
                if _is_there(path, seen[-1]):
                    break
                lock.release()  # its last holder has removed it: whoever comes now locks a new file
            else:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            lock.release()
    finally:
        for folder in made:  # only those that were made for the lock, and that nothing was put into
            with suppress(OSError):
                folder.rmdir()


def _is_there(path: Path, locked: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), locked)
    except FileNotFoundError:
        return False


@contextmanager
def _without_locks(path: Path) -> Iterator[None]:
    """Say what to do on a file system that has no locks."""
    try:
        yield
    except (NotImplementedError, OSError) as error:
        if isinstance(error, NotImplementedError) or error.errno in _NOT_SUPPORTED:
            raise LockedError(
                f"the file system of '{path.parent}' has no locks; write to another one, or say --no-lock "
                "if no other run works there"
            ) from error
        raise


def _sign(note: Path) -> None:
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    note.write_text(to_json(owner) + "\n", encoding="utf-8")  # not atomic: a torn note says nothing, and nothing more


def _describe_owner(note: Path) -> str:
    advice = "Wait for it, stop it, or name another folder"
    try:
        owner = read_json(note)
        who = f"process {int(owner['process'])} on {plain(owner['host'])}, since {plain(owner['since'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"; its owner left no note. {advice}"
    return f": {who}. {advice}"
