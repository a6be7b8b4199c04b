"""Untrusted recipes, permutations, graphs, trajectories, tables, cards and names, in the commands that read them."""

from __future__ import annotations

import json
import os
import shutil
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from machine import DATA, SHORT, Machine
from PIL import Image
from safetensors.torch import save_file

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
PICTURES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(shade: int) -> bytes:
    buffer = BytesIO()
    Image.new("L", (28, 28), shade).save(buffer, "PNG")
    return buffer.getvalue()


def table(path: Path, pictures: list[dict[str, object]]) -> Path:
    """A parquet file with these images, of two alternating classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = pa.array([number % 2 for number in range(len(pictures))])
    pq.write_table(pa.table({"image": pa.array(pictures, type=PICTURES), "label": labels}), path)
    return path


RECIPES = {
    "aliases": (BOMB, "more than 100,000 entries"),
    "itself": ("a: &a [*a]\n", "nested more than 50 levels deep, or contains itself"),
    "deep": ("a: " + "[" * 20_000, "nested"),
    "keys": ("".join(f"k{n}: 1\n" for n in range(100_001)), "at most"),
    "bool": ("port: !!bool x\n", "cannot be read"),
    "surrogate": ('port: "\\uD800"\n', "surrogates not allowed"),
    "time": ("port: !!timestamp x\n", "cannot be read"),
    "code": ("port: !!python/object/apply:os.system ['touch elsewhere/x']\n", "python/object"),
    "integer": ("port: {steps: " + "9" * 4000 + "}\n", "too long"),
    "long": ("x" * (17 << 20), "at most"),
}


def test_recipes_and_lists_of_models(machine: Machine, tmp_path):
    commands: list[tuple[object, ...]] = []
    bases = ("--src-base", "x/a", "--new-base", "x/b")
    for name, (text, _) in RECIPES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        commands += [("recipes", "show", path), ("port-all", *bases, "--models-file", path, *DATA, "--out", "out")]
    done = machine.run(*commands)
    for shown, ported, (_, words) in zip(done[::2], done[1::2], RECIPES.values(), strict=True):
        shown.assert_refused(words)
        ported.assert_refused(words)


def test_irregular_files_are_not_read(machine: Machine, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for done in machine.run(*(("recipes", "show", tmp_path / name) for name in ("pipe.yaml", "zero.yaml"))):
        done.assert_refused("not a regular file")


def test_a_models_file_writes_only_below_its_folder(machine: Machine, model, tmp_path):
    commands = []
    for number, name in enumerate(["../../escape", "/tmp/escape", "..", ".hidden", "a/b"]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(json.dumps([{"model": str(model), "name": name}]))
        bases = ("--src-base", model, "--new-base", model, "--models-file", path)
        commands.append(("port-all", *bases, *DATA, *SHORT, "--out", "out"))
    for done in machine.run(*commands):
        done.assert_refused("cannot be the name of a folder")


def test_permutations_graphs_and_trajectories(machine: Machine, model, tmp_path):
    trio = ("--src-base", model, "--src-ft", model, "--new-base", model)
    permutation = tmp_path / "permutation.safetensors"
    save_file({"x": torch.zeros(2)}, permutation, {"hf-retarget": "[" * 10_000})
    graph = tmp_path / "graph.json"
    graph.write_text('{"format": "hf-retarget/graph/1", "groups": ' + "[" * 10_000 + "}")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "trajectory.json").write_text('{"steps": [0, "../../../etc/passwd"]}')
    odd = tmp_path / "odd.safetensors"
    save_file({"x": torch.zeros(2)}, odd, {"hf-retarget": '{"format": "hf-retarget/permutation/1", "fingerprint": 5}'})
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "trajectory.json").write_text('{"steps": [0, ' + "9" * 5000 + "]}")
    port = ("port", *trio, *DATA, *SHORT, "--out", "out")
    done = machine.run(
        (*port, "--permutation", permutation),
        (*port, "--permutation", odd),
        ("plane", "--models", model, model, *DATA, "--graph", graph, "--permute", "match", "--out", "plane"),
        (*port, "--checkpoints", outside),
        (*port, "--checkpoints", huge),
    )
    expected = ("permutation", "not integers", "graph", "trajectory.json", "trajectory.json")
    for each, words in zip(done, expected, strict=True):
        each.assert_refused(words)


def test_rows_that_name_private_images(machine: Machine, model, tmp_path):
    secret = machine.root / "elsewhere" / "secret.png"
    secret.write_bytes(png(200))
    commands, expected = [], []
    for number, named in enumerate([str(secret), "../elsewhere/secret.png", "secret.png", "/dev/zero"]):
        data = table(tmp_path / str(number) / "train.parquet", [{"bytes": None, "path": named} for _ in range(60)])
        machine.hub.repository(f"ada/rows-{number}", {"train.parquet": data}, kind="dataset")
        for reference in (data.parent, f"ada/rows-{number}"):
            commands.append(("finetune", model, "--data", reference, "--steps", "1", "--out", "out"))
            inside = named == "secret.png" and reference == data.parent
            expected.append("No such file" if inside else "names a file outside the data")
    for done, words in zip(machine.run(*commands), expected, strict=True):
        done.assert_refused("cannot be read", words)


def test_a_saved_dataset_that_refers_to_another(machine: Machine, model, tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": png(n), "path": None} for n in range(60)], "label": [n % 2 for n in range(60)]}
    private, honest = tmp_path / "private", tmp_path / "honest"
    datasets.Dataset.from_dict(rows, features).save_to_disk(private)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features)}).save_to_disk(honest)
    splits = shutil.copytree(honest, tmp_path / "splits")
    (splits / "dataset_dict.json").write_text('{"splits": ["../private"]}')
    files = shutil.copytree(honest, tmp_path / "files")
    state = json.loads((files / "train" / "state.json").read_text())
    state["_data_files"] = [{"filename": str(next(private.glob("*.arrow")))}]
    (files / "train" / "state.json").write_text(json.dumps(state))
    tune = ("--data-image-size", "28", "--steps", "1")
    *refused, fine = machine.run(
        *(("finetune", model, "--data", folder, *tune, "--out", "out") for folder in (splits, files)),
        ("check", *("--src-base", model, "--src-ft", model, "--new-base", model), "--data", honest),
    )
    for done in refused:
        done.assert_refused("which is not its own")
    assert "not its own" not in fine.err


def test_a_readme_that_redirects(machine: Machine, model, tmp_path):
    places = ["http://127.0.0.1:9/x.parquet", "/etc/x.parquet", "../x.parquet", "hf://datasets/evil/x/a.parquet", "~/x"]
    commands, expected = [], []
    for number, files in enumerate(places):
        folder = tmp_path / str(number)
        table(folder / "train.parquet", [{"bytes": png(n), "path": None} for n in range(60)])
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files!r}\n---\n")
        files_of = {path.name: path for path in folder.iterdir()}
        machine.hub.repository(f"ada/readme-{number}", files_of, kind="dataset")
        for reference in (folder, f"ada/readme-{number}"):
            commands.append(("finetune", model, "--data", reference, "--steps", "1", "--out", "out"))
            expected.append(files)
    for done, files in zip(machine.run(*commands), expected, strict=True):
        done.assert_refused("README.md", files)


def test_a_readme_that_is_a_bomb(machine: Machine, model, tmp_path):
    honest = table(tmp_path / "data" / "train.parquet", [{"bytes": png(n), "path": None} for n in range(60)])
    (honest.parent / "README.md").write_text(f"---\n{BOMB}---\n")
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "README.md").write_text(f"---\nlicense: mit\n{BOMB}---\n")
    with_data, with_card = machine.run(
        ("finetune", model, "--data", honest.parent, "--steps", "1", "--out", "out"), ("evaluate", folder, *DATA)
    )
    with_data.assert_refused("more than 100,000 entries")
    assert (with_card.code, with_card.forbidden) == (0, []), "an unreadable card is ignored"


def test_image_formats_that_run_programs_are_not_decoded(machine: Machine, model, tmp_path):
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\n%%EOF\n"
    data = table(tmp_path / "eps" / "train.parquet", [{"bytes": page, "path": None} for _ in range(60)])
    (done,) = machine.run(("finetune", model, "--data", data.parent, "--steps", "1", "--out", "out"))
    done.assert_refused("not an image that can be read")


def test_symbolic_links_are_not_pushed(machine: Machine, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "README.md").symlink_to(machine.root / "home" / "secret.txt")
    figures = shutil.copytree(model, tmp_path / "figures")
    (figures / "figures").symlink_to(machine.root / "home")
    for done in machine.run(("push", folder, "ada/linked"), ("push", figures, "ada/linked")):
        done.assert_refused("is a link")


def test_names_cannot_control_the_terminal(machine: Machine, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = [f"class \x1b[2J\x9b31m\u202e{number}" for number in range(10)]
    (folder / "config.json").write_text(json.dumps({**config, "label_names": names}))
    pictures = [{"bytes": png(n), "path": None} for n in range(60)]
    labels = pa.array([names[n % 10] for n in range(60)])
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"image": pa.array(pictures, PICTURES), "label": labels}), tmp_path / "data/train.parquet")
    data = ("--data", tmp_path / "data", "--data-image-size", "28")
    shown, as_json, failed = machine.run(
        ("evaluate", folder, *data),
        ("evaluate", folder, *data, "--json"),
        ("evaluate", folder, *DATA),
    )
    assert (shown.code, as_json.code, failed.code) == (0, 0, 1), shown.err
    assert json.loads(as_json.out)
    for text in (shown.out, shown.err, as_json.out, failed.err):
        assert not set(text) & set("\x1b\x9b\u202e"), "an untrusted escape sequence on the terminal"
    assert "\\x1b[2J" in shown.out


def test_tokens_appear_in_no_message(machine: Machine, model):
    tokens = ["hf_secretsecret\n", "hf_secretsecret\r\nX-Header: 1", "hf_sécretsecret", "hf_secret secret"]
    done = machine.run(*(("evaluate", "ada/none", *DATA, "--token", token) for token in tokens))
    for each in done:
        assert (each.code, each.forbidden) == (1, [])
        assert "Traceback" not in each.err
        assert not any(part in each.out + each.err for part in ("secretsecret", "sécret", "hf_s"))
