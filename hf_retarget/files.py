"""Atomic, durable writes; checksums and hashes; locks on folders."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.errors import LockedError
from hf_retarget.untrusted import CONTROL, MAX_DOCUMENT_BYTES, parse_json, plain, read_json

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

_FACTS = "hf-retarget"
_CHECKSUM = "sha256"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp|\.tmp\w{6}", re.ASCII)
"""Names of unfinished files of `atomic_path` and safetensors."""


class DamagedFileError(OSError):
    """The content of a file is not what was written to it."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path`, durably, if the block succeeds, and is removed otherwise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_path(Path(folder, "report.json")) as temporary:
        ...         _ = temporary.write_text("{}")
        ...     os.listdir(folder)
        ['report.json']
    """
    target = Path(path)
    make_folder(target.parent)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)  # mkstemp makes private files; the result gets the usual permissions
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        move_durably(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def move_durably(source: Path, target: Path) -> None:
    """Rename a file or folder so that a power cut leaves either the old state or the new one.

    Everything below `source` is synced before the rename, and the rename itself before this returns.
    """
    sync_all(source)
    os.replace(source, target)
    _sync(target.parent)
    if source.parent != target.parent:
        _sync(source.parent)


def sync_all(place: Path) -> None:
    """Sync a file, or a folder and everything below it, to disk."""
    for path in (*place.rglob("*"), place):
        if (path.is_file() or path.is_dir()) and not path.is_symlink():
            _sync(path)


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents durably; return the ones created, innermost first."""
    absent = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(absent):
        _sync(each.parent)
    return absent


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON document atomically; NaN and infinity become null."""
    write_text(path, to_json(content) + "\n")


def to_json(content: Any) -> str:
    """Serialize to strict JSON: NaN and infinity become null.

    Example:
        >>> to_json([float("nan")])
        '[\\n  null\\n]'
    """
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)  # JSON does not escape all of them


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def save_record(path: str | Path, facts: Mapping[str, Any]) -> None:
    """Write a small JSON document with a checksum, for `load_record`."""
    write_json(path, _seal(facts, {}))


def load_record(path: str | Path) -> dict[str, Any]:
    """Read what `save_record` wrote; raise OSError or ValueError if it is damaged."""
    return _unseal(read_json(path, MAX_DOCUMENT_BYTES), {})


def remove_leftovers(folder: Path, *, below: bool = True) -> None:
    """Remove temporary files that a killed process left in a folder and its subfolders. Hold the lock while calling."""
    for path in folder.rglob(".*tmp*") if below else folder.glob(".*tmp*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, with hard links instead of copies where the file system supports them."""

    def copy(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copyfile(one, other)

    shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: it is renamed first, so that it never exists in part."""
    doomed = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)  # left by a process that was killed here
    if folder.exists():
        os.replace(folder, doomed)
        _sync(folder.parent)
        shutil.rmtree(doomed)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors, facts about them and a checksum as safetensors; equal content gives equal bytes.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tensors(Path(folder, "state.safetensors"), {"w": torch.ones(1)}, {"step": 3})
        ...     load_tensors(Path(folder, "state.safetensors"))
        ({'w': tensor([1.])}, {'step': 3})
    """
    # A single metadata entry: safetensors writes several in an order that varies between processes.
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(path, kept, {_FACTS: json.dumps(_seal(facts, kept), sort_keys=True)})


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; raise OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{error}: '{path}'") from error


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; for any other safetensors file, the facts are empty.

    Raises OSError if the file cannot be read, and DamagedFileError if its content has changed.
    """
    from safetensors import SafetensorError, safe_open

    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would block
        raise OSError("it is not a regular file")
    try:
        with safe_open(str(path), "pt") as file:
            content = parse_json((file.metadata() or {}).get(_FACTS, "{}"))
            # Copies lie in memory as torch's own tensors do: the last digits of a product depend on that.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise OSError(str(error).partition("\n")[0]) from error  # torch appends its own stack
    if not isinstance(content, dict):
        raise DamagedFileError("its metadata is not an object")
    if _CHECKSUM not in content:  # not ours, or written before there were checksums
        return tensors, content
    return tensors, _unseal(content, tensors)


def _seal(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The facts as read back from a file (tuples become lists), with a checksum of them and the tensors."""
    content = json.loads(to_json(facts))
    text = json.dumps(content, sort_keys=True) + (hash_tensors(tensors) if tensors else "")
    return {"facts": content, _CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def _unseal(content: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    facts = content.get("facts") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or content != _seal(facts, tensors):
        raise DamagedFileError("its checksum does not match its content")
    return facts


def hash_file(path: Path) -> str:
    """The sha256 of a file."""
    if Path(path).exists() and not Path(path).is_file():  # reading a pipe would block
        raise OSError(f"'{path}' is not a regular file")
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """The sha256 of each file in a folder, subfolders excluded."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in paths), pool.map(hash_file, paths), strict=True))


def hash_tensors(weights: Mapping[str, Tensor]) -> str:
    """The sha256 of names, dtypes, shapes and values, for weights that are not in a file.

    Example:
        >>> import torch
        >>> hash_tensors({"w": torch.zeros(2)}) == hash_tensors({"w": torch.zeros(3)})
        False
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- locks

_TRIES = 100  # times that the lock file may be removed while we acquire it
_NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path, *, enabled: bool = True) -> Iterator[None]:
    """Hold the lock of an output folder while the block runs; a second run fails at once and names the holder.

    The lock is the hidden file `.NAME.lock` beside the folder. A killed process leaves the file behind, unlocked.

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
        who = "; its owner left no note"
        with suppress(OSError, ValueError, KeyError, TypeError):
            owner = read_json(note)
            who = f": process {int(owner['process'])} on {plain(owner['host'])}, since {plain(owner['since'])}"
        advice = "Wait for it, stop it, or name another folder"
        raise LockedError(f"another run is working on '{folder}'{who}. {advice}")

    with lock_entry(folder, refuse):
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        note.unlink(missing_ok=True)  # it may be a link
        with note.open("x", encoding="utf-8") as file:  # not atomic: a torn note is ignored
            file.write(to_json(owner) + "\n")
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


@contextmanager
def lock_entry(path: Path, taken: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file or folder shared by runs: the hidden file `.NAME.lock` beside it.

    If another process holds it, call `taken`, then wait unless that raised an error.
    """
    from filelock import FileLock

    place = path.with_name(f".{path.name}.lock")
    made: list[Path] = []
    seen: list[os.stat_result] = []
    # A soft lock would outlive its process.
    lock = FileLock(place, fallback_to_soft=False, on_acquired=lambda handle: seen.append(os.fstat(handle)))
    try:
        for _ in range(_TRIES):
            made += make_folder(place.parent)
            with suppress(FileNotFoundError):
                _acquire(lock, place, taken)
                if os.path.samestat(place.stat(), seen[-1]):
                    break
            lock.release()  # the previous holder has removed the file: lock a new one
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            lock.release()
    finally:
        for folder in made:  # those created for the lock, if still empty
            with suppress(OSError):
                folder.rmdir()


def _acquire(lock: BaseFileLock, place: Path, taken: Callable[[], None]) -> None:
    """Acquire a lock, or explain what to do on a file system without locks."""
    from filelock import Timeout

    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            taken()
            lock.acquire(timeout=-1)
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NOT_SUPPORTED:
            raise
        raise LockedError(
            f"the file system of '{place.parent}' has no locks; write to another one, or pass --no-lock "
            "if no other run works there"
        ) from error
