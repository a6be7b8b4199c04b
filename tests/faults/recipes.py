"""Recipes, lists of models, and numbers of options that cannot be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from faults.bench import DATA, SHORT, Bench, Row

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)

TEXTS: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("empty", "", ("no sections",)),
    ("a text", "hello", ("no sections",)),
    ("a list", "[]", ("no sections",)),
    ("a number", "7", ("no sections",)),
    ("an unknown section", "prot: {steps: 3}", ("prot", "port")),
    ("a section that is a list", "port: [steps]", ("port", "section")),
    ("a section that is a number", "data: 3", ("data", "section")),
    ("a field mistyped", "port: {setps: 3}", ("setps", "steps")),
    ("a field that is a number", "port: {1: 3}", ("port.1",)),
    ("a field that is a list", "port: {[a]: 3}", ("line 1",)),
    ("a field twice", "port: {steps: 3, steps: 4}", ("steps", "twice")),
    ("a section twice", "port: {steps: 3}\nport: {steps: 4}", ("port", "twice")),
    ("name a number", "name: 3", ("name",)),
    ("description a list", "description: [a]", ("description",)),
    ("presets a list", "presets: [a]", ("presets",)),
    ("preset a number", "presets: {a: 3}", ("preset 'a'",)),
    ("preset with an unknown field", "presets: {a: {port: {nosuch: 3}}}", ("preset 'a'", "nosuch")),
    ("steps and epochs", "finetune: {steps: 3, epochs: 2}", ("steps", "epochs")),
    ("rank and energy", "port: {save_as: lora, rank: 3, energy: 0.5}", ("rank", "energy")),
    ("rank without an adapter", "port: {rank: 3}", ("lora",)),
    ("not YAML", "port: {steps: 3", ("line 1",)),
    ("tabs", "port:\n\tsteps: 3", ("line 2",)),
    ("an alias that is not there", "port: *x", ("line 1",)),
    ("not UTF-8", b"name: \xff", ("bad.yaml",)),
    ("zero bytes", b"name: \x00", ("bad.yaml",)),
    ("aliases of eight levels", _BOMB, ("more than 100,000 entries",)),
    ("an alias of itself", "a: &a [*a]\n", ("nested",)),
    ("merge keys", "a: &a {steps: 3}\nport:\n  <<: *a\n", ("a",)),
    ("nested", "a: " + "[" * 20_000, ("nested",)),
    ("100,000 keys", "".join(f"k{n}: 1\n" for n in range(100_001)), ("at most",)),
    ("20,000 keys", "".join(f"k{n}: 1\n" for n in range(20_000)), ("k0",)),
    ("17 MB", "x" * (17 << 20), ("at most",)),
    ("code", "port: !!python/object/apply:os.system ['touch x']\n", ("python/object",)),
    ("a set", "port: !!set {steps}\n", ("port",)),
    ("binary", "port: !!binary aGk=\n", ("port",)),
    ("a number of 4,000 digits", "port: {steps: " + "9" * 4000 + "}\n", ("too long",)),
    ("a number beyond 64 bits", "port: {steps: 9223372036854775808}\n", ("beyond",)),
    ("half a character", 'name: "\\uD800"\n', ("surrogates",)),
    ("infinite", "finetune: {lr: .inf}", ("finetune.lr",)),
    ("not a number", "finetune: {lr: .nan}", ("finetune.lr",)),
    ("a time", "port: !!timestamp x\n", ("cannot be read",)),
    ("classes of numbers", "data: {classes: [1, 2]}", ("data.classes", "quotes")),
    ("a reference that is a list", "data: {reference: [a]}", ("data.reference",)),
]


def _show(text: str | bytes, bench: Bench, folder: Path) -> tuple[object, ...]:
    (folder / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return ("recipes", "show", "bad.yaml")


def _special(make: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    make(folder / "bad.yaml")
    return ("recipes", "show", "bad.yaml")


def _run(*arguments: object) -> Callable[[Bench, Path], tuple[object, ...]]:
    return lambda bench, folder: arguments


def _port(*more: object) -> Callable[[Bench, Path], tuple[object, ...]]:
    return lambda bench, folder: ("port", *bench.trio(), *DATA, *SHORT, *more, "--out", "out")


def _tune(*more: object) -> Callable[[Bench, Path], tuple[object, ...]]:
    return lambda bench, folder: ("finetune", bench.model, *DATA, "-q", "--out", "out", *more)


OTHERS = [
    Row("recipes", "a pipe", partial(_special, os.mkfifo), ("not a regular file",)),
    Row("recipes", "endless", partial(_special, lambda path: path.symlink_to("/dev/zero")), ("not a regular file",)),
    Row("recipes", "a folder", partial(_special, Path.mkdir), ("bad.yaml",)),
    Row("recipes", "a link to itself", partial(_special, lambda path: path.symlink_to(path)), ("bad.yaml",)),
    Row("recipes", "not there", _run("recipes", "show", "nosuch.yaml"), ("nosuch.yaml",)),
    Row("recipes", "an unknown name", _run("recipes", "show", "cbu"), ("cbu", "cub")),
    Row("recipes", "an unknown preset", _run("recipes", "show", "cub@papr"), ("papr", "paper")),
    Row("recipes", "a preset without a recipe", _port("--preset", "paper", "--recipe", ""), ("recipe",)),
    Row("recipes", "a mistyped recipe for data", _run("evaluate", "x/y", "--data", "fashion-mnits"), ("fashion-mnits", "fashion-mnist")),
]  # fmt: skip

# Options of `port`, and what the message says. The code is that of a usage error where click reads the option.
NUMBERS: list[tuple[str, tuple[object, ...], tuple[str, ...], int]] = [
    ("steps zero", ("--steps", 0), ("port.steps", "at least 1"), 2),
    ("steps negative", ("--steps", -1), ("port.steps", "at least 1"), 2),
    ("steps a fraction", ("--steps", 2.5), ("port.steps", "whole number"), 2),
    ("steps a word", ("--steps", "many"), ("port.steps", "whole number"), 2),
    ("steps nothing", ("--steps", ""), ("port.steps", "whole number"), 2),
    ("steps beyond 64 bits", ("--steps", 2**63), ("port.steps", "at most"), 2),
    ("steps of 5,000 digits", ("--steps", "9" * 5000), ("port.steps",), 2),
    ("steps in other digits", ("--steps", "٣"), ("port.steps",), 2),
    ("batch beyond 64 bits", ("--batch-size", 2**63), ("port.batch_size", "at most"), 2),
    ("batches beyond 64 bits", ("--grad-batches", 2**64), ("port.grad_batches", "at most"), 2),
    ("restarts beyond 64 bits", ("--restarts", 2**64), ("port.restarts", "at most"), 2),
    ("BatchNorm batches beyond 64 bits", ("--bn-batches", 2**64), ("port.bn_batches", "at most"), 2),
    ("micro batch zero", ("--micro-batch", 0), ("port.micro_batch", "at least 1"), 2),
    ("fine-tuning beyond 64 bits", ("--finetune-steps", 2**64), ("finetune.steps", "at most"), 2),
    ("epochs beyond reason", ("--finetune-epochs", 1e300), ("finetune.epochs", "at most"), 2),
    ("epochs infinite", ("--finetune-epochs", "inf"), ("finetune.epochs",), 2),
    ("epochs not a number", ("--finetune-epochs", "nan"), ("finetune.epochs",), 2),
    ("rate zero", ("--finetune-lr", 0), ("finetune.lr", "above 0"), 2),
    ("rate negative", ("--finetune-lr", -1), ("finetune.lr", "above 0"), 2),
    ("rate infinite", ("--finetune-lr", "inf"), ("finetune.lr",), 2),
    ("decay beyond reason", ("--finetune-steps", 2, "--finetune-weight-decay", 1e308), ("weight_decay", "at most"), 2),
    ("momentum one", ("--finetune-momentum", 1), ("finetune.momentum", "below 1"), 2),
    ("smoothing one", ("--finetune-label-smoothing", 1), ("finetune.label_smoothing", "below 1"), 2),
    ("seed negative", ("--seed", -1), ("port.seed", "at least 0"), 2),
    ("seed beyond 64 bits", ("--seed", 2**64), ("port.seed", "at most"), 2),
    ("data seed beyond 64 bits", ("--data-seed", 2**64), ("data.seed", "at most"), 2),
    ("fine-tuning seed negative", ("--finetune-seed", -1), ("finetune.seed", "at least 0"), 2),
    ("fine-tuning seed beyond 64 bits", ("--finetune-seed", 2**64), ("finetune.seed", "at most"), 2),
    ("alpha zero", ("--alpha", 0), ("port.alpha", "above 0"), 2),
    ("alpha negative", ("--alpha", -1), ("port.alpha", "above 0"), 2),
    ("alpha not a number", ("--alpha", "nan"), ("port.alpha",), 2),
    ("alpha beyond reason", ("--alpha", 11), ("port.alpha", "at most 10"), 2),
    ("update zero", ("--update", 0), ("port.update", "above 0"), 2),
    ("update above one", ("--update", 1.5), ("port.update", "at most 1"), 2),
    ("update not a number", ("--update", "nan"), ("port.update",), 2),
    ("update and alpha", ("--update", 0.5, "--alpha", 0.5), ("--update",), 1),
    ("energy zero", ("--save-as", "lora", "--energy", 0), ("port.energy", "above 0"), 2),
    ("energy above one", ("--save-as", "lora", "--energy", 1.5), ("port.energy", "at most 1"), 2),
    ("rank zero", ("--save-as", "lora", "--rank", 0), ("port.rank", "at least 1"), 2),
    ("rank beyond every layer", ("--save-as", "lora", "--rank", 99_999), ("rank",), 1),
    ("rank beyond 64 bits", ("--save-as", "lora", "--rank", 2**64), ("port.rank", "at most"), 2),
    ("compression zero", ("--compress", 0), ("port.compress", "above 0"), 2),
    ("compression above one", ("--compress", 2), ("port.compress", "at most 1"), 2),
    ("early stop zero", ("--early-stop", 0), ("port.early_stop", "at least 1"), 2),
    ("samples above 48", ("--samples", 49), ("port.samples", "at most 48"), 2),
    ("method unknown", ("--method", "fgtm"), ("fgtm", "fgmt"), 2),
    ("head unknown", ("--head", "zeros"), ("zeros",), 2),
    ("targets unknown", ("--targets", "label"), ("label",), 2),
    ("an unknown option", ("--step", 3), ("--step", "--steps"), 2),
    ("validation one", ("--data-validation", 1), ("data.validation", "below 1"), 2),
    ("validation negative", ("--data-validation", -0.1), ("data.validation", "at least 0"), 2),
    ("validation of one image", ("--data-limit", 10, "--data-validation", 0.1), ("validation",), 1),
    ("limit one", ("--data-limit", 1), ("data.limit", "at least 2"), 2),
    ("limit beyond 64 bits", ("--data-limit", 2**64), ("data.limit", "at most"), 2),
    ("image size zero", ("--data-image-size", 0), ("data.image_size", "at least"), 2),
    ("image size one", ("--data-image-size", 1), ("data.image_size", "at least"), 2),
    ("image size beyond reason", ("--data-image-size", 10**6), ("data.image_size", "at most"), 2),
    ("image size beyond 64 bits", ("--data-image-size", 2**64), ("data.image_size", "at most"), 2),
    ("a class that is not there", ("--data-classes", "Hat"), ("Hat",), 1),
    ("one class", ("--data-classes", "Bag"), ("class",), 1),
    ("a class twice", ("--data-classes", "Bag", "--data-classes", "Bag"), ("twice",), 1),
    ("a split that is not there", ("--data-test-split", "tset"), ("tset", "test"), 1),
    ("one split for both", ("--data-test-split", "train"), ("train",), 1),
    ("validated on what is tested", ("--data-validation-split", "test", "--data-test-split", "test"), ("test",), 1),
    ("a column that is not there", ("--data-label-column", "lable"), ("lable", "label"), 1),
    ("labels from the image column", ("--data-label-column", "image"), ("image",), 1),
    ("device unknown", ("--device", "gpu"), ("gpu",), 1),
    ("device that is not here", ("--device", "cuda:7"), ("cuda",), 1),
    ("precision unknown", ("--precision", "int4"), ("int4",), 2),
    ("workers negative", ("--num-workers", -1), ("--num-workers",), 2),
    ("workers beyond reason", ("--num-workers", 10**5), ("--num-workers",), 2),
    ("batch of one image", ("--batch-size", 1, "--method", "fgmt"), ("BatchNorm",), 1),
    ("one image at a time", ("--micro-batch", 1, "--method", "fgmt"), ("BatchNorm",), 1),
    ("initial head that is not there", ("--initial-head", "nosuch"), ("nosuch",), 2),
    ("also data that is not there", ("--also-data", "nosuch/dir"), ("nosuch/dir",), 1),
    ("fit without also data", ("--also-data-fit",), ("also_data",), 1),
    ("texts for an image model", ("--text", "nosuch.txt"), ("nosuch.txt",), 2),
]

TUNED: list[tuple[str, tuple[object, ...], tuple[str, ...], int]] = [
    ("neither steps nor epochs", (), ("steps", "epochs"), 1),
    ("steps and epochs", ("--steps", 1, "--epochs", 1), ("steps", "epochs"), 1),
    ("batch of one image", ("--steps", 1, "--batch-size", 1), ("BatchNorm",), 1),
    ("frozen that is not there", ("--steps", 1, "--batch-size", 8, "--freeze", "layer9"), ("layer9",), 1),
    ("record zero", ("--steps", 1, "--record", 0), ("--record",), 2),
    ("diverging", ("--steps", 30, "--batch-size", 8, "--lr", 1e30), ("lower lr",), 1),
    ("epochs that are no step", ("--epochs", 1e-9), ("epochs",), 1),
    ("teacher that is not there", ("--steps", 1, "--teacher", "nosuch/dir"), ("nosuch/dir",), 1),
    ("warm-up longer than the training", ("--steps", 2, "--warmup", 2**64), ("finetune.warmup", "at most"), 2),
]

_NAMES = ["../../escape", "/tmp/escape", "..", ".hidden", "a/b", "", "x" * 300, "a\x00b", 7, None, ["a"]]

MODELS_FILES: list[tuple[str, str, tuple[str, ...]]] = [
    ("empty", "", ("models.yaml",)),
    ("a number", "3", ("models.yaml",)),
    ("an empty list", "[]", ("no models to port",)),
    ("a list of lists", "[[a]]", ("models.yaml",)),
    ("no model", '[{"name": "a"}]', ("model",)),
    ("an unknown entry", '[{"model": "m", "nosuch": 3}]', ("nosuch",)),
    ("a model that is a list", '[{"model": ["m"]}]', ("model",)),
    ("a name twice", '[{"model": "m", "name": "a"}, {"model": "n", "name": "a"}]', ("'a'",)),
    ("data a number", '[{"model": "m", "data": 3}]', ("data",)),
    ("nested", "[" * 20_000, ("nested",)),
    ("aliases", _BOMB, ("more than 100,000 entries",)),
]

_ALL = ("port-all", "--src-base", "x/a", "--new-base", "x/b", *DATA, "--out", "out")


def _list(text: str, bench: Bench, folder: Path) -> tuple[object, ...]:
    (folder / "models.yaml").write_text(text)
    return (*_ALL, "--models-file", "models.yaml")


SHARDS: list[tuple[str, str]] = [
    (text, f"shard {text}") for text in ("2/2", "-1/2", "1", "1/0", "a/b", "1/2/3", "1.5/2", "")
]

GRIDS = (1, 202, 10**9, 10**30)

ROWS = [
    *(Row("numbers", f"plane, grid {n}", _run("plane", "x/a", "x/b", *DATA, "--grid", n), ("--grid",), 2) for n in GRIDS),
    *(Row("recipes", name, partial(_show, text), says) for name, text, says in TEXTS),
    *OTHERS,
    *(Row("numbers", name, _port(*more), says, code) for name, more, says, code in NUMBERS),
    *(Row("numbers", f"finetune, {name}", _tune(*more), says, code) for name, more, says, code in TUNED),
    *(Row("numbers", name, _run(*_ALL, "--models", "x/m", "--shard", text), ("--shard",)) for text, name in SHARDS),
    *(Row("recipes", f"models, {name}", partial(_list, text), says) for name, text, says in MODELS_FILES),
    *(
        Row("recipes", f"models, name {number}", partial(_list, json.dumps([{"model": "m", "name": name}])), ("name",))
        for number, name in enumerate(_NAMES)
    ),
]  # fmt: skip
