"""Reading untrusted files: bounded before parsing, plain values afterwards, and safe to print on a terminal.

All files that others may have written are read here: configurations, recipes, cards, graphs, documents of finished
ports. The limits are far above any honest file and far below what could exhaust memory or time.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MAX_CONFIG_BYTES = 16 << 20
"""config.json, an index of shards: 21,843 labels of ImageNet-21k take 2 MB."""
MAX_DOCUMENT_BYTES = 64 << 20
"""graph.json, port.json, plane.json of large models."""
MAX_YAML_BYTES = 256 << 10
"""A recipe, a list of models, the metadata of a card; parsing 100 kB of YAML takes a second."""
MAX_NESTING = 50
"""Levels of nested lists and objects."""
MAX_ENTRIES = 100_000
"""Entries of a YAML document, with aliases expanded."""
MAX_INTEGER = 2**63 - 1
"""The largest integer of torch, numpy and safetensors."""
MAX_FIGURE = 1e30
"""Larger than any measured figure."""

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except line feed and tab, and marks that change text direction."""


def read_bytes(path: str | Path, limit: int = MAX_CONFIG_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes; raise ValueError for any other file.

    Example:
        >>> read_bytes("/dev/zero")
        Traceback (most recent call last):
        ValueError: it is not a regular file
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # do not block on a pipe
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        if about.st_size > limit:
            raise ValueError(f"it has {about.st_size:,} bytes, and at most {limit:,} are read")
        return file.read(limit + 1)[:limit]


def read_json(path: str | Path, limit: int = MAX_CONFIG_BYTES) -> Any:
    """Parse a JSON file into plain values; raise ValueError if it is malformed."""
    return parse_json(read_bytes(path, limit).decode("utf-8"))


def parse_json(text: str) -> Any:
    """Parse JSON into plain values; refuse NaN, huge integers, deep nesting and duplicate keys.

    Example:
        >>> parse_json('{"depth": 12}'), parse_json("[" * 100 + "]" * 100)
        Traceback (most recent call last):
        ValueError: it is nested more than 50 levels deep
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_bounded_int,
            parse_float=_finite_float,
            parse_constant=_no_constant,
        )
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep") from None
    _check_nesting(value)
    return value


def read_yaml(path: str | Path) -> Any:
    """Parse a YAML file into plain values; raise ValueError or `yaml.YAMLError` if it is malformed."""
    return parse_yaml(read_bytes(path, MAX_YAML_BYTES).decode("utf-8"))


def parse_yaml(text: str) -> Any:
    """Parse YAML into plain values; refuse duplicate keys, and aliases that expand beyond `MAX_ENTRIES`.

    Example:
        >>> parse_yaml("port: {steps: 10}")
        {'port': {'steps': 10}}
    """
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"it has {len(text):,} characters, and at most {MAX_YAML_BYTES:,} are read")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node, {}, 0)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep") from None
    except (AttributeError, LookupError, ArithmeticError, TypeError) as error:  # of PyYAML, for values like `!!bool x`
        raise ValueError(f"it has a value that cannot be read ({type(error).__name__}: {error})") from error


def split_card(text: str) -> tuple[Any, str]:
    """The YAML metadata of a README.md as plain values (None if there is none), and the text below it.

    Example:
        >>> split_card("---\\nlicense: mit\\n---\\n# Birds\\n")
        ({'license': 'mit'}, '# Birds\\n')
    """
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", text, re.DOTALL)
    return (parse_yaml(match[1]), text[match.end() :]) if match else (None, text)


def plain(text: object) -> str:
    """Text that is safe to print: control characters and direction marks become visible escapes.

    Example:
        >>> plain("cat\\x1b[2J\\u202e")
        'cat\\\\x1b[2J\\\\u202e'
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key '{name}' appears twice")
    return found


def _bounded_int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INTEGER:
        raise ValueError(f"the number {digits[:20]}… is beyond {MAX_INTEGER}")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _check_nesting(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_NESTING} levels deep")


def _measure(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """The number of entries of a node, with aliases expanded."""
    if depth > MAX_NESTING:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep, or contains itself")
    if id(node) in known:
        return known[id(node)]
    inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    known[id(node)] = total = 1 + sum(_measure(each, known, depth + 1) for each in inner)
    if total > MAX_ENTRIES:
        raise ValueError(f"it has more than {MAX_ENTRIES:,} entries, with aliases expanded")
    return total


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key '{key.value}' appears twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) > 80:  # parsing huge numbers is slow
        raise yaml.constructor.ConstructorError(None, None, "the number is too long", node.start_mark)
    value: int = yaml.SafeLoader.construct_yaml_int(loader, node)
    if abs(value) > MAX_INTEGER:
        raise yaml.constructor.ConstructorError(None, None, f"{value} is beyond {MAX_INTEGER}", node.start_mark)
    return value


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    value: str = loader.construct_scalar(node)
    value.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)


def refuse_large(value: Any, where: str = "") -> None:
    """Raise ValueError for numbers that are too large for any figure, since statistics of them overflow.

    Example:
        >>> refuse_large({"seconds": [1.0, 1e308]})
        Traceback (most recent call last):
        ValueError: no figure is as large as 1e+308 (in 'seconds.1')
    """
    if isinstance(value, (dict, list)):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_large(each, f"{where}.{name}")
    elif isinstance(value, float) and abs(value) > MAX_FIGURE:
        raise ValueError(f"no figure is as large as {value:g} (in '{where.lstrip('.')}')")
