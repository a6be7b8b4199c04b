"""Finished ports of strangers, permutations, graphs, trajectories and unfinished work that are not what they say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults.bench import DATA, SHORT, Bench, Row, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Change = Callable[[Any], Any]
_DEEP = "[" * 100_000


def _given(bench: Bench, folder: Path) -> Path:
    return Path(shutil.copytree(bench.ported, folder / "port"))


# ---- port.json, in `compare` and `check`


def _set(*path: Any, to: Any) -> Change:
    """Change one entry of a document, however deep."""

    def change(document: Any) -> None:
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = to

    return change


def _gone(name: str) -> Change:
    return lambda document: document.pop(name) and None


_C = "contenders"
DOCUMENTS: list[tuple[str, Change | str, tuple[str, ...]]] = [
    ("empty", "", ("port.json",)),
    ("no JSON", "hello", ("port.json",)),
    ("cut", '{"format": "hf-retarget/port/2", "version', ("port.json",)),
    ("a list", "[]", ("port.json",)),
    ("nothing", "null", ("port.json",)),
    ("nested", _DEEP, ("port.json", "nested")),
    ("not a number", '{"format": NaN}', ("port.json", "NaN")),
    ("a key twice", '{"format": "hf-retarget/port/2", "format": "hf-retarget/port/2"}', ("port.json", "twice")),
    ("no format", _gone("format"), ("port.json", "format")),
    ("a format of tomorrow", _set("format", to="hf-retarget/port/3"), ("hf-retarget/port/3",)),
    ("a format that is a list", _set("format", to=[]), ("format",)),
    ("no contenders", _set(_C, to=[]), ("port.json", "winner")),
    ("contenders an object", _set(_C, to={}), ("port.json", _C)),
    ("a contender that is a number", _set(_C, 0, to=3), ("port.json", _C)),
    ("a contender nobody knows", _set(_C, 0, "name", to="nosuch"), ("not among its contenders",)),
    ("a contender twice", lambda document: document[_C].append(document[_C][0]), ("same name",)),
    ("a role nobody knows", _set(_C, 0, "role", to="king"), ("king",)),
    ("a winner that did not enter", _set("winner", to="gmt"), ("gmt",)),
    ("an accuracy above one", _set(_C, 0, "test", "top1", to=9.9), ("9.9",)),
    ("an accuracy below nothing", _set(_C, 0, "validation", to=-0.5), ("-0.5",)),
    ("an accuracy that is a text", _set(_C, 0, "test", "top1", to="high"), ("top1",)),
    ("an accuracy of a class above one", _set(_C, 0, "test", "per_class", to=[2.0]), ("2.0",)),
    ("a best step beyond the steps", _set(_C, 0, "best_step", to=99), ("best step",)),
    ("images negative", _set(_C, 0, "test", "images", to=-3), ("images",)),
    ("images a fraction", _set(_C, 0, "test", "images", to=1.5), ("images",)),
    ("gradients negative", _set(_C, 0, "gradients", to=-5), ("gradients",)),
    ("steps negative", _set("steps_planned", to=-1), ("steps_planned",)),
    ("models a list", _set("models", to=[]), ("models",)),
    ("a model that is missing", _set("models", to={}), ("three models",)),
    ("classes negative", _set("data", "classes", to=-1), ("classes",)),
    ("classes a text", _set("data", "classes", to="ten"), ("classes",)),
    ("labels fewer than classes", _set("data", "labels", to=["a"]), ("labels",)),
    ("seconds negative", _set("seconds", to={"a": -1.0}), ("seconds",)),
    ("seconds beyond a float", _set("seconds", to={"a": 1e308, "b": 1e308}), ("seconds",)),
    ("a recipe that is a list", _set("recipe", to=[]), ("recipe",)),
    ("a verdict that is a number", _set("verdict", to=3), ("verdict",)),
    ("an unknown entry", _set("nosuch", to=3), ()),
    ("notes a text", _set("notes", to="x"), ("notes",)),
]  # fmt: skip

# `check` sees that its own files are not those that port.json pins; it does not care about the figures.
_HARMLESS = {"an unknown entry"}


def _document(change: Change | str, command: str, bench: Bench, folder: Path) -> tuple[object, ...]:
    path = _given(bench, folder) / "port.json"
    if isinstance(change, str):
        path.write_text(change)
    else:
        rewrite(path, change)
    return (command, "port")


def _file(name: str, change: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    change(_given(bench, folder) / name)
    return ("check", "port", *bench.trio())


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


OWN_FILES: list[tuple[str, str, Callable[[Path], object], tuple[str, ...]]] = [
    ("a byte of the weights", "model.safetensors", _flip, ("model.safetensors",)),
    ("weights cut", "model.safetensors", lambda path: os.truncate(path, 1000), ("model.safetensors",)),
    ("weights gone", "model.safetensors", Path.unlink, ("model.safetensors", "missing")),
    ("a byte of the permutation", "permutation.safetensors", _flip, ("permutation.safetensors",)),
    ("a byte of the graph", "graph.json", _flip, ("graph.json",)),
    ("a byte of the recipe", "recipe.yaml", _flip, ("recipe.yaml",)),
    ("a byte of the configuration", "config.json", _flip, ("config.json",)),
    ("port.json gone", "port.json", Path.unlink, ("port.json",)),
]


def _other_side(bench: Bench, folder: Path) -> tuple[object, ...]:
    _given(bench, folder)
    return ("check", "port", *bench.trio(tuned=bench.new))


# ---- permutations and graphs


def _facts(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["hf-retarget"])["facts"])


def _permutation(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[Path], object]:
    """Change tensors and facts; without a checksum, as any other program might have written it."""

    def make(path: Path) -> None:
        tensors, facts = load_file(path), _facts(path)
        found = change(tensors, facts)
        save_file(tensors, path, {"hf-retarget": json.dumps(facts if not isinstance(found, list) else found[0])})

    return make


def _first(value: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    def change(tensors: dict[str, Any], facts: dict[str, Any]) -> None:
        name = next(iter(tensors))
        tensors[name] = value(tensors[name])

    return change


def _twice(index: torch.Tensor) -> torch.Tensor:
    changed = index.clone()
    changed[..., 1] = changed[..., 0]
    return changed


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


PERMUTATIONS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("empty", lambda path: path.write_bytes(b""), ("permutation",)),
    ("a pipe", _pipe, ("not a regular file",)),
    ("a hole of 4 TB", _hole, ("Error: ",)),
    ("a byte flipped", _flip, ("checksum",)),
    ("facts a list", _permutation(lambda tensors, facts: [[]]), ("permutation", "object")),
    ("facts nested", lambda path: save_file(load_file(path), path, {"hf-retarget": _DEEP}), ("permutation",)),
    ("facts no JSON", lambda path: save_file(load_file(path), path, {"hf-retarget": "x"}), ("permutation",)),
    ("no facts", lambda path: save_file(load_file(path), path), ("not a permutation",)),
    ("another format", _permutation(lambda _, facts: facts.update(format="x")), ("'x'",)),
    ("no fingerprint", _permutation(lambda _, facts: facts.pop("fingerprint") and None), ("permutation",)),
    ("a fingerprint that is a number", _permutation(lambda _, facts: facts.update(fingerprint=5)), ("permutation",)),
    ("of another graph", _permutation(lambda _, facts: facts.update(fingerprint="0" * 64)), ("graph",)),
    ("floats", _permutation(_first(lambda index: index.float())), ("integers",)),
    ("bytes", _permutation(_first(lambda index: index.to(torch.uint8))), ("integers",)),
    ("switches", _permutation(_first(lambda index: index > 0)), ("integers",)),
    ("an index twice", _permutation(_first(_twice)), ("is not a permutation",)),
    ("an index beyond", _permutation(_first(lambda index: index + 1)), ("is not a permutation",)),
    ("an index negative", _permutation(_first(lambda index: index - 1)), ("is not a permutation",)),
    ("one index less", _permutation(_first(lambda index: index[..., :-1].clone())), ("shape",)),
    ("no indices at all", _permutation(_first(lambda index: index[..., :0].clone())), ("shape",)),
    ("a group is missing", _permutation(lambda tensors, _: tensors.pop(next(iter(tensors))) is None or None), ("missing",)),
    ("a group that is unknown", _permutation(lambda tensors, _: tensors.update(nosuch=torch.zeros(1, dtype=torch.int64))), ("nosuch",)),
]  # fmt: skip


def _permuted(change: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    port = _given(bench, folder)
    change(port / "permutation.safetensors")
    (port / "graph.json").unlink()
    return ("port", *bench.trio(), *DATA, *SHORT, "--permutation", "port", "--out", "out")


GRAPHS: list[tuple[str, Change | str, tuple[str, ...]]] = [
    ("empty", "", ("graph.json",)),
    ("nested", _DEEP, ("graph.json",)),
    ("a list", "[]", ("graph.json",)),
    ("layouts a list", _set("layouts", to=[]), ("layouts",)),
    ("tied a text", _set("tied", to="x"), ("tied",)),
    ("groups an object", _set("groups", to={}), ("groups",)),
    ("a group that is a number", _set("groups", 0, to=3), ("groups",)),
    ("a size that is negative", _set("groups", 0, "size", to=-1), ("size",)),
    ("a size that is a text", _set("groups", 0, "size", to="8"), ("size",)),
    ("a size beyond memory", _set("groups", 0, "size", to=10**12), ("impossible sizes",)),
    ("a size beyond 64 bits", _set("groups", 0, "size", to=2**63), ("graph.json",)),
    ("no layouts", _gone("layouts"), ("layouts",)),
    ("no groups", _gone("groups"), ("groups",)),
    ("parameters a number", _set("parameters", to=3), ("parameters",)),
    ("another format", _set("format", to="x"), ("format",)),
    ("axes of another tensor", _set("groups", 0, "axes", 0, 0, to="nosuch"), ("no layout of 'nosuch'",)),
    ("parameters of another model", _set("parameters", to=["nosuch"]), ("no layout of 'nosuch'",)),
    (
        "two tensors exchanged",
        lambda graph: graph["layouts"].update({name: graph["layouts"][other] for name, other in _EXCHANGED}),
        ("cannot be used",),
    ),
    ("a group that is free where it is tied", lambda graph: _untie(graph), ("does not preserve the function",)),
    ("of another model", lambda graph: graph["layouts"].update(nosuch=graph["layouts"]["fc.bias"]), ("another model",)),
]


_EXCHANGED = (("fc.weight", "conv1.0.weight"), ("conv1.0.weight", "fc.weight"))


def _untie(graph: Any) -> None:
    """Pin the axes of one tensor: sizes fit, but what is before it and after it no longer moves together."""
    name = max(
        graph["layouts"],
        key=lambda each: sum(factor[3] is not None for _, factors in graph["layouts"][each][1] for factor in factors),
    )
    for _, factors in graph["layouts"][name][1]:
        for factor in factors:
            factor[3:] = [None, []]


def _graph(change: Change | str, bench: Bench, folder: Path) -> tuple[object, ...]:
    path = _given(bench, folder) / "graph.json"
    if isinstance(change, str):
        path.write_text(change)
    else:
        rewrite(path, change)
    data = (*DATA, "--grid", "2")
    return ("plane", bench.model, bench.tuned, *data, "--graph", path, "--permute", "match", "--out", "out", "-q")


# ---- trajectories


def _trajectory(change: Callable[[Path, Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    place = folder / "trajectory"
    place.mkdir()
    for step, model in enumerate((bench.model, bench.new, bench.tuned)):
        shutil.copy(model / "model.safetensors", place / f"step-{step:06d}.safetensors")
    (place / "trajectory.json").write_text(json.dumps({"every": 1, "steps": [0, 1, 2]}))
    change(place, place / "trajectory.json")
    return ("port", *bench.trio(), *DATA, *SHORT, "--method", "naive", "--checkpoints", "trajectory", "--out", "out")


_ONE = "step-000001.safetensors"


def _in_step(change: Callable[[dict[str, Any]], object], name: str = _ONE) -> Callable[[Path, Path], object]:
    def make(place: Path, _: Path) -> None:
        tensors = load_file(place / name)
        change(tensors)
        save_file(tensors, place / name)

    return make


TRAJECTORIES: list[tuple[str, Callable[[Path, Path], object], tuple[str, ...]]] = [
    ("no index", lambda _, index: index.unlink(), ("trajectory.json",)),
    ("index empty", lambda _, index: index.write_text(""), ("trajectory.json",)),
    ("index a list", lambda _, index: index.write_text("[]"), ("trajectory.json",)),
    ("index nested", lambda _, index: index.write_text(_DEEP), ("trajectory.json",)),
    ("no steps", lambda _, index: index.write_text("{}"), ("trajectory.json",)),
    ("steps empty", lambda _, index: index.write_text('{"steps": []}'), ("at least one step",)),
    ("only the start", lambda _, index: index.write_text('{"steps": [0]}'), ("at least one step",)),
    ("steps a number", lambda _, index: index.write_text('{"steps": 3}'), ("trajectory.json",)),
    ("steps of texts", lambda _, index: index.write_text('{"steps": [0, "../../x"]}'), ("trajectory.json",)),
    ("steps of fractions", lambda _, index: index.write_text('{"steps": [0, 1.5, 2]}'), ("trajectory.json", "1.5")),
    ("steps negative", lambda _, index: index.write_text('{"steps": [-1, 1, 2]}'), ("trajectory.json", "-1")),
    ("a step twice", lambda _, index: index.write_text('{"steps": [0, 1, 1, 2]}'), ("trajectory.json", "different")),
    ("a step that is not there", lambda _, index: index.write_text('{"steps": [0, 1, 2, 3]}'), ("step-000003",)),
    ("a step of 5,000 digits", lambda _, index: index.write_text('{"steps": [0, ' + "9" * 5000 + "]}"), ("trajectory.json",)),
    ("a step cut", lambda place, _: os.truncate(place / _ONE, 500), (_ONE,)),
    ("a step that is a pipe", lambda place, _: _pipe(place / _ONE), ("not a regular file",)),
    ("a step without a tensor", _in_step(lambda tensors: tensors.pop("conv1.0.weight")), ("conv1.0.weight",)),
    ("a step of another shape", _in_step(lambda tensors: tensors.update({"fc.bias": torch.zeros(3)})), ("fc.bias",)),
    ("a step not finite", _in_step(lambda tensors: tensors["fc.bias"].fill_(float("nan"))), ("fc.bias", "finite")),
    ("a step of whole numbers", _in_step(lambda tensors: tensors.update({"fc.bias": torch.zeros(10, dtype=torch.int32)})), ("fc.bias",)),
    ("an end that is not the tuned model", lambda place, _: shutil.copy(place / _ONE, place / "step-000002.safetensors"), ("tuned model",)),
]  # fmt: skip


# ---- unfinished work


def _unfinished(change: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    """A fine-tuning of six steps that was killed after four."""
    kept = bench.root / "honest" / ".out.work"
    tune = ("finetune", bench.model, *DATA, "--steps", "6", "--batch-size", "8", "--checkpoint-every", "2")
    if not kept.exists():
        place = kept.with_name("killed")
        place.mkdir()
        done = bench.run((*tune, "--out", "out"), place, dies=("state.safetensors", 2))
        assert done["code"] == -9, done
        shutil.move(place / ".out.work", kept)
        shutil.rmtree(place)
    shutil.copytree(kept, folder / ".out.work")
    change(folder / ".out.work")
    return (*tune, "--out", "out", "--resume")


def _resealed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the state, with a checksum that fits."""

    def make(work: Path) -> None:
        from hf_retarget.files import load_tensors, save_tensors

        tensors, facts = load_tensors(work / "state.safetensors")
        change(tensors, facts)
        save_tensors(work / "state.safetensors", tensors, facts)

    return make


UNFINISHED: list[tuple[str, Callable[[Path], object], tuple[str, ...], int]] = [
    ("as it was", lambda _: None, ("continuing the fine-tuning at step 4",), 0),
    ("run.json a list", lambda work: (work / "run.json").write_text("[]"), ("damaged",), 0),
    ("run.json nested", lambda work: (work / "run.json").write_text(_DEEP), ("damaged",), 0),
    ("run.json empty", lambda work: (work / "run.json").write_text(""), ("damaged",), 0),
    ("run.json flipped", lambda work: _flip(work / "run.json"), ("damaged",), 0),
    ("run.json gone", lambda work: (work / "run.json").unlink(), ("saved",), 0),
    ("state empty", lambda work: (work / "state.safetensors").write_bytes(b""), ("damaged",), 0),
    ("state flipped", lambda work: _flip(work / "state.safetensors"), ("damaged",), 0),
    ("state cut", lambda work: os.truncate(work / "state.safetensors", 5000), ("damaged",), 0),
    ("state of a stranger", lambda work: save_file({"w": torch.zeros(2)}, work / "state.safetensors"), ("another fine-tuning",), 1),
    ("a file in the result", lambda work: ((work / "result").mkdir(exist_ok=True), (work / "result" / "evil.py").write_text("x")), ("saved",), 0),
    ("a tensor is missing", _resealed(lambda tensors, _: tensors.pop(next(iter(tensors)))), ("cannot continue",), 1),
    ("facts that are a text", _resealed(lambda _, facts: facts.update(facts="x")), ("cannot continue",), 1),
    ("scores that are texts", _resealed(lambda _, facts: facts["facts"].update(scores=["xy"])), ("cannot continue",), 1),
    ("of another fine-tuning", _resealed(lambda _, facts: facts["key"].update(lr=9.0)), ("another fine-tuning", "lr"), 1),
    ("a temporary file", lambda work: (work / ".state.safetensors.abcdefgh.tmp").write_text("x"), ("saved",), 0),
]  # fmt: skip


# ---- the same of a port


def _unfinished_port(change: Callable[[Path], object], bench: Bench, folder: Path) -> tuple[object, ...]:
    """A port of three steps that was killed after two."""
    kept = bench.root / "honest" / "port" / ".out.work"
    short = ("--method", "fgmt", "--steps", "3", *SHORT[2:])
    port = ("port", *bench.trio(), *DATA, *(each for each in short if each != "-q"), "--out", "out")
    if not kept.exists():
        kept.parent.mkdir()
        done = bench.run(port, kept.parent, dies=(".progress.json", 2))
        assert done["code"] == -9, done
    shutil.copytree(kept, folder / ".out.work")
    change(folder / ".out.work")
    return (*port, "--resume")


def _record(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Change the record of the steps, with a checksum that fits."""

    def make(work: Path) -> None:
        from hf_retarget.files import load_record, save_record

        path = next(work.glob("*.progress.json"))
        facts = load_record(path)
        change(facts)
        save_record(path, facts)

    return make


def _kept(pattern: str, change: Callable[[dict[str, Any], Any], object]) -> Callable[[Path], object]:
    """Change the tensors and facts of a file, with a checksum that fits."""

    def make(work: Path) -> None:
        from hf_retarget.files import load_tensors, save_tensors

        path = next(work.glob(pattern))
        tensors, facts = load_tensors(path)
        change(tensors, facts)
        save_tensors(path, tensors, facts)

    return make


def _steps(facts: Any) -> Any:
    return next(iter(facts["tracks"].values()))["steps"]


def _track(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return _record(lambda facts: change(next(iter(facts["tracks"].values()))))


def _every(prefix: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], Any], object]:
    return lambda tensors, _: tensors.update({k: change(v) for k, v in tensors.items() if k.startswith(prefix)})


_BEST, _STATE = "*.best-*.safetensors", "*.state-*.safetensors"
UNFINISHED_PORT: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("as it was", lambda _: None, ("continuing the port after step 2 of 3",)),
    ("no history", _record(lambda facts: _steps(facts).clear()), ("recomputed",)),
    ("a shorter history", _record(lambda facts: _steps(facts).pop()), ("recomputed",)),
    ("a longer history", _record(lambda facts: _steps(facts).append(_steps(facts)[-1])), ("recomputed",)),
    ("a step beyond the last", _record(lambda facts: facts.update(step=99)), ("recomputed",)),
    ("a step that is a text", _record(lambda facts: facts.update(step="2")), ("continuing the port after step 2 of 3",)),
    ("an accuracy above one", _record(lambda facts: _steps(facts)[0].update(top1=9.9)), ("recomputed",)),
    ("an accuracy that is a text", _record(lambda facts: _steps(facts)[0].update(top1="x")), ("recomputed",)),
    ("seconds that are a list", _record(lambda facts: _steps(facts)[0].update(seconds=[])), ("recomputed",)),
    ("an unknown figure", _record(lambda facts: _steps(facts)[0].update(nosuch=1)), ("continuing the port after step 2 of 3",)),
    ("a best step that is not there", _track(lambda track: track.update(best=7)), ("recomputed",)),
    ("tracks a list", _record(lambda facts: facts.update(tracks=[])), ("recomputed",)),
    ("no tracks", _record(lambda facts: facts.update(tracks={})), ("recomputed",)),
    ("a track of another contender", _record(lambda facts: facts.update(tracks={"nosuch": {"best": 2, "steps": []}})), ("recomputed",)),
    ("the state not finite", _kept(_STATE, _every("", lambda each: each * float("nan") if each.is_floating_point() else each)), ("recomputed",)),
    ("the state without a tensor", _kept(_STATE, lambda tensors, _: tensors.pop(next(iter(tensors)))), ("recomputed",)),
    ("the state without facts", _kept(_STATE, lambda _, facts: facts.clear()), ("recomputed",)),
    ("the best weights not finite", _kept(_BEST, _every("weights/", lambda each: each * float("nan") if each.is_floating_point() else each)), ("recomputed",)),
    ("the best weights of other shapes", _kept(_BEST, _every("weights/", lambda each: each[:1].clone() if each.dim() else each)), ("recomputed",)),
    ("a best permutation that is none", _kept(_BEST, _every("permutation/", torch.zeros_like)), ("recomputed",)),
    ("a best permutation of floats", _kept(_BEST, _every("permutation/", lambda each: each.float())), ("recomputed",)),
    ("the best weights without a tensor", _kept(_BEST, lambda tensors, facts: facts.update(order=facts["order"][1:])), ("recomputed",)),
    ("the best weights without an order", _kept(_BEST, lambda _, facts: facts.pop("order")), ("recomputed",)),
    ("BatchNorm a text", _kept(_BEST, lambda _, facts: facts.update(batchnorm="x")), ("recomputed",)),
]  # fmt: skip


ROWS = [
    *(
        Row("port.json", f"{name} ({command})", partial(_document, change, command), says, 0 if name in _HARMLESS else 1)
        for name, change, says in DOCUMENTS
        for command in ("compare", "check")
    ),
    *(Row("port.json", f"check, {name}", partial(_file, file, change), says, finding=name != "port.json gone") for name, file, change, says in OWN_FILES),
    Row("port.json", "check, another tuned model", _other_side, ("tuned model",), finding=True),
    Row("port.json", "compare nothing", lambda bench, folder: ("compare", "nosuch"), ("nosuch",)),
    Row("port.json", "compare an empty folder", lambda bench, folder: ("compare", "."), ("port",)),
    *(Row("permutations", name, partial(_permuted, change), says) for name, change, says in PERMUTATIONS),
    *(Row("graphs", name, partial(_graph, change), says) for name, change, says in GRAPHS),
    Row("graphs", "as it was", partial(_graph, lambda _: None), code=0, leaves=("out",)),
    *(Row("trajectories", name, partial(_trajectory, change), says) for name, change, says in TRAJECTORIES),
    *(
        Row("resume folders", name, partial(_unfinished, change), says, code, ("out",) if code == 0 else (), (".out.work",))
        for name, change, says, code in UNFINISHED
    ),
    *(
        Row("resume folders", f"port, {name}", partial(_unfinished_port, change), says, 0, ("out",), (".out.work",))
        for name, change, says in UNFINISHED_PORT
    ),
]  # fmt: skip
