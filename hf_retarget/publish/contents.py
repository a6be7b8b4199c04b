"""Which files of a finished folder are pushed: those written by this package, with local paths shortened."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from markupsafe import escape  # as the pages do
from safetensors import SafetensorError, safe_open

from hf_retarget.document import read_document
from hf_retarget.errors import PortError, PublishError
from hf_retarget.files import to_json
from hf_retarget.names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    COMPANIONS,
    FINETUNE,
    GRAPH,
    INITIAL_HEAD,
    MODEL_CONFIG,
    PERMUTATION,
    PORT,
    RECIPE,
    REPORT,
)
from hf_retarget.untrusted import parse_json, parse_yaml, read_json

WEIGHTS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"

KNOWN = (
    *(MODEL_CONFIG, WEIGHTS, INDEX, SHARDS, ADAPTER_CONFIG, ADAPTER_WEIGHTS, *COMPANIONS),
    *(CARD, PORT, FINETUNE, RECIPE, REPORT, PERMUTATION, INITIAL_HEAD, GRAPH),
    *("figures/*.png", "figures/*.svg", "plane/plane.*"),
)
"""All files of a finished port or fine-tuning."""

TRAJECTORY = "trajectory/*"
"""Large, and useful only for ports along it, so pushed only on request."""

SAMPLES = (REPORT, "figures/samples.*")
"""Files that show images of the data; unless the data are on the Hub, pushed only on request."""


def list_contents(
    folder: str | Path, *, trajectory: bool = False, samples: bool = False
) -> tuple[dict[str, Path], list[str]]:
    """List the files of a finished folder to push, by path in the repository, and the names of those left out."""
    place = Path(folder)
    _check_finished(place)
    patterns = (*KNOWN, TRAJECTORY) if trajectory else KNOWN
    private = () if samples or not _shows_private_images(place) else SAMPLES
    files, left_out = {}, []
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if path.is_symlink():  # it may point anywhere on this machine
            raise PublishError(f"'{name}' in '{folder}' is a link; put the file itself there, or remove the link")
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if matches(name.as_posix(), patterns) and not matches(name.as_posix(), private):
            files[name.as_posix()] = path
        else:
            left_out.append(name.as_posix())
    return files, left_out


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches one of the patterns; `*` does not match `/`.

    Example:
        >>> matches("figures/curve.png", ("figures/*.png",)), matches("a/figures/curve.png", ("*/*.png",))
        (True, False)
    """
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def list_weights(files: Mapping[str, Path]) -> list[str]:
    """The weight files among those to push."""
    single = [name for name in (WEIGHTS, ADAPTER_WEIGHTS, ADAPTER_CONFIG) if name in files]
    return single or [name for name in files if fnmatch(name, SHARDS)]


def _shows_private_images(folder: Path) -> bool:
    """Whether a port shows images of data that are not on the Hub, or of unknown origin."""
    try:
        document = read_document(folder / PORT)
    except PortError:
        return (folder / PORT).exists()
    return bool((document.samples or {}).get("images")) and document.data.revision is None


def _check_finished(folder: Path) -> None:
    made = "name a folder made by 'hf-retarget port' or 'finetune'"
    if not folder.is_dir():
        raise PublishError(f"there is no folder '{folder}'; {made}")
    if re.fullmatch(r"\..+\.(work|tmp)", folder.resolve().parent.name):
        raise PublishError(f"'{folder}' belongs to an unfinished run; continue it with --resume, then push")
    sharded = (folder / INDEX).is_file()
    single = ADAPTER_WEIGHTS if (folder / ADAPTER_CONFIG).is_file() else WEIGHTS
    for name in (MODEL_CONFIG, INDEX if sharded else single):
        if not (folder / name).is_file():
            raise PublishError(f"'{folder}' is not a finished model: it has no {name}; {made}")
    try:
        read_json(folder / MODEL_CONFIG)
        shards = read_json(folder / INDEX)["weight_map"].values() if sharded else (single,)
        for name in sorted({Path(each).name for each in shards}):
            with safe_open(str(folder / name), "np"):  # avoids the slow import of torch
                pass
    except SafetensorError as error:
        raise PublishError(
            f"'{folder}' is damaged: {name} is not a complete safetensors file ({error}); make it again"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PublishError(f"'{folder}' is damaged: {' '.join(str(error).split())}; make it again") from error


# ---- local paths


def shorten_path(text: str) -> str:
    """Return the last part of an absolute path, and any other text unchanged.

    Example:
        >>> shorten_path("/home/ada/photos/"), shorten_path("timm/resnet18"), shorten_path("local-dir:~/tuned")
        ('photos', 'timm/resnet18', 'local-dir:tuned')
    """
    scheme = "local-dir:" if text.startswith("local-dir:") else ""
    path = text.removeprefix(scheme)
    kind: type[PurePath] = PureWindowsPath if PureWindowsPath(path).drive else PurePosixPath
    local = "\n" not in path and (path.startswith("~") or kind(path).is_absolute())
    return scheme + kind(path).name if local and kind(path).name else text


def shorten_command(command: str) -> str:
    """Shorten the absolute paths in a command line.

    Example:
        >>> shorten_command("hf-retarget plane a=/old --data '/home/ada/my photos' --out=/plane --grid 3")
        "hf-retarget plane a=old --data 'my photos' --out=plane --grid 3"
    """
    try:
        words = shlex.split(command)
    except ValueError:  # unbalanced quotes: not from a shell
        return command
    short = [_shorten_word(word) for word in words]
    return command if short == words else shlex.join(short)


def _shorten_word(word: str) -> str:
    name, equals, value = word.partition("=")
    return name + equals + shorten_path(value) if equals and "/" not in name else shorten_path(word)


def shorten_all(value: Any) -> Any:
    """Shorten the absolute paths in a document or a recipe.

    Example:
        >>> shorten_all({"data": {"reference": "/home/ada/photos"}, "command": "hf-retarget port --out /tmp/x"})
        {'data': {'reference': 'photos'}, 'command': 'hf-retarget port --out x'}
    """
    if isinstance(value, dict):
        return {
            key: _SHORTEN[key](each) if key in _SHORTEN and isinstance(each, str) else shorten_all(each)
            for key, each in value.items()
        }
    return [shorten_all(each) for each in value] if isinstance(value, (list, tuple)) else value


_SHORTEN: dict[str, Callable[[str], str]] = {"reference": shorten_path, "command": shorten_command}
"""Entries that contain paths. Others may only look like paths: OpenImages has a label '/m/01g317'."""


def identify(reference: object) -> str | None:
    """Hash a local path, to compare it without revealing it; None for anything else.

    Example:
        >>> identify("/home/ada/photos") == identify("/home/bob/photos"), identify("timm/resnet18")
        (False, None)
    """
    text = str(reference)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if shorten_path(text) != text else None


def shorten_file(name: str, text: str, command: str = "") -> str:
    """Shorten the absolute paths in a file to publish; `command` is the one shown in an HTML page.

    Example:
        >>> shorten_file("recipe.yaml", "data:\\n  reference: /home/ada/photos\\n")
        'data:\\n  reference: photos\\n'
    """
    if name.endswith(".html"):
        return text.replace(str(escape(command)), str(escape(shorten_command(command)))) if command else text
    is_json = name.endswith(".json")
    try:
        before = parse_json(text) if is_json else parse_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text
    if (after := shorten_all(before)) == before:
        return text
    return to_json(after) + "\n" if is_json else yaml.safe_dump(after, sort_keys=False, allow_unicode=True, width=120)
