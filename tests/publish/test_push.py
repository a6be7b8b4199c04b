"""`hf-retarget push` against a loopback Hub: what is published, what is kept, and what is sent only once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import Hub
from markupsafe import escape

from hf_retarget.document import read_document
from hf_retarget.files import to_json
from hf_retarget.publish import Destination, push_folder

OLD_PORT = Path(__file__).parents[1] / "data_files" / "port-v1" / "port.json"
PUSHED = ["README.md", "config.json", "figures/curve.png", "finetune.json", "model.safetensors", "recipe.yaml"]


def read_port(version: int) -> dict[str, Any]:
    """The content of a port.json."""
    return json.loads(OLD_PORT.read_text()) if version == 1 else json.loads(to_json(read_document(OLD_PORT).to_json()))


def test_a_push_is_one_commit_with_the_right_files(hub: Hub, push_alone, folder: Path) -> None:
    done = push_alone(folder, "birds")
    assert done.returncode == 0, done.stderr
    repository = hub.repository("ada/birds")
    assert repository.paths() == PUSHED
    for name in PUSHED[1:]:
        assert repository.read(name) == (folder / name).read_bytes(), name
    assert [each.title for each in repository.history()] == ["Push a model with hf-retarget", "initial commit"]
    commit = repository.refs["refs/heads/main"]
    assert done.stdout == f"Pushed to {hub.endpoint}/ada/birds (commit {commit[:8]})\n"
    assert "the recorded trajectory is left out" in done.stderr
    assert "left out, because they are not part of a port: diary.txt\n" in done.stderr
    assert len(hub.log.of("download", "GET")) == 1, "the weights were read back"


def test_the_card_names_the_repository(hub: Hub, push, folder: Path) -> None:
    push(folder, "ada/birds", "--revision", "v2", "--no-verify")
    repository = hub.repository("ada/birds")
    card = repository.read("README.md", "v2").decode()
    assert 'timm.create_model("hf-hub:ada/birds@v2", pretrained=True)' in card
    assert "# Käfer 🐞" in card
    assert "local-dir:./" in (folder / "README.md").read_text("utf-8"), "the card in the folder is not changed"
    assert repository.paths() == [], "main is left alone"


def test_private_pushes_in_parts_with_json(hub: Hub, push, folder: Path) -> None:
    hub.multipart_from, hub.part_size = 100_000, 300_000
    size = (folder / "model.safetensors").stat().st_size
    done = push(folder, "birds", "--private", "--trajectory", "--json", "-q", "--commit-message", "Käfer: ja")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(done.stdout)
    repository = hub.repository("ada/birds")
    assert repository.facts["private"] is True
    assert (document["format"], document["repository"]) == ("hf-retarget/push/1", "ada/birds")
    assert document["commit"] == repository.refs["refs/heads/main"]
    assert document["files"] == [*PUSHED, "trajectory/step-1.safetensors"]
    assert sum(each.received for each in hub.log.of("upload_part")) == size
    assert repository.read("model.safetensors") == (folder / "model.safetensors").read_bytes()
    assert next(iter(repository.history())).title == "Käfer: ja"


def test_only_changed_files_are_sent_again(hub: Hub, push, folder: Path) -> None:
    push(folder, "birds", "--no-verify")
    hub.log.clear()
    again = push(folder, "birds", "--no-verify")
    assert again.stdout.startswith("Already up to date: ")
    assert not hub.log.of("commit")
    (folder / "recipe.yaml").write_text("name: another\n")
    changed = push(folder, "birds", "--no-verify")
    assert changed.stdout.startswith("Pushed to ")
    assert not hub.log.of("upload")
    assert hub.repository("ada/birds").read("recipe.yaml") == b"name: another\n"


def test_existing_files_are_kept(hub: Hub, push, folder: Path) -> None:
    repository = hub.repository("ada/birds", {"README.md": b"# Mine\n", "notes.txt": b"n"})
    done = push(folder, "ada/birds")
    assert done.exit_code == 0, done.stderr
    assert "the existing README.md is kept; --replace-card replaces it" in done.stderr
    assert repository.read("README.md") == b"# Mine\n"
    assert repository.paths() == sorted([*PUSHED, "notes.txt"])
    assert push(folder, "ada/birds").stdout.startswith("Already up to date")
    push(folder, "ada/birds", "--replace-card", "--no-verify")
    assert "Käfer" in repository.read("README.md").decode()
    assert len(list(repository.history())) == 4


def test_a_pull_request_to_another_account(hub: Hub, push, refused, folder: Path) -> None:
    repository = hub.repository("ada/birds", {"README.md": b"# Mine\n"})
    bob = hub.add_user("bob").token
    assert refused(folder, "ada/birds", HF_TOKEN=bob) == (
        "'bob' may not write to 'ada'; push to one of bob, or propose it with --create-pr"
    )
    hub.lose_answer("commit")
    done = push(folder, "ada/birds", "--create-pr", HF_TOKEN=bob)
    assert done.exit_code == 0, done.stderr
    assert f"{hub.endpoint}/ada/birds/discussions/1 " in done.stdout
    assert len(repository.facts["pulls"]) == 1, "the lost answer did not make a second one"
    assert repository.read("model.safetensors", "refs/pr/1") == (folder / "model.safetensors").read_bytes()
    assert repository.paths() == ["README.md"]
    assert "'bob/none' does not exist, so it takes no pull request" in refused(
        folder, "bob/none", "--create-pr", HF_TOKEN=bob
    )


def test_an_organisation(hub: Hub, push, folder: Path) -> None:
    hub.add_user("ada", "lab")
    assert push(folder, "lab/birds", "--no-verify").exit_code == 0
    assert hub.repository("lab/birds").paths() == PUSHED


def test_push_from_python(connected: Hub, folder: Path, monkeypatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    destination = Destination("birds", token="hf_ada_write")
    pushed = push_folder(folder, destination)
    assert pushed.commit == connected.repository("ada/birds").refs["refs/heads/main"]
    assert "hf_ada" not in repr(destination) + repr(pushed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "not a finished model: it has no config.json"),
        ("model.safetensors", "not a finished model: it has no model.safetensors"),
    ],
)
def test_unfinished_folders_are_not_pushed(hub: Hub, refused, folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    assert message in refused(folder, "birds")
    (folder / name).write_bytes(b'{"cut off')
    assert "is damaged" in refused(folder, "birds")
    hidden = folder.parent / ".x.work" / "result"
    hidden.parent.mkdir()
    folder.rename(hidden)
    assert "unfinished run" in refused(hidden, "birds")
    assert "there is no folder" in refused(folder, "birds")
    assert len(hub.log) == 0


def test_a_card_refused_by_the_hub(hub: Hub, refused, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: my-own\n---\n# Käfer\n")
    line = refused(folder, "birds")
    assert line.startswith("the Hub refuses the README.md: Invalid metadata")
    assert "my-own" in line
    assert hub.repository("ada/birds").paths() == []
    assert not hub.log.of("upload")


@pytest.mark.parametrize(
    ("shows", "revision", "option", "pushed"),
    [
        (True, None, (), False),
        (True, None, ("--samples",), True),
        (True, "0" * 40, (), True),
        (False, None, (), True),
        (None, None, (), True),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_local_images_are_not_published(
    hub: Hub,
    push,
    folder: Path,
    version: int,
    shows: bool | None,
    revision: str | None,
    option: tuple[str, ...],
    pushed: bool,
) -> None:
    content = read_port(version)
    (content["inputs"] if version == 1 else content)["data"]["revision"] = revision
    if not shows:
        content["samples"] = None if shows is None else {**content["samples"], "images": []}
    (folder / "port.json").write_text(json.dumps(content))
    shown = ["figures/samples.png", "report.html"]
    for name in shown:
        (folder / name).write_bytes(b"pictures")
    done = push(folder, "birds", *option)
    assert done.exit_code == 0, done.output
    assert [name in hub.repository("ada/birds").paths() for name in shown] == [pushed, pushed]
    assert ("because they show your images" in done.stderr) is not pushed


@pytest.mark.parametrize("version", [1, 2])
def test_local_paths_are_not_published(hub: Hub, push, folder: Path, version: int) -> None:
    command = "hf-retarget port --data '/home/ada/my photos' --src-ft ~/tuned --new-base timm/new"
    content = read_port(version) | {"samples": None, "command": command}
    models = "inputs" if version == 1 else "models"
    content[models]["tuned"]["reference"] = "/home/ada/tuned"
    (folder / "port.json").write_text(json.dumps(content))
    (folder / "recipe.yaml").write_text("data:\n  reference: /home/ada/Käfer\n", encoding="utf-8")
    (folder / "report.html").write_text(f"<code>{escape(command)}</code>")
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert push(folder, "birds").exit_code == 0
    repository = hub.repository("ada/birds")
    short = "hf-retarget port --data 'my photos' --src-ft tuned --new-base timm/new"
    pushed = json.loads(repository.read("port.json"))
    assert (pushed["command"], pushed[models]["tuned"]["reference"]) == (short, "tuned")
    assert repository.read("recipe.yaml").decode() == "data:\n  reference: Käfer\n"
    assert repository.read("report.html").decode() == f"<code>{escape(short)}</code>"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept, (
        "here, all is as it was"
    )
    assert push(folder, "birds").stdout.startswith("Already up to date")
