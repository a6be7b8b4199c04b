"""`hf-retarget check`: what stands against a port and what it costs, without a byte of weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from loopback_hub import Hub
from safetensors.torch import load_file, save_file

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.models.relation import SAMPLE_BYTES

CLI = (sys.executable, "-c", "from hf_retarget.cli import main; main()", "check")
SMALL = ("--data", "fashion-mnist", "--data-image-size", "28", "--data-limit", "60", "--data-validation", "0.2")
LABELS = ("Trouser", "Bag")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def make(folder: Path, seed: int, classes: int, name: str = "test_resnet", **options: object) -> Path:
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, in_chans=1)
    return save_model(folder, model.state_dict(), load_checkpoint(model), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make(folder / "old", 0, 5)
    make(folder / "new", 1, 7)
    make(folder / "other", 1, 7, "test_efficientnet")
    old = load_checkpoint(folder / "old")
    tuned = old.build(2, seed=3)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_model(folder / "tuned", tuned.state_dict(), old, num_classes=2, labels=LABELS)
    return folder


def trio(folder: Path | str, old: str = "old", tuned: str = "tuned", new: str = "new") -> tuple[str, ...]:
    sides = zip(("--src-base", "--src-ft", "--new-base"), (old, tuned, new), strict=True)
    return tuple(each for flag, name in sides for each in (flag, f"{folder}/{name}"))


def test_a_port_that_is_possible(models):
    result = run(*trio(models), "--steps", "3", "--batch-size", "16")
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if not line.startswith(("old ", "new ")))
    assert rows["head"].startswith("fc.weight, fc.bias; zero (the heads differ in size")
    assert rows["download"].startswith("nothing")
    assert rows["graph"].startswith("11 groups of neurons to match, 100.0%")
    assert rows["gradients"].startswith("30 minibatches of 16, and ")
    assert "from a sample of their weights" in result.stdout
    assert "plus the search for permutations (from a few random images); a lower bound, since no data" in rows["time"]
    assert rows["labels"] == "2 names"
    assert rows["result"].startswith("compatible: nothing ")


def test_what_it_says_is_what_a_dry_run_says(models):
    short = (*SMALL, "--data-classes", "Trouser", "--data-classes", "Bag", "--steps", "3", "--batch-size", "16")
    found = json.loads(run(*trio(models), *short, "--json", "-q").stdout)
    plan = CliRunner().invoke(main, ["port", *trio(models), *short, "--dry-run", "--json", "-q"])
    planned = json.loads(plan.stdout)
    assert found["cost"]["gradients"] == planned["gradients"]
    assert found["data"]["divided"] == planned["images"]
    assert (found["graph"]["groups"], found["head"]["policy"]) == (planned["groups"], planned["head"])
    assert found["data"]["labels"] == list(LABELS)
    assert found["compatible"] is True


@pytest.mark.parametrize(
    ("name", "seed", "advice"),
    [("test_resnet", 0, "port"), ("test_resnet", 1, "retrain"), ("test_vit", 1, "fit a head")],
)
def test_what_probably_pays(name, seed, advice, tmp_path):
    for side, (draw, more) in {"old": (0, 0.0), "tuned": (0, 0.1), "new": (seed, 0.02)}.items():
        weights = load_file(make(tmp_path / side, draw, 2, name) / "model.safetensors")
        moved = {key: each + more * each.abs() if each.ndim > 1 else each for key, each in weights.items()}
        save_file(moved, tmp_path / side / "model.safetensors")
    assert json.loads(run(*trio(tmp_path), "--json", "-q").stdout)["advice"] == advice
    assert "a port measures it" in run(*trio(tmp_path)).stdout


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_memory_is_that_of_a_dry_run(name, tmp_path):
    for seed, side in enumerate(("old", "tuned", "new")):
        make(tmp_path / side, seed, 10, name)
    chosen = ("--data", "fashion-mnist", "--data-limit", "200", "--batch-size", "128", "--data-image-size", "160")
    command, options = CLI[:-1], (*trio(tmp_path), *chosen, "--json", "-q")  # processes, as memory is that of a process
    found, planned = (
        json.loads(subprocess.run([*command, *which, *options], capture_output=True, text=True, check=True).stdout)
        for which in (("check",), ("port", "--dry-run"))
    )
    assert 1 / 1.5 < found["cost"]["memory"] / planned["memory"] < 1.5
    assert found["cost"]["seconds"] > 0
    smaller = json.loads(run(*trio(tmp_path), *chosen[:4], "--batch-size", "8", *chosen[6:], "--json", "-q").stdout)
    larger = json.loads(run(*options).stdout)
    assert larger["cost"]["memory"] > smaller["cost"]["memory"] + 120 * 4 * 160**2, "what goes through the model counts"


def test_images_of_chosen_classes_are_counted(models, tmp_path):
    from PIL import Image

    for split, counts in (("train", (20, 8, 40)), ("test", (4, 3, 10))):
        for label, count in zip((*LABELS, "Coat"), counts, strict=True):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (28, 28), number).save(tmp_path / split / label / f"{number}.png")
    chosen = ("--data", tmp_path, "--data-classes", "Trouser", "--data-classes", "Bag", "--data-image-size", "28")
    data = json.loads(run(*trio(models), *chosen, "--json", "-q").stdout)["data"]
    assert data["images"] == {"test": 7, "train": 28}
    assert data["divided"] == {"train": 25, "validation": 3, "test": 7}


def test_other_architectures_exit_with_1_and_name_the_first_differences(models):
    result = run(*trio(models, new="other"))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert sum(line.startswith("differs") for line in lines) == 6
    assert lines[-1].split(maxsplit=1) == ["result", "not compatible"]
    assert "one is 'test_resnet', the other 'test_efficientnet'" in lines[-2]
    assert "(first: conv_stem.weight [24, 1, 3, 3])" in lines[-2]
    document = json.loads(run(*trio(models, new="other"), "--json").stdout)
    assert (document["format"], document["compatible"]) == ("hf-retarget/check/1", False)
    stem = next(each for each in document["differences"] if each["name"] == "conv_stem.weight")
    assert (stem["source"], stem["target"], stem["head"]) == (None, [24, 1, 3, 3], False)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("Bag", "Coat"), "only the data has 'Coat'; only the model has 'Trouser'"),
        (("Bagg", "Coat"), "no class 'Bagg'"),
    ],
)
def test_data_with_other_labels(models, classes, message):
    chosen = [each for name in classes for each in ("--data-classes", name)]
    result = run(*trio(models), *SMALL, *chosen)
    assert result.exit_code == 1
    problem = next(line for line in result.stdout.splitlines() if line.startswith("problem"))
    assert message in problem


def test_the_head_that_only_the_weights_tell(models):
    found = rt.check(models / "old", models / "old", models / "old")
    assert (found.head.policy, found.differences) == (None, ())
    assert "'own' if the tuned head is close to the old base's" in found.head.why


def test_bad_local_input_is_one_line(models, tmp_path):
    shutil.copytree(models / "new", tmp_path / "cut")
    with open(tmp_path / "cut" / "model.safetensors", "r+b") as file:
        file.truncate(20_000)
    shutil.copytree(models / "new", tmp_path / "pickle")
    torch.save(load_file(models / "new" / "model.safetensors"), tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    for folder, message in (
        ("cut", "is not a whole safetensors file"),
        ("pickle", "only as a pickle"),
        ("no", "no file"),
    ):
        result = run(*trio(models), "--new-base", tmp_path / folder)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert message in result.stderr
    assert run(*trio(models), "--new-base", tmp_path / "pickle", "--allow-pickle").exit_code == 0


# ---- on the Hub


def publish(hub: Hub, models: Path) -> None:
    for name in ("old", "tuned", "new", "other"):
        hub.repository(f"ada/{name}", {path.name: path for path in (models / name).iterdir()})
    weights = load_file(models / "new" / "model.safetensors")
    names = list(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    files: dict[str, bytes | Path] = {"config.json": models / "new" / "config.json"}
    for part, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, models / part)
        files[part] = models / part
    index = {"weight_map": {name: part for part, chosen in parts.items() for name in chosen}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.repository("ada/sharded", files)


def test_no_weights_are_downloaded(hub: Hub, models):
    publish(hub, models)
    size = (models / "new" / "model.safetensors").stat().st_size
    done = hub.client().run(*CLI, *trio("ada", new="sharded"), "--json", "-q")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["compatible"] is True
    assert document["sides"]["target"]["revision"] == hub.repository("ada/sharded").resolve("main").oid
    assert document["download"] == sum(side["download"] for side in document["sides"].values())
    assert document["sides"]["tuned"]["download"] == (models / "tuned" / "model.safetensors").stat().st_size
    assert abs(document["sides"]["target"]["download"] - size) < 20_000, "two headers instead of one"
    asked = [record for record in hub.log if record.method == "GET" and "config.json" not in record.path]
    of_weights = [record for record in asked if "safetensors" in record.path and "index" not in record.path]
    of_weights += [record for record in asked if record.route == "download"]
    assert len(of_weights) >= 4
    assert all(record.range for record in of_weights), of_weights
    heads = [record for record in of_weights if record.range == "bytes=0-100000"]
    assert len(heads) >= 4
    assert sum(record.sent for record in heads) < 4 * 101_000 < size
    assert sum(record.sent for record in of_weights) < 4 * 101_000 + 3 * SAMPLE_BYTES
    assert document["relation"]["word"] == "independent"
    kept = [path for path in (hub.root / "home").rglob("*") if path.is_file() and path.stat().st_size > 50_000]
    assert not kept, "nothing large is in the cache"


def test_what_the_hub_refuses(hub: Hub, models):
    publish(hub, models)
    config = models / "new" / "config.json"
    hub.repository("ada/pickle", {"config.json": config, "pytorch_model.bin": b"pickle" * 100})
    hub.repository(
        "ada/gated", {"config.json": config, "model.safetensors": models / "new" / "model.safetensors"}, gated=True
    )
    hub.repository("ada/private", {"config.json": config}, private=True)
    whole = (models / "new" / "model.safetensors").read_bytes()
    hub.repository("ada/damaged", {"config.json": config, "model.safetensors": b"\x10" + b"\0" * 7 + b"{" * 200})
    hub.repository("ada/cut", {"config.json": config, "model.safetensors": whole[:50_000]})
    code = """
    import hf_retarget as rt
    def check(new, **options):
        return rt.check("ada/old", "ada/tuned", new, **options)
    names = ["ada/none", "ada/private", "ada/gated", "ada/pickle", "ada/damaged", "ada/cut", "ada/new@v9"]
    found = [failure(check, name) for name in names]
    found.append(failure(check, "ada/pickle", allow_pickle=True))
    opened = check("ada/gated", token="hf_ada_write")
    answer([found, opened.compatible])
    """
    found, opened = hub.client().ask(code)
    expected = [
        "there is no model 'ada/none' on the Hub, or it is private",
        "there is no model 'ada/private' on the Hub, or it is private",
        "'ada/gated' is gated",
        "'ada/pickle' has its weights only as a pickle",
        "'model.safetensors' of 'ada/damaged' has a damaged header",
        "'model.safetensors' of 'ada/cut' is cut off: it has 50,000 bytes",
        "'ada/new' has no revision 'v9'",
        "has only a pickle, which must be downloaded to be checked",
    ]
    for message, words in zip(found, expected, strict=True):
        assert message.startswith("ModelError: "), message
        assert words in message
    assert opened is True


def test_what_is_in_the_cache_needs_no_hub(hub: Hub, models):
    publish(hub, models)
    code = """
    import hf_retarget as rt
    from hf_retarget.models import load_checkpoint
    sides = ["ada/old", "ada/tuned", "ada/new"]
    if {load}:
        for each in sides:
            load_checkpoint(each)
    found = rt.check(*sides)
    answer([found.compatible, found.download, failure(rt.check, *sides[:2], "ada/other")])
    """
    assert hub.client().ask(code.replace("{load}", "True")) == [True, 0, None]
    offline = hub.client(HF_HUB_OFFLINE="1").ask(code.replace("{load}", "False"))
    assert offline[:2] == [True, 0]
    assert "'model.safetensors' of 'ada/other' is not in the cache" in offline[2]


def test_labels_of_a_dataset_come_from_its_card(hub: Hub, models):
    import datasets
    from PIL import Image

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(LABELS))})
    rows = {"image": [Image.new("L", (8, 8), 20 * n) for n in range(8)], "label": [0, 1] * 4}
    buffer = BytesIO()
    datasets.Dataset.from_dict(rows, features).to_parquet(buffer)
    labels = "".join(f"            '{number}': {name}\n" for number, name in enumerate(LABELS))
    readme = (
        "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n"
        f"      class_label:\n        names:\n{labels}"
        "  splits:\n  - name: train\n    num_bytes: 1000\n    num_examples: 8\n  download_size: 900\n---\n"
    ).encode()
    for name in ("described", "bare"):
        files = {"data/train-00000-of-00001.parquet": buffer.getvalue()}
        hub.repository(f"ada/{name}", files | ({"README.md": readme} if name == "described" else {}), kind="dataset")
    publish(hub, models)
    code = """
    import hf_retarget as rt
    facts = [rt.check("ada/old", "ada/tuned", "ada/new", f"ada/{name}") for name in ("described", "bare")]
    some = rt.check("ada/old", "ada/tuned", "ada/new", "ada/described", overrides={"data.classes": ("Bag", "Trouser")})
    facts.append(some)
    answer([[each.compatible, each.data.labels, each.data.images, each.data.notes] for each in facts])
    """
    described, bare, chosen = hub.client().ask(code)
    assert described == [True, list(LABELS), {"train": 8}, []]
    assert bare[:2] == [True, None]
    assert chosen[2] == {"train": 8}
    assert "counted over all classes" in chosen[3][0]
    assert "does not list the labels" in bare[3][0]
    assert not [record for record in hub.log if "parquet" in record.path and record.method == "GET"]
