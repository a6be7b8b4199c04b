"""Paths of the machine where a model was made are nobody else's business: of each, only the last part is published."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from hf_retarget.files import to_json
from hf_retarget.untrusted import parse_json, parse_yaml


def shorten_path(text: str) -> str:
    """The last part of an absolute path; anything else as it is, and so is a relative path, which tells little.

    Example:
        >>> shorten_path("/home/ada/photos/"), shorten_path("timm/resnet18"), shorten_path("local-dir:~/tuned")
        ('photos', 'timm/resnet18', 'local-dir:tuned')
    """
    scheme = "local-dir:" if text.startswith("local-dir:") else ""
    path = text.removeprefix(scheme)
    windows = PureWindowsPath(path)
    kind: type[PurePath] = PureWindowsPath if windows.drive else PurePosixPath
    local = "\n" not in path and (path.startswith("~") or kind(path).is_absolute())
    return scheme + kind(path).name if local and kind(path).name else text


def shorten_command(command: str) -> str:
    """A command line with the last parts of its paths.

    Example:
        >>> shorten_command("hf-retarget port --data '/home/ada/my photos' --src-base=/old --steps 3")
        "hf-retarget port --data 'my photos' --src-base=old --steps 3"
    """
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not close: nothing that a shell has passed on
        return command
    short = [_shorten_word(word) for word in words]
    return command if short == words else shlex.join(short)


def _shorten_word(word: str) -> str:
    name, equals, value = word.partition("=")
    return name + equals + shorten_path(value) if equals and name.startswith("-") else shorten_path(word)


def shorten_all(value: Any) -> Any:
    """A document or a recipe with the last parts of its paths.

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
"""Entries of documents and recipes that hold paths. Others may look like some: OpenImages has a label '/m/01g317'."""


def identify(reference: object) -> str | None:
    """What tells one path of this machine from another, without telling what it is; None for what is no path.

    Example:
        >>> identify("/home/ada/photos") == identify("/home/bob/photos"), identify("timm/resnet18")
        (False, None)
    """
    text = str(reference)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if shorten_path(text) != text else None


def shorten_file(name: str, text: str, command: str = "") -> str:
    """The text of a file that is published, with the last parts of its paths; a page shows `command` somewhere.

    Example:
        >>> shorten_file("recipe.yaml", "data:\\n  reference: /home/ada/photos\\n")
        'data:\\n  reference: photos\\n'
    """
    import yaml
    from markupsafe import escape  # as the page does

    if name.endswith(".html"):
        return text.replace(str(escape(command)), str(escape(shorten_command(command)))) if command else text
    try:
        before = parse_json(text) if name.endswith(".json") else parse_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text
    if (after := shorten_all(before)) == before:
        return text
    if name.endswith(".json"):
        return to_json(after) + "\n"
    return yaml.safe_dump(after, sort_keys=False, allow_unicode=True, width=120)
