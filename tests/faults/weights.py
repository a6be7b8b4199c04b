"""Weights, headers of safetensors files and shards that are not what they should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults.bench import DATA, SHORT, Bench, Row, rewrite
from safetensors.torch import load_file, save_file

Header = dict[str, Any]
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


def split(path: Path) -> tuple[Header, bytes]:
    """The header of a safetensors file, and what follows it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: Header | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of whatever header."""
    text = json.dumps(header) if isinstance(header, dict) else header
    packed = text.encode() if isinstance(text, str) else text
    return (len(packed) if length is None else length).to_bytes(8, "little") + packed + data


def _copy(bench: Bench, folder: Path) -> Path:
    return Path(shutil.copytree(bench.model, folder / "model"))


# ---- one tensor is wrong; `convert` reads them all

Tensors = dict[str, torch.Tensor]


def _set(name: str, value: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value(tensors[name]) if callable(value) else value})


def _drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def _fill(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


WRONG: list[tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = [
    ("nan", _set("fc.bias", _fill(float("nan"))), ("'fc.bias'", "NaN or infinite")),
    ("infinite", _set("conv1.0.weight", _fill(float("inf"))), ("'conv1.0.weight'", "NaN or infinite")),
    ("nan in a statistic", _set("bn1.running_var", _fill(float("nan"))), ("'bn1.running_var'", "NaN or infinite")),
    ("int32", _set("fc.weight", lambda each: each.to(torch.int32)), ("fc.weight is int32",)),
    ("int8", _set("fc.weight", lambda each: each.to(torch.int8)), ("fc.weight is int8",)),
    ("bool", _set("fc.weight", lambda each: each > 0), ("fc.weight is bool",)),
    ("complex", _set("fc.weight", lambda each: each.to(torch.complex64)), ("fc.weight is complex64",)),
    ("all int32", lambda tensors: tensors.update({k: v.to(torch.int32) for k, v in tensors.items()}), ("int32",)),
    ("head of one class", _set("fc.weight", lambda each: each[:1].clone()), ("fc.weight",)),
    ("head of no class", _set("fc.weight", lambda each: each[:0].clone()), ("fc.weight",)),
    ("head without axes", _set("fc.weight", torch.tensor(1.0)), ("fc.weight",)),
    ("another width", _set("conv1.0.weight", lambda each: each[:5].clone()), ("conv1.0.weight", "[5, 1, 3, 3]")),
    ("one axis more", _set("fc.bias", lambda each: each[None].clone()), ("fc.bias", "[1, 10]")),
    ("a tensor is missing", _drop("conv1.3.weight"), ("conv1.3.weight",)),
    ("half of the head is missing", _drop("fc.bias"), ("fc.bias",)),
    ("no tensors", lambda tensors: tensors.clear(), ("no tensors",)),
    ("a tensor too many", lambda tensors: tensors.update(extra=torch.zeros(3)), ("extra",)),
    ("a name that is a path", lambda tensors: tensors.update({"../../x": torch.zeros(3)}), ("../../x",)),
    ("a name that is an escape", lambda tensors: tensors.update({"\x1b[2J": torch.zeros(3)}), ("\\x1b[2J",)),
    ("a name without letters", lambda tensors: tensors.update({"": torch.zeros(3)}), ("unexpected",)),
    (
        "of another model",
        lambda tensors: (tensors.clear(), tensors.update(w=torch.zeros(2))),
        ("does not fit", "missing"),
    ),
]


def _wrong(change: Callable[[Tensors], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    tensors = load_file(_copy(bench, folder) / MODEL)
    change(tensors)
    save_file(tensors, folder / "model" / MODEL, {"format": "pt"})
    return ("convert", "model", "out")


# ---- the file itself is wrong


def _entry(**changes: Any) -> Callable[[Path], bytes]:
    """Change what the header says about one tensor."""

    def change(path: Path) -> bytes:
        header, data = split(path)
        header["fc.bias"] |= changes
        return join(header, data)

    return change


def _move(by: int) -> Callable[[Path], bytes]:
    def change(path: Path) -> bytes:
        header, data = split(path)
        header["fc.bias"]["data_offsets"] = [each + by for each in header["fc.bias"]["data_offsets"]]
        return join(header, data)

    return change


def _head(**changes: Any) -> Callable[[Path], bytes]:
    def change(path: Path) -> bytes:
        header, data = split(path)
        return join(header | changes, data)

    return change


def _rewritten(change: Callable[[str], str]) -> Callable[[Path], bytes]:
    def make(path: Path) -> bytes:
        header, data = split(path)
        return join(change(json.dumps(header)), data)

    return make


_UNREADABLE = ("model.safetensors", "not a whole safetensors file")

FILES: list[tuple[str, Callable[[Path], bytes], tuple[str, ...]]] = [
    ("empty", lambda _: b"", _UNREADABLE),
    ("seven bytes", lambda _: b"1234567", _UNREADABLE),
    ("zeros", lambda _: bytes(1000), _UNREADABLE),
    ("noise", lambda _: bytes(range(256)) * 40, _UNREADABLE),
    ("text", lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", _UNREADABLE),
    ("html", lambda _: b"<!DOCTYPE html><html>Sign in</html>", _UNREADABLE),
    ("zip", lambda _: b"PK\x03\x04" + bytes(100), _UNREADABLE),
    ("half", lambda path: path.read_bytes()[: path.stat().st_size // 2], _UNREADABLE),
    ("one byte less", lambda path: path.read_bytes()[:-1], _UNREADABLE),
    ("one byte more", lambda path: path.read_bytes() + b"x", _UNREADABLE),
    ("header beyond the file", lambda _: join({}, length=10**6), _UNREADABLE),
    ("header of 2^63", lambda _: join({}, length=2**63), _UNREADABLE),
    ("header of 2^64 - 1", lambda _: join({}, length=2**64 - 1), _UNREADABLE),
    ("header of 200 MB", lambda _: join(" " * (200 << 20)), _UNREADABLE),
    ("header of no length", lambda _: join(b""), _UNREADABLE),
    ("header not UTF-8", lambda _: join(b'{"\xff\xfe": 1}'), _UNREADABLE),
    ("header a list", lambda _: join("[]"), _UNREADABLE),
    ("header a number", lambda _: join("7"), _UNREADABLE),
    ("header nothing", lambda _: join("null"), _UNREADABLE),
    ("header nested", lambda _: join("[" * 100_000), _UNREADABLE),
    ("header with a nested object", lambda _: join('{"a":' * 50_000 + "1" + "}" * 50_000), _UNREADABLE),
    ("header cut", lambda _: join('{"a": {"dtype": "F32"'), _UNREADABLE),
    ("header with NaN", _entry(shape=[float("nan")]), _UNREADABLE),
    ("name twice", _rewritten(lambda text: text[:-1] + "," + text[text.index('"bn1.bias"') :]), ("twice",)),
    ("metadata a list", _head(__metadata__=[]), _UNREADABLE),
    ("metadata of numbers", _head(__metadata__={"a": 1}), _UNREADABLE),
    ("unknown dtype", _entry(dtype="F31"), _UNREADABLE),
    ("dtype a number", _entry(dtype=3), _UNREADABLE),
    ("no dtype", _head(**{"fc.bias": {"shape": [10], "data_offsets": [0, 40]}}), _UNREADABLE),
    ("shape larger than its bytes", _entry(shape=[11]), _UNREADABLE),
    ("shape smaller than its bytes", _entry(shape=[9]), _UNREADABLE),
    ("shape negative", _entry(shape=[-10]), _UNREADABLE),
    ("shape a text", _entry(shape="10"), _UNREADABLE),
    ("shape a fraction", _entry(shape=[10.5]), _UNREADABLE),
    ("shape beyond 64 bits", _entry(shape=[2**70]), _UNREADABLE),
    ("shape that overflows", _entry(shape=[2**33, 2**33]), _UNREADABLE),
    ("dtype of half the size", _entry(dtype="F16"), _UNREADABLE),
    ("offsets overlap", _move(-4), _UNREADABLE),
    ("offsets leave a hole", _move(4), _UNREADABLE),
    ("offsets beyond the file", _move(10**9), _UNREADABLE),
    ("offsets negative", _entry(data_offsets=[-40, 0]), _UNREADABLE),
    ("offsets backwards", _entry(data_offsets=[80, 40]), _UNREADABLE),
    ("offsets of one number", _entry(data_offsets=[0]), _UNREADABLE),
    ("offsets a text", _entry(data_offsets="0-40"), _UNREADABLE),
    ("offsets beyond 64 bits", _entry(data_offsets=[0, 2**65]), _UNREADABLE),
    ("entry a number", _head(**{"fc.bias": 7}), _UNREADABLE),
]


def _file(change: Callable[[Path], bytes], command: tuple[str, ...], bench: Bench, folder: Path) -> tuple[object, ...]:
    path = _copy(bench, folder) / MODEL
    path.write_bytes(change(path))
    return command


_INSPECTED = ("half", "header beyond the file", "header not UTF-8", "header nested", "offsets negative", "name twice")
_CHECKED = (*_INSPECTED, "shape that overflows", "dtype of half the size", "offsets beyond the file", "empty")


# ---- shards


def _shard(bench: Bench, folder: Path) -> Path:
    model = _copy(bench, folder)
    tensors = load_file(model / MODEL)
    (model / MODEL).unlink()
    names = sorted(tensors)
    where = {
        name: f"model-0000{1 + (number >= len(names) // 2)}-of-00002.safetensors" for number, name in enumerate(names)
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, model / file, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return model


_SECOND = "model-00002-of-00002.safetensors"
_MAP = "weight_map"


def _index(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda model: rewrite(model / INDEX, change)


SHARDS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("one is missing", lambda model: (model / _SECOND).unlink(), (_SECOND,)),
    ("one is empty", lambda model: (model / _SECOND).write_bytes(b""), (_SECOND,)),
    ("one is half", lambda model: (model / _SECOND).write_bytes((model / _SECOND).read_bytes()[:5000]), (_SECOND,)),
    ("one is a folder", lambda model: ((model / _SECOND).unlink(), (model / _SECOND).mkdir()), (_SECOND,)),
    ("index empty", lambda model: (model / INDEX).write_text(""), (INDEX,)),
    ("index no JSON", lambda model: (model / INDEX).write_text("weights: 2"), (INDEX,)),
    ("index nested", lambda model: (model / INDEX).write_text("[" * 100_000), (INDEX, "nested")),
    ("index a list", _index(lambda _: []), (INDEX,)),
    ("index without a map", _index(lambda _: {"metadata": {}}), (INDEX,)),
    ("map a list", _index(lambda content: content | {_MAP: []}), (INDEX,)),
    ("map empty", _index(lambda content: content | {_MAP: {}}), ("names no files",)),
    ("map of numbers", _index(lambda content: content | {_MAP: dict.fromkeys(content[_MAP], 1)}), (INDEX,)),
    ("points above", _index(lambda content: content[_MAP].update({"fc.bias": "../x.safetensors"})), ("../x.safetensors",)),
    ("points to the root", _index(lambda content: content[_MAP].update({"fc.bias": "/etc/x.safetensors"})), ("/etc/x",)),
    ("points below", _index(lambda content: content[_MAP].update({"fc.bias": "sub/x.safetensors"})), ("sub/x",)),
    ("points to a pickle", _index(lambda content: content[_MAP].update({"fc.bias": "model.bin"})), ("model.bin",)),
    ("points to itself", _index(lambda content: content[_MAP].update({"fc.bias": INDEX})), (INDEX,)),
    ("a tensor that no shard has", _index(lambda content: content[_MAP].update(ghost=_SECOND)), ("ghost", _SECOND)),
    ("a tensor in the other shard", _index(lambda content: content[_MAP].update({"bn1.bias": _SECOND})), ("bn1.bias",)),
    ("a tensor that the index lacks", _index(lambda content: content[_MAP].pop("fc.bias") and None), ("fc.bias",)),
    ("ten thousand shards", _index(lambda content: content[_MAP].update({f"t{n}": f"s{n}.safetensors" for n in range(10_000)})), ("s0.safetensors",)),
]  # fmt: skip


def _sharded(
    change: Callable[[Path], object], command: tuple[str, ...], bench: Bench, folder: Path
) -> tuple[object, ...]:
    change(_shard(bench, folder))
    return command


# ---- other places for weights


def _at(content: bytes | None, name: str, *command: str) -> Callable[[Bench, Path], tuple[object, ...]]:
    def make(bench: Bench, folder: Path) -> tuple[object, ...]:
        if content is not None:
            (folder / name).write_bytes(content)
        return command

    return make


def _folder_without(
    *names: str, command: tuple[str, ...] = ("convert", "model", "out")
) -> Callable[[Bench, Path], tuple[object, ...]]:
    def make(bench: Bench, folder: Path) -> tuple[object, ...]:
        model = _copy(bench, folder)
        for name in names:
            (model / name).unlink()
        return command

    return make


def _pickled(content: Any) -> Callable[[Bench, Path], tuple[object, ...]]:
    def make(bench: Bench, folder: Path) -> tuple[object, ...]:
        torch.save(content, folder / "a.pth")
        return ("convert", "a.pth", "out", "--arch", "test_resnet", "--allow-pickle")

    return make


def _huge(bench: Bench, folder: Path) -> tuple[object, ...]:
    net = load_file(_copy(bench, folder) / MODEL)
    net = {
        name: tensor * 1e30 if tensor.is_floating_point() and "running" not in name else tensor
        for name, tensor in net.items()
    }
    save_file(net, folder / "model" / MODEL, {"format": "pt"})
    return ("evaluate", "model", *DATA)


def _negative(bench: Bench, folder: Path) -> tuple[object, ...]:
    _wrong(_set("bn1.running_var", _fill(-1.0)), bench, folder)
    return ("evaluate", "model", *DATA)


_ONE = join({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))

OTHERS = [
    ("nothing there", _at(None, "", "convert", "nosuch/dir", "out"), ("nosuch/dir",)),
    ("an unknown name of timm", _at(None, "", "convert", "resnet81", "out"), ("resnet81", "resnet18")),
    ("an empty name", _at(None, "", "convert", "", "out"), ("''",)),
    ("a folder without anything", lambda _, folder: ((folder / "empty").mkdir(), ("convert", "empty", "out"))[1], ("empty", "config.json")),
    ("no config.json", _folder_without("config.json"), ("config.json",)),
    ("no weights", _folder_without(MODEL), ("safetensors",)),
    ("weights are a folder", lambda bench, folder: ((_copy(bench, folder) / MODEL).unlink(), (folder / "model" / MODEL).mkdir(), ("convert", "model", "out"))[2], (MODEL,)),
    ("a file without --arch", _at(b"x", "a.safetensors", "convert", "a.safetensors", "out"), ("--arch",)),
    ("a file of another kind", _at(b"x", "a.onnx", "convert", "a.onnx", "out", "--arch", "test_resnet"), ("a.onnx",)),
    ("arch unknown", _at(_ONE, "a.safetensors", "convert", "a.safetensors", "out", "--arch", "nosuchnet"), ("nosuchnet",)),
    ("arch is code that is not there", _at(_ONE, "a.safetensors", "convert", "a.safetensors", "out", "--arch", "nosuch:thing"), ("nosuch",)),
    ("arch without a function", _at(_ONE, "a.safetensors", "convert", "a.safetensors", "out", "--arch", "json:nosuch"), ("nosuch",)),
    ("arch that returns no model", _at(_ONE, "a.safetensors", "convert", "a.safetensors", "out", "--arch", "time:time"), ("time:time",)),
    ("a pickle unasked", _at(b"x", "a.pth", "convert", "a.pth", "out", "--arch", "test_resnet"), ("--allow-pickle",)),
    ("a pickle that is none", _at(b"x", "a.pth", "convert", "a.pth", "out", "--arch", "test_resnet", "--allow-pickle"), ("a.pth",)),
    ("a pickle cut", _at(b"PK\x03\x04" + bytes(50), "a.pth", "convert", "a.pth", "out", "--arch", "test_resnet", "--allow-pickle"), ("a.pth",)),
    ("a pickle of a class", _pickled(Path("x")), ("a.pth", "tensors")),
    ("a pickle of a number", _pickled(3), ("a.pth",)),
    ("a pickle of a list", _pickled([torch.zeros(1)]), ("a.pth",)),
    ("a pickle of texts", _pickled({"state_dict": {"a": "b"}}), ("a.pth",)),
    ("a pickle without tensors", _pickled({"state_dict": {}}), ("a.pth",)),
    ("a pickle with numbers for names", _pickled({1: torch.zeros(1)}), ("a.pth",)),
    ("answers that overflow", _huge, ("NaN",)),
    ("negative variance", _negative, ("NaN",)),
]  # fmt: skip

ROWS = [
    *(Row("weights", name, partial(_wrong, change), says) for name, change, says in WRONG),
    *(Row("weights", name, make, says) for name, make, says in OTHERS),
    *(Row("headers", name, partial(_file, change, ("convert", "model", "out")), says) for name, change, says in FILES),
    *(
        Row("headers", f"{name} (inspect)", partial(_file, change, ("inspect", "model")), says)
        for name, change, says in FILES
        if name in _INSPECTED
    ),
    *(Row("shards", name, partial(_sharded, change, ("convert", "model", "out")), says) for name, change, says in SHARDS),
    *(
        Row("shards", f"{name} (inspect)", partial(_sharded, change, ("inspect", "model")), says)
        for name, change, says in SHARDS
        if name in ("one is missing", "map of numbers", "points above", "a tensor that no shard has")
    ),
]  # fmt: skip


def _check(change: Callable[[Path], bytes], bench: Bench, folder: Path) -> tuple[object, ...]:
    path = _copy(bench, folder) / MODEL
    path.write_bytes(change(path))
    return ("check", *bench.trio(tuned="model"), *DATA)


def _refuse_port(bench: Bench, folder: Path) -> tuple[object, ...]:
    path = _copy(bench, folder) / MODEL
    path.write_bytes(path.read_bytes()[:-1])
    return ("port", *bench.trio(new="model"), *DATA, *SHORT, "--out", "out")


ROWS += [
    Row("headers", f"{name} (check)", partial(_check, change), says) for name, change, says in FILES if name in _CHECKED
]
ROWS += [Row("headers", "one byte less (port)", _refuse_port, _UNREADABLE)]
