"""Images, tables of images and labels that cannot be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from faults.bench import Bench, Row
from PIL import Image

PICTURES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SMALL = ("--data-image-size", "28")
TUNE = ("--steps", "1", "--batch-size", "14", "--out", "out", "-q", *SMALL)


def png(shade: int, **options: Any) -> bytes:
    """A small picture."""
    buffer = BytesIO()
    Image.new("L", (28, 28), shade % 256).save(buffer, "PNG", **options)
    return buffer.getvalue()


def _fill(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 8) -> None:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for each in range(count):
            (folder / name / f"{each}.png").write_bytes(png(40 * each + 7 * number))


def _folder(change: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    data = folder / "data"
    _fill(data / "train")
    _fill(data / "test", count=4)
    change(data)
    return ("finetune", bench.model, "--data", "data", *TUNE)


def _replace(content: bytes) -> Callable[[Path], object]:
    return lambda data: [path.write_bytes(content) for path in sorted((data / "train" / "cat").iterdir())]


def _clear(data: Path) -> None:
    shutil.rmtree(data)
    data.mkdir()


def _tiff(mode: str, size: tuple[int, int] = (28, 28)) -> bytes:
    buffer = BytesIO()
    Image.new(mode, size).save(buffer, "TIFF")
    return buffer.getvalue()


def _float_tiff() -> bytes:
    import numpy as np

    buffer = BytesIO()
    Image.fromarray(np.linspace(0, 1, 784, dtype=np.float32).reshape(28, 28)).save(buffer, "TIFF")
    return buffer.getvalue()


def _bomb() -> bytes:
    """A picture that says it has two billion pixels."""
    content = bytearray(png(3))
    content[16:24] = (50_000).to_bytes(4, "big") * 2
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def _all_tiffs(content: bytes) -> Callable[[Path], object]:
    def change(data: Path) -> None:
        for path in list(data.rglob("*.png")):
            path.with_suffix(".tiff").write_bytes(content)
            path.unlink()

    return change


_IMAGE = ("cannot be read", "cat/")

FOLDERS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("empty folder", _clear, ("no images",)),
    ("only text files", lambda data: (_clear(data), (data / "a.txt").write_text("x")), ("no images",)),
    ("empty image", _replace(b""), _IMAGE),
    ("text as image", _replace(b"hello"), _IMAGE),
    ("half an image", _replace(png(1)[: len(png(1)) // 2]), _IMAGE),
    ("an image that says it is huge", _replace(_bomb()), _IMAGE),
    ("postscript", _replace(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\n%%EOF\n"), _IMAGE),
    ("html", _replace(b"<html></html>"), _IMAGE),
    ("svg", _replace(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), _IMAGE),
    ("LAB", _replace(_tiff("LAB")), _IMAGE),
    ("floats from 0 to 1", _replace(_float_tiff()), _IMAGE),
    ("a chunk with a broken sum", _replace(png(1)[:-6] + b"xx" + png(1)[-4:]), ()),
    ("an image that is a pipe", lambda data: ((data / "train" / "cat" / "1.png").unlink(), os.mkfifo(data / "train" / "cat" / "1.png")), ()),
    ("an image that is endless", lambda data: ((data / "train" / "cat" / "1.png").unlink(), (data / "train" / "cat" / "1.png").symlink_to("/dev/zero")), ()),
    ("an image that is a lost link", lambda data: ((data / "train" / "cat" / "1.png").unlink(), (data / "train" / "cat" / "1.png").symlink_to("nowhere.png")), ()),
    ("one class", lambda data: [shutil.rmtree(data / split / "dog") for split in ("train", "test")], ("one class",)),
    ("splits and other folders", lambda data: _fill(data / "extra"), ("extra",)),
    ("a class that is only tested", lambda data: _fill(data / "test", ("cow",)), ()),
    ("more classes than the model", lambda data: _fill(data / "train", tuple(f"c{n}" for n in range(20))), ()),
    ("a class folder that is not UTF-8", lambda data: os.mkdir(os.fsencode(data / "train") + b"/\xff\xfe") or (Path(os.fsdecode(os.fsencode(data / "train") + b"/\xff\xfe")) / "1.png").write_bytes(png(1)), ("not UTF-8",)),
    ("no test images", lambda data: shutil.rmtree(data / "test") or (data / "test").mkdir(), ("'train'", "'test'")),
]  # fmt: skip

# Of these, what is accepted, and why: the program goes on with what is left.
ACCEPTED = {
    "a chunk with a broken sum": "all pixels come before it",
    "more classes than the model": "fine-tuning makes a head for the classes of the data",
    "an image that is a pipe": "what is no regular file is left out",
    "an image that is endless": "what is no regular file is left out",
    "an image that is a lost link": "what is no regular file is left out",
    "a class that is only tested": "`port` and `check` say so before any verdict",
}


# ---- parquet

Column = Any


def _table(path: Path, pictures: Any, labels: Any, **columns: Any) -> None:
    pq.write_table(pa.table({"image": pictures, "label": labels, **columns}), path)


def _cells(count: int = 12) -> pa.Array:
    return pa.array([{"bytes": png(9 * n), "path": None} for n in range(count)], PICTURES)


def _parquet(write: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    (folder / "data").mkdir()
    write(folder / "data" / "train.parquet")
    return ("finetune", bench.model, "--data", "data", *TUNE)


def _labels(values: Any, kind: Any = None) -> Callable[[Path], object]:
    return lambda path: _table(path, _cells(), pa.array(values, kind))


def _class_label(path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    schema = features.arrow_schema
    table = pa.table({"image": _cells(), "label": pa.array([n % 3 for n in range(12)], pa.int64())})
    pq.write_table(table.replace_schema_metadata(schema.metadata), path)


_TWELVE = [n % 2 for n in range(12)]

TABLES: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("empty file", lambda path: path.write_bytes(b""), ("cannot be read",)),
    ("no parquet", lambda path: path.write_bytes(b"hello" * 100), ("cannot be read",)),
    ("cut", lambda path: (_table(path, _cells(), _TWELVE), path.write_bytes(path.read_bytes()[:-200])), ("cannot be read",)),
    ("footer flipped", lambda path: (_table(path, _cells(), _TWELVE), path.write_bytes(path.read_bytes()[:-60] + b"x" * 52 + path.read_bytes()[-8:])), ("cannot be read",)),
    ("no rows", lambda path: _table(path, _cells(0), pa.array([], pa.int64())), ("data",)),
    ("no images", lambda path: pq.write_table(pa.table({"label": _TWELVE, "x": _TWELVE}), path), ("no column holds images",)),
    ("two columns of labels", lambda path: _table(path, _cells(), _TWELVE, target=_TWELVE), ()),
    ("a cell without an image", lambda path: _table(path, pa.array([None] * 12, PICTURES), pa.array(_TWELVE)), ("no image",)),
    ("a cell that is no image", lambda path: _table(path, pa.array([{"bytes": b"x", "path": None}] * 12, PICTURES), pa.array(_TWELVE)), ("not an image",)),
    ("a cell that names a file", lambda path: _table(path, pa.array([{"bytes": None, "path": "/etc/hostname"}] * 12, PICTURES), pa.array(_TWELVE)), ("outside the data",)),
    ("a cell that names a device", lambda path: _table(path, pa.array([{"bytes": None, "path": "/dev/zero"}] * 12, PICTURES), pa.array(_TWELVE)), ("outside the data",)),
    ("texts for images", lambda path: _table(path, pa.array(["x"] * 12), pa.array(_TWELVE)), ("no column holds images",)),
]  # fmt: skip

LABELS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("missing", _labels([0, 1, None] * 4, pa.int64()), ("label",)),
    ("all missing", _labels([None] * 12, pa.int64()), ("label",)),
    ("negative", _labels([0, 1, -1] * 4), ("-1",)),
    ("fractions", _labels([0.5, 1.5] * 6), ("0.5",)),
    ("not numbers", _labels([float("nan"), 1.0] * 6), ("nan",)),
    ("a million", _labels([0, 10**6] * 6), ("65,536",)),
    ("far apart", _labels([0, 60_000] * 6), ("60,001 classes for 12 images",)),
    ("beyond 64 bits", _labels([0, 2**64 - 1] * 6, pa.uint64()), ("label",)),
    ("beyond 63 bits of a decimal", _labels([0.0, 1e300] * 6), ("label",)),
    ("lists", _labels([[0], [1]] * 6), ("label",)),
    ("one of all", _labels([3] * 12), ("one class",)),
    ("times", _labels([0, 1] * 6, pa.timestamp("s")), ("label",)),
    ("out of those declared", _class_label, ("label",)),
    ("empty texts", _labels(["", "a"] * 6), ()),
    ("texts with a missing one", _labels(["a", "b", None] * 4), ("label",)),
    ("a mark that turns the direction", _labels(["a", "\u202e"] * 6), ()),
]  # fmt: skip

_FINE = ("two columns of labels", "empty texts", "a mark that turns the direction")


def _data(text: str, *more: object) -> Callable[[Bench, Path], tuple[object, ...]]:
    return lambda bench, folder: ("evaluate", bench.model, "--data", text, *more)


def _as_test(bench: Bench, folder: Path) -> tuple[object, ...]:
    data = folder / "data"
    _fill(data / "train")
    shutil.copytree(data / "train", data / "test")
    return ("finetune", bench.model, "--data", "data", *(each for each in TUNE if each != "-q"))


REFERENCES = [
    ("nothing", _data(""), ("data",)),
    ("a folder that is not there", _data("./nosuch"), ("./nosuch",)),
    ("a file that is not there", _data("nosuch.parquet"), ("nosuch.parquet",)),
    ("a glob without a match", _data("nosuch/*.parquet"), ("nosuch/*.parquet",)),
    ("a file of another kind", lambda bench, folder: ((folder / "a.csv").write_text("a,b"), ("evaluate", bench.model, "--data", "a.csv"))[1], ("a.csv",)),
    ("a bad id of the Hub", _data("a/b/c/d"), ("a/b/c/d",)),
    ("an id that is not there", _data("ada/nosuch"), ("ada/nosuch",)),
    ("an id with odd letters", _data("ada/a b"), ("ada/a b",)),
    ("a revision that is not there", _data("ada/nosuch", "--data-revision", "x"), ("ada/nosuch",)),
]  # fmt: skip


def _below(out: str, command: str, bench: Bench, folder: Path) -> tuple[object, ...]:
    _fill(folder / "data" / "train")
    _fill(folder / "data" / "test", count=4)
    data = ("--data", "data", *SMALL, "--out", out)
    if command == "finetune":
        return (command, bench.model, *data, "--steps", "1")
    return (command, *(bench.trio() if command == "port" else ("--models", bench.model, bench.new)), *data)


def _row(area: str, name: str, make: Any, says: tuple[str, ...], accepted: bool) -> Row:
    return Row(area, name, make, says, 0 if accepted else 1, ("out",) if accepted else ())


ROWS = [
    *(_row("images", name, partial(_folder, change), says, name in ACCEPTED) for name, change, says in FOLDERS),
    *(_row("tables", name, partial(_parquet, write), says, name in _FINE) for name, write, says in TABLES),
    *(_row("labels", name, partial(_parquet, write), says, name in _FINE) for name, write, says in LABELS),
    Row(
        "images", "tests that are trained on", _as_test, ("16 of 16 test images are also training images",), 0, ("out",)
    ),
    *(Row("tables", f"reference, {name}", make, says) for name, make, says in REFERENCES),
    *(
        Row("images", f"{command} into {out}", partial(_below, out, command), ("whose images this run reads",))
        for command in ("port", "finetune", "plane")
        for out in ("data/out", "data/train/cat/out", "data/train/../train/out")
    ),
]
