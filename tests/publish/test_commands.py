"""`--push-to-hub` after a port and a fine-tuning, and real clients that load the result."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from loopback_hub import Hub
from loopback_hub.cards import problems_of

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.models import load_checkpoint, save_model

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
QUICK = ("--method", "naive", "--control", "none", "--no-verify", "--steps", "2", "--batch-size", "16", "-q")
CLASSES = ("Äpfel & Birnen", "a|b", "<b>🍒</b>", 'say "hi"', "x: y", "k6", "k7", "k8", "k9", "k10")


@pytest.fixture
def trio(tmp_path: Path, connected: Hub) -> tuple[str, ...]:
    """An old base in a folder, its fine-tuning, and a new base with a licence on the Hub."""
    torch.manual_seed(0)
    for name in ("old", "new"):
        model = timm.create_model("test_resnet", num_classes=5, in_chans=1)
        save_model(tmp_path / name, model.state_dict(), load_checkpoint(model))
    old = load_checkpoint(tmp_path / "old")
    save_model(tmp_path / "tuned", old.build(10, seed=3).state_dict(), old, num_classes=10)
    files = {path.name: path for path in (tmp_path / "new").iterdir()}
    connected.repository("timm/new", {**files, "README.md": b"---\nlicense: cc-by-4.0\n---\n"})
    return ("--src-base", str(tmp_path / "old"), "--src-ft", str(tmp_path / "tuned"), "--new-base", "timm/new")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def refused(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 1, done.output
    return done.stderr.splitlines()[-1]


def test_a_port_is_pushed_with_its_card(connected: Hub, trio, tmp_path: Path) -> None:
    out = tmp_path / "ported"
    done = run("port", *trio, *DATA, *QUICK, "--out", out, "--push-to-hub", "birds", "--private", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["winner"], document["contenders"][0]["role"]) == ("naive", "port")
    repository = connected.repository("ada/birds")
    assert document["pushed"]["commit"] == repository.refs["refs/heads/main"]
    assert repository.facts["private"] is True
    assert {"port.json", "model.safetensors", "README.md", "recipe.yaml"} <= set(repository.paths())
    text = repository.read("README.md").decode()
    assert problems_of(text) == ([], [])
    card = ModelCard(text)
    assert (card.data.license, card.data.base_model) == ("cc-by-4.0", ["timm/new"])
    assert card.data.eval_results[0].metric_value == round(document["contenders"][0]["test"]["top1"], 4)
    assert 'timm.create_model("hf-hub:ada/birds", pretrained=True)' in text
    assert str(tmp_path) not in "".join(repository.read(f).decode() for f in ("README.md", "port.json", "recipe.yaml"))
    tuned = run("finetune", out, *DATA, "--steps", "1", "--out", tmp_path / "finished", "-q")
    assert tuned.exit_code == 0, tuned.stderr
    finished = ModelCard((tmp_path / "finished" / "README.md").read_text()).data
    assert (finished.license, finished.base_model) == ("cc-by-4.0", ["timm/new"]), "a port that is finished has both"


def test_write_access_is_checked_before_the_work(connected: Hub, trio, tmp_path: Path, monkeypatch) -> None:
    command = ("port", *trio, *DATA, *QUICK, "--out", tmp_path / "ported")
    assert "'ada' may not write to 'bob'" in refused(*command, "--push-to-hub", "bob/birds")
    assert "'ada' may not write to 'bob'" in refused(*command, "--push-to-hub", "bob/birds", "--dry-run")
    assert run(*command, "--private").exit_code == 2, "pushing where?"
    monkeypatch.delenv("HF_TOKEN")
    assert "needs a token" in refused(*command, "--push-to-hub", "birds")
    tuning = ("finetune", tmp_path / "old", *DATA, "--steps", "1", "--out", tmp_path / "tuned2")
    assert "needs a token" in refused(*tuning, "--push-to-hub", "birds")
    assert not list(tmp_path.glob("*ported*"))
    assert not connected.has_repository("ada/birds")
    assert not connected.log.of("resolve"), "no model was loaded"


def test_a_failed_push_leaves_the_folder_and_says_how_to_continue(connected: Hub, tmp_path: Path, trio) -> None:
    out = tmp_path / "a tuning"
    connected.fail("commit", 403, times=None)
    line = refused(
        *("finetune", tmp_path / "old", *DATA, "--steps", "1", "--out", out, "-q"),
        *("--push-to-hub", "birds", "--hub-revision", "v2", "--token", "hf_ada_write"),
    )
    again = f"hf-retarget push '{out}' ada/birds --revision v2"
    assert line.endswith(f"The result is saved in '{out}'; push it later: {again}")
    connected.faults.clear()
    assert timm.create_model(f"local-dir:{out}", pretrained=True).num_classes == 10
    done = run("push", out, "ada/birds", "--revision", "v2")
    assert done.exit_code == 0, done.stderr
    repository = connected.repository("ada/birds")
    assert ", branch v2 (commit " in done.stdout
    assert {"finetune.json", "initial_head.safetensors", "README.md"} <= set(repository.paths("v2"))
    text = repository.read("README.md", "v2").decode()
    assert problems_of(text) == ([], [])
    assert "fine-tuned" in text
    assert "hf_ada_write" not in text + repository.read("finetune.json", "v2").decode()


def test_a_result_is_pushed_from_python(connected: Hub, trio, tmp_path: Path) -> None:
    options = {"port.method": "naive", "port.control": "none", "port.verify": False, "port.steps": 2}
    data = {"data.limit": 60, "data.image_size": 28}
    sides = (tmp_path / "old", tmp_path / "tuned", "timm/new")
    result = rt.port(*sides, "fashion-mnist", overrides={**options, **data}, device="cpu")
    pushed = result.push_to_hub("birds", commit_message="From Python", create_pr=False)
    assert pushed is not None
    repository = connected.repository("ada/birds")
    assert (pushed.repository, pushed.commit) == ("ada/birds", repository.refs["refs/heads/main"])
    assert next(iter(repository.history())).title == "From Python"
    with pytest.raises(rt.PublishError, match="'ada' may not write to 'bob'"):
        result.push_to_hub("bob/birds")


def test_timm_and_transformers_load_pushed_models(
    hub: Hub, push_alone: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=len(CLASSES))
    folder = save_model(tmp_path / "tuned", model.state_dict(), load_checkpoint(model), labels=CLASSES)
    (folder / "README.md").write_text("# a card\n")
    assert push_alone(folder, "ada/birds", "--private", "--no-verify").returncode == 0
    code = """
    import timm, torch
    from PIL import Image
    from transformers import AutoModelForImageClassification, pipeline
    theirs = timm.create_model("hf-hub:ada/birds", pretrained=True).eval()
    wrapped = AutoModelForImageClassification.from_pretrained("ada/birds").eval()
    x = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)
    with torch.no_grad():
        logits, others = theirs(x), wrapped(pixel_values=x).logits
    found = pipeline("image-classification", model="ada/birds")(Image.new("RGB", (64, 64)), top_k=10)
    names = [wrapped.config.id2label[n] for n in range(10)]
    answer([logits.tolist(), torch.equal(logits, others), names, sorted(each["label"] for each in found)])
    """
    logits, same, names, found = hub.client(token="hf_ada_read", home=tmp_path / "home").ask(code)
    with torch.no_grad():
        ours = model.eval()(torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64))
    assert torch.allclose(torch.tensor(logits), ours, atol=1e-5)
    assert same
    assert tuple(names) == CLASSES
    assert found == sorted(CLASSES)
