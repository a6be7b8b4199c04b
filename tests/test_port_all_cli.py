"""`hf-retarget port-all`: every model on its own, a summary at the end, and a second run that goes on."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from loopback_hub import Hub
from PIL import Image

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.contenders import find_contender
from hf_retarget.document import read_document
from hf_retarget.errors import RecipeError
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting.port_all import PortJob, list_jobs

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
SHORT = (
    "--steps",
    "2",
    "--batch-size",
    "16",
    "--grad-batches",
    "1",
    "--bn-batches",
    "1",
    "--device",
    "cpu",
    "--no-verify",
)
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "port_organisation.py"
PAIR = ("Bag", "Coat")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["port-all", *map(str, arguments)])


def make(folder: Path, seed: int, classes: int, name: str = "test_resnet", channels: int = 1) -> Path:
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, in_chans=channels)
    return save_model(folder, model.state_dict(), load_checkpoint(model))


def tune(folder: Path, base: Path, seed: int, labels: tuple[str, ...] | None, classes: int) -> Path:
    old = load_checkpoint(base)
    tuned = old.build(classes, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return save_model(folder, tuned.state_dict(), old, num_classes=classes, labels=labels)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make(folder / "old", 0, 5)
    make(folder / "new", 1, 7)
    make(folder / "other", 1, 7, "test_efficientnet")
    tune(folder / "all", folder / "old", 2, None, 10)
    tune(folder / "two", folder / "old", 3, PAIR, 2)
    entries = [str(folder / "other"), {"model": str(folder / "all"), "name": "ten"}]
    entries.append({"model": str(folder / "two"), "overrides": {"data.classes": list(PAIR)}})
    (folder / "models.yaml").write_text(json.dumps(entries))
    return folder


MASKED = ("--method", "fgmt-sign")


def bases(models: Path) -> tuple[str, ...]:
    return ("--src-base", str(models / "old"), "--new-base", str(models / "new"))


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("out") / "ported"
    file = ("--models-file", models / "models.yaml")
    return run(*bases(models), *file, *DATA, *SHORT, *MASKED, "--reuse-permutation", "--out", out), out


def test_a_failure_does_not_stop_the_rest(finished, models):
    result, out = finished
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    columns = [find_contender(name).short.upper() for name in ("tuned", "naive", "naive-sign", "plain", "fgmt-sign")]
    assert lines[0].split("  ")[0] == "MODEL"
    assert [name for name in columns if name not in lines[0]] == []
    assert lines[0].split()[-2:] == ["PERMUTATION", "RESULT"]
    assert [line.split()[-1] for line in lines[1:4]] == ["failed", "ported", "ported"]
    assert any(line.startswith(f"{models / 'other'}: the tuned model") for line in lines)
    assert lines[-1] == f"2 of 3 ported, in {out}"
    assert sorted(path.name for path in out.iterdir()) == ["port-all.html", "port-all.json", "ten", "two"]
    assert load_checkpoint(out / "two").labels == PAIR
    assert "[2 of 3]" in result.stderr


def test_the_permutation_of_the_first_is_used_for_the_rest_and_said_so(finished):
    result, out = finished
    ten, two = (read_document(out / name / "port.json") for name in ("ten", "two"))
    assert (ten.permutation.given, ten.permutation.origin) == (False, None)
    assert (two.permutation.given, two.permutation.origin) == (True, "ten")
    assert (ten.port.gradients, two.port.gradients) == (4, 0)
    assert (ten.winner, two.winner) == ("fgmt-sign", "given")
    one, other = (rt.Permutation.load(out / name / "permutation.safetensors") for name in ("ten", "two"))
    assert one.fingerprint != other.fingerprint, "another number of classes is another graph"
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "reusing the permutation of 'ten'" in result.stderr
    assert "without gradients" in result.stderr
    assert "of ten" in result.stdout
    summary = json.loads((out / "port-all.json").read_text())
    assert summary["permutation_from"] == "ten"
    assert [each["permutation_from"] for each in summary["models"]] == [None, None, "ten"]


def test_a_second_run_skips_what_is_finished(finished, models, tmp_path):
    out = tmp_path / "ported"
    shutil.copytree(finished[1], out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    file = ("--models-file", models / "models.yaml")
    shutil.rmtree(out / "two")
    again = run(*bases(models), *file, *DATA, *SHORT, *MASKED, "--reuse-permutation", "--out", out, "--json", "-q")
    document = json.loads(again.stdout)
    assert [each["status"] for each in document["models"]] == ["failed", "there", "ported"]
    assert document["models"][2]["permutation_from"] == "ten"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if "two" not in path.parts)
    same = (out / "two" / "model.safetensors").read_bytes()
    assert same == (finished[1] / "two" / "model.safetensors").read_bytes()
    changed = run(*bases(models), *file, *DATA, *SHORT, *MASKED, "--steps", "3", "--out", out)
    assert changed.exit_code == 1
    assert "was ported with another recipe: port.steps was 2 and is 3 now" in changed.stdout
    swapped = ("--src-base", models / "old", "--new-base", models / "old")
    other = run(*swapped, *file, *DATA, *SHORT, "--reuse-permutation", "--out", out)
    assert "holds another port: its new base was" in other.stdout
    assert all(path.exists() for path in before)


def test_an_interrupted_run_goes_on(models, tmp_path, monkeypatch):
    port = import_module("hf_retarget.porting.port")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    arguments = (
        *bases(models),
        "--models",
        models / "all",
        *DATA,
        *SHORT,
        "--control",
        "none",
        "--out",
        tmp_path / "out",
    )
    with monkeypatch.context() as patch:
        patch.setattr(port, "make_result", interrupt)
        stopped = run(*arguments)
    assert stopped.exit_code == 130
    assert stopped.stderr.splitlines()[-1].startswith("Error: interrupted; the same command ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".all.work", "port-all.json"]
    waiting = json.loads((tmp_path / "out" / "port-all.json").read_text())["models"]
    assert [each["status"] for each in waiting] == ["waiting"]
    resumed = run(*arguments)
    assert resumed.exit_code == 0, resumed.output
    assert "continuing the port after step 2 of 2" in resumed.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["all", "port-all.html", "port-all.json"]


def test_python_takes_jobs_and_several_names_follow_one_option(models, tmp_path):
    naive = {"data.limit": 60, "data.image_size": 28, "data.validation": 0.2, "port.method": "naive", "port.steps": 1}
    naive |= {"port.control": "none", "port.verify": False, "port.bn_batches": 1, "port.batch_size": 16}
    jobs = [
        models / "all",
        PortJob(str(models / "two"), data="fashion-mnist", overrides=naive | {"data.classes": PAIR}),
    ]
    done = rt.port_all(models / "old", models / "new", jobs, out=tmp_path, overrides=naive, reuse_permutation=True)
    assert [each.status for each in done.outcomes] == ["failed", "ported"]
    assert "no data was given for" in done.failed[0].error
    assert done.permutation_from is None, "a naive port has none to give"
    missing = run(*bases(models), "--models", tmp_path / "a", tmp_path / "b", *DATA, *SHORT, "--out", tmp_path / "none")
    assert missing.exit_code == 1
    assert missing.stdout.splitlines()[-1].startswith("0 of 2 ported")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x", "is not a list"),
        ("- model: 3", "no model is named"),
        ("- {model: x, dta: y}", "unknown field 'dta'; did you mean 'data'?"),
        ("- {model: x, overrides: fast}", "but must be fields such as 'port.steps: 15'"),
        ("- [", "line "),
        ("[]", "no models to port"),
        ("- {model: a/x, name: z}\n- {model: b/x, name: z}", "two models would go to the folder 'z'"),
    ],
)
def test_bad_files_of_models(text, message, tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        list_jobs([], path)
    assert message in str(error.value)


def test_wrong_usage_exits_with_2(models, tmp_path):
    assert run(*bases(models), *DATA, "--out", tmp_path).exit_code == 2
    assert run(*bases(models), "--models", "x", *DATA).exit_code == 2


# ---- the example for a whole organisation


def colours(count: int) -> bytes:
    import datasets

    names = ["blue", "green", "red"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows: dict[str, list[object]] = {"image": [], "label": []}
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 90, (16, 16, 3), dtype=np.uint8)
        pixels[..., 2 - number % 3] += 120
        rows["image"].append(Image.fromarray(pixels))
        rows["label"].append(number % 3)
    buffer = BytesIO()
    datasets.Dataset.from_dict(rows, features).to_parquet(buffer)
    return buffer.getvalue()


def test_the_example_ports_the_models_of_an_organisation(hub: Hub, tmp_path):
    ada = hub.add_user("eve", "lab")
    made = {"old": make(tmp_path / "old", 0, 5, channels=3), "new": make(tmp_path / "new", 1, 7, channels=3)}
    made["reds"] = tune(tmp_path / "reds", made["old"], 2, ("blue", "green", "red"), 3)
    made["dogs"] = tune(tmp_path / "dogs", made["old"], 3, ("beagle", "boxer", "pug"), 3)
    made["alone"] = tune(tmp_path / "alone", made["old"], 4, None, 3)
    for name, folder in made.items():
        files: dict[str, bytes | Path] = {path.name: path for path in folder.iterdir()}
        if name in ("reds", "dogs"):
            files["README.md"] = (
                b"---\nbase_model: lab/old\nbase_model_relation: finetune\ndatasets: [lab/colours]\n---\n"
            )
        hub.repository(f"lab/{name}", files, private=name == "reds")
    labels = "".join(f"            '{number}': {name}\n" for number, name in enumerate(("blue", "green", "red")))
    card = (
        "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n"
        f"      class_label:\n        names:\n{labels}---\n"
    )
    parquet = {"data/train-00000-of-00001.parquet": colours(60), "data/test-00000-of-00001.parquet": colours(21)}
    hub.repository("lab/colours", parquet | {"README.md": card.encode()}, kind="dataset")
    fields = ("data.image_size=32", "port.steps=1", "port.batch_size=16", "port.grad_batches=1", "port.control=none")
    command = (sys.executable, EXAMPLE, "--organisation", "lab", "--old-base", "lab/old", "--new-base", "lab/new")
    command += ("--out", tmp_path / "ported", "--set", *fields)
    done = hub.client(token=ada.token).run(*command, timeout=200)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("lab/dogs: not ported: the labels of the data (3) and of the tuned model 'lab/dogs' (3)")
    assert lines[1].startswith("lab/reds: ")
    assert "MB to download, 11 groups to match" in lines[1]
    assert lines[2].startswith("lab/reds: ported: Undecided: ")
    assert len(lines) == 3, "models that are no fine-tunings of the old base are left alone"
    assert load_checkpoint(tmp_path / "ported" / "reds").labels == ("blue", "green", "red")
    fetched = [record for record in hub.log if record.method == "GET" and "dogs" in record.path and not record.range]
    assert not [record for record in fetched if "safetensors" in record.path], "it was refused before the download"
