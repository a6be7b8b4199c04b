"""Runs that were killed, finished, damaged or moved: what `--resume` makes of them, and who may write where."""

from __future__ import annotations

import errno
import fcntl
import json
import random
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from tiny_lm import save_trio

import hf_retarget as rt
from hf_retarget import training
from hf_retarget.cli import main
from hf_retarget.files import lock_entry, lock_folder
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.porting import result, resume, streamed
from hf_retarget.run import describe_environment

DATA = ("--data", "fashion-mnist", "--data-limit", "60", "--data-image-size", "28", "--data-validation", "0.2")
STEPS = ("--steps", "3", "--batch-size", "8", "--device", "cpu")
PORT = (*STEPS, "--grad-batches", "1", "--bn-batches", "1", "--control", "none")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "tuned", "new")):
        torch.manual_seed(seed)
        net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        save_model(folder / name, net.state_dict(), load_checkpoint(net))
    return folder


@pytest.fixture(scope="module")
def trio(models) -> tuple[object, ...]:
    return ("--src-base", models / "old", "--src-ft", models / "tuned", "--new-base", models / "new")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_finished_run_says_so(models, trio, tmp_path):
    commands = {
        "ported": ("port", *trio, *DATA, *PORT),
        "tuned": ("finetune", models / "old", *DATA, *STEPS),
        "plane": ("plane", "--models", models / "old", models / "new", *DATA, "--grid", "2", "--limit", "10"),
    }
    for name, command in commands.items():
        out = ("--out", tmp_path / name)
        first = run(*command, *out)
        assert first.exit_code == 0, first.output
        again = run(*command, *out, "--resume")
        assert again.exit_code == 0, again.output
        assert "is finished; there is nothing to resume" in again.stderr
        assert again.stdout == first.stdout
        assert json.loads(run(*command, *out, "--resume", "--json").stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(commands)
    both = run(*commands["ported"], "--out", tmp_path / "ported", "--resume", "--overwrite")
    assert (both.exit_code, "is finished" in both.stderr) == (0, True)


def test_a_finished_run_of_another_command(trio, tmp_path):
    out = ("--out", tmp_path / "ported")
    assert run("port", *trio, *DATA, *PORT, *out).exit_code == 0
    other = run("port", *trio, *DATA, *PORT, "--seed", "7", *out, "--resume")
    assert (other.exit_code, "seed 0 and has 7" in other.stderr) == (1, True), other.stderr
    before = weights(tmp_path / "ported")
    replaced = run("port", *trio, *DATA, *PORT, "--seed", "7", *out, "--resume", "--overwrite")
    assert replaced.exit_code == 0, replaced.output
    assert weights(tmp_path / "ported") != before


@pytest.fixture
def killed(trio, tmp_path, monkeypatch) -> tuple[Path, tuple[object, ...]]:
    """A port that ended after two of three steps, and its command."""
    command = ("port", *trio, *DATA, *PORT, "--out", tmp_path / "ported")
    write = resume.StepDiary.write

    def write_and_end(self, state, tracks) -> None:
        write(self, state, tracks)
        if state.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume.StepDiary, "write", write_and_end)
        assert run(*command).exit_code == 130
    return tmp_path / ".ported.work", command


@pytest.mark.parametrize("pattern", ["run.json", "*.progress.json", "*.state-*.safetensors", "*.best-*.safetensors"])
def test_a_state_that_is_damaged_is_computed_again(killed, trio, tmp_path, pattern):
    hidden, command = killed
    path = next(hidden.glob(pattern))
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 4
    path.write_bytes(content)
    resumed = run(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "damaged" in resumed.stderr
    assert re.search("recomputed|starting over", resumed.stderr)
    assert run(*command[:-1], tmp_path / "whole").exit_code == 0
    assert weights(tmp_path / "ported") == weights(tmp_path / "whole")


def test_a_state_that_is_whole_is_used(killed, tmp_path):
    resumed = run(*killed[1], "--resume")
    assert "continuing the port after step 2 of 3" in resumed.stderr
    assert run(*killed[1][:-1], tmp_path / "whole").exit_code == 0
    assert weights(tmp_path / "ported") == weights(tmp_path / "whole")


def test_a_state_of_other_versions_or_threads_is_computed_again(killed, monkeypatch):
    before = describe_environment()
    monkeypatch.setattr("hf_retarget.porting.port.describe_environment", lambda device: {**before, "threads": 64})
    resumed = run(*killed[1], "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert f"'threads' was {before['threads']} and is 64 now" in resumed.stderr
    assert re.search("recomputed|starting over", resumed.stderr)
    document = json.loads((killed[0].parent / "ported" / "port.json").read_text())
    assert document["run"]["environment"]["threads"] == 64
    assert document["device"]["threads"] == before["threads"]


def test_strange_files_do_not_get_into_a_finished_folder(killed, tmp_path):
    hidden, command = killed
    (hidden / "result" / "secret.txt").write_text("private")
    (hidden / "result" / ".port.json.abcdefgh.tmp").write_text("half")
    assert run(*command, "--resume").exit_code == 0
    names = {path.name for path in (tmp_path / "ported").rglob("*")}
    assert not names & {"secret.txt", ".port.json.abcdefgh.tmp"}


def test_what_safetensors_had_begun_to_write_does_not_get_into_a_finished_folder(models, tmp_path, monkeypatch):
    command = ("finetune", models / "old", *DATA, *STEPS, "--record", "1", "--out", tmp_path / "tuned")
    keep = training._Training._save

    def keep_and_end(self) -> None:
        keep(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training._Training, "_save", keep_and_end)
        assert run(*command).exit_code == 130
    (tmp_path / ".tuned.work" / "trajectory" / ".tmpAb12Cd").write_bytes(b"half")
    assert run(*command, "--resume").exit_code == 0
    assert not list((tmp_path / "tuned").rglob(".*"))


def test_ports_of_all_models_without_images_continue_and_leave_nothing_beside_them(tmp_path, monkeypatch):
    trio = save_trio(tmp_path / "lm", max_shard_size="20KB")
    command = ("port-all", "--src-base", trio["src_base"], "--new-base", trio["new_base"], "--models", trio["src_ft"])
    command = (*command, "--data", "none", "--out", tmp_path / "all")
    keep = streamed.write_shard

    def keep_and_end(*arguments) -> None:
        keep(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streamed, "write_shard", keep_and_end)
        assert run(*command).exit_code == 130
    done = run(*command)
    assert done.exit_code == 0, done.output
    for name in (".src_ft.lock", ".src_ft.lock.json", ".src_ft.work.old/run.json"):  # as after a kill while tidying up
        (tmp_path / "all" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "all" / name).write_text("{}")
    assert run(*command).exit_code == 0
    assert list((tmp_path / "all").glob(".*")) == []


def test_a_folder_without_a_model_is_never_put_into_place(killed, tmp_path, monkeypatch):
    monkeypatch.setattr(result, "save_model", lambda *arguments, **options: None)
    done = run(*killed[1], "--resume")
    assert (done.exit_code, "holds no complete model" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "ported").exists()


def test_an_old_folder_with_a_dead_link_is_replaced(killed, models, tmp_path):
    shutil.copytree(models / "new", tmp_path / "ported")
    (tmp_path / "ported" / "link").symlink_to("nowhere")
    done = run(*killed[1], "--resume", "--overwrite")
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["ported"]


def test_a_plane_is_not_taken_for_another_and_removes_nothing(models, tmp_path):
    command = ("plane", *DATA, "--grid", "2", "--limit", "10", "--out", tmp_path / "plane")
    assert run(*command, "--models", models / "old", models / "new").exit_code == 0
    other = run(*command, "--models", models / "old", models / "tuned", "--resume")
    assert (other.exit_code, "by a different run" in other.stderr) == (1, True), other.output
    (tmp_path / "others" / ".run.work").mkdir(parents=True)
    written = tmp_path / "others" / ".run.work" / ".state.safetensors.abcd1234.tmp"
    written.write_text("of another run")
    (tmp_path / "others" / "notes.txt").write_text("mine")
    refused = run(*command[:-1], tmp_path / "others", "--models", models / "old", models / "new")
    assert (refused.exit_code, written.exists()) == (1, True), refused.output


def test_the_second_run_learns_who_is_first(trio, models, tmp_path):
    out = tmp_path / "deep" / "ported"
    commands = (
        ("port", *trio, *DATA, *PORT),
        ("finetune", models / "old", *DATA, *STEPS),
        ("plane", "--models", models / "old", models / "new", *DATA, "--grid", "2"),
        ("port-all", "--src-base", models / "old", "--new-base", models / "new", "--models", models / "tuned", *DATA),
    )
    with lock_folder(out):
        for command in commands:
            second = run(*command, "--out", out)
            assert second.exit_code == 1, second.output
            assert "another run is working on" in second.stderr
            assert "process" in second.stderr
            assert "since" in second.stderr
        free = run(*commands[1], "--out", out, "--no-lock")
        assert free.exit_code == 0, free.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["ported"]


def test_a_lock_that_a_killed_process_left_is_no_lock(models, tmp_path):
    (tmp_path / ".tuned.lock").write_text("")
    (tmp_path / ".tuned.lock.json").write_text('{"process": 1, "host": "x", "since": "then"}')
    assert run("finetune", models / "old", *DATA, *STEPS, "--out", tmp_path / "tuned").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_a_file_system_without_locks_is_named(models, tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    command = ("finetune", models / "old", *DATA, *STEPS, "--out", tmp_path / "tuned")
    refused = run(*command)
    assert (refused.exit_code, "--no-lock" in refused.stderr) == (1, True), refused.output
    assert run(*command, "--no-lock").exit_code == 0


def test_a_folder_that_cannot_be_written_is_noticed_first(trio, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "hf_retarget.porting.inputs.load_checkpoint", lambda *arguments, **options: pytest.fail("too late")
    )
    done = run("port", *trio, *DATA, *PORT, "--out", tmp_path / "file" / "ported")
    assert done.exit_code == 1
    assert "cannot work in" in done.stderr


def test_runs_wait_for_each_other_in_a_shared_cache(tmp_path):
    order: list[str] = []
    path = tmp_path / "cache" / "step-1.safetensors"

    def second() -> None:
        with lock_entry(path, lambda: order.append("waits")):
            order.append("second")

    with lock_entry(path, pytest.fail):
        other = threading.Thread(target=second)
        other.start()
        while "waits" not in order:
            pass
        order.append("first")
    other.join(timeout=60)
    assert order == ["waits", "first", "second"]


def test_a_damaged_gradient_is_computed_again(trio, tmp_path):
    cache = ("--gradient-cache", tmp_path / "cache")
    assert run("port", *trio, *DATA, *PORT, *cache, "--out", tmp_path / "first").exit_code == 0
    files = sorted((tmp_path / "cache").rglob("*.safetensors"))
    assert len(files) == 3
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 0x80  # the sign of a number
    files[0].write_bytes(content)
    again = run("port", *trio, *DATA, *PORT, *cache, "--out", tmp_path / "second")
    assert again.exit_code == 0, again.output
    assert "is damaged" in again.stderr
    assert weights(tmp_path / "first") == weights(tmp_path / "second")
    assert [path.name for path in (tmp_path / "cache").rglob(".*")] == []


def test_a_gradient_that_cannot_be_kept_is_one_line(trio, tmp_path):
    """What compiled code writes fails like any other write."""
    command = ("port", *trio, *DATA, *PORT, "--gradient-cache", tmp_path / "cache", "--out", tmp_path / "ported")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        failed = run(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (failed.exit_code, type(failed.exception)) == (1, SystemExit), failed.exception
    assert "step-1.safetensors" in failed.stderr.splitlines()[-1]
    assert list((tmp_path / "cache").rglob("*.*")) == []
    assert run(*command, "--resume").exit_code == 0


def test_no_path_of_the_machine_is_written(models, tmp_path):
    from PIL import Image

    photos = tmp_path / "private" / "photos"
    for split, count in (("train", 30), ("test", 10)):
        for number in range(count):
            place = photos / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (28, 28), number * 5).save(place / f"{number}.png")
    (photos / "train" / "class0" / "0.png").write_bytes(b"broken")
    sides = [shutil.copytree(models / name, tmp_path / "private" / name) for name in ("old", "new")]
    tuned = run("finetune", sides[0], "--data", photos, *STEPS, "--out", tmp_path / "private" / "tuned")
    assert tuned.exit_code == 0, tuned.output
    trio = ("--src-base", sides[0], "--src-ft", tmp_path / "private" / "tuned", "--new-base", sides[1])
    ported = run("port", *trio, "--data", photos, *PORT, "--out", tmp_path / "private" / "ported")
    assert ported.exit_code == 0, ported.output
    assert "could not be read" in (tmp_path / "private" / "ported" / "port.json").read_text()
    for folder in ("tuned", "ported"):
        for path in (tmp_path / "private" / folder).rglob("*"):
            if path.is_file():
                assert b"private" not in path.read_bytes(), path
    following = next(line for line in ported.stderr.splitlines() if line.startswith("Next: "))
    assert f"--data-reference {photos}" in following


def test_a_result_that_is_saved_twice(trio, tmp_path):
    nets = [each for each in trio if isinstance(each, Path)]
    short = {"data.limit": 60, "data.image_size": 28, "port.steps": 1, "port.batch_size": 8, "port.control": "none"}
    recipe = rt.load_recipe("fashion-mnist").override(**short)
    result = rt.port(*nets, recipe=recipe)
    result.save(tmp_path / "saved")
    with pytest.raises(rt.PortError, match="not empty"):
        result.save(tmp_path / "saved")
    before = weights(tmp_path / "saved")
    result.save(tmp_path / "saved", overwrite=True)
    assert weights(tmp_path / "saved") == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_note_of_a_lock_replaces_a_link(trio, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".ported.lock.json").symlink_to(tmp_path / "precious")
    with lock_folder(tmp_path / "ported"):
        assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["port", "streamed", "finetune"])
def test_any_byte_of_unfinished_work_may_be_another(models, trio, tmp_path, monkeypatch, kind):
    """Whatever byte of whatever file: the run is refused in one line, or ends in the bytes of an undisturbed one."""
    lms = save_trio(tmp_path / "lm", max_shard_size="20KB")
    sides = [word for name, path in lms.items() for word in (f"--{name.replace('_', '-')}", path)]
    command, owner, name = {
        "port": (("port", *trio, *DATA, *PORT, "--method", "fgmt"), resume.StepDiary, "write"),
        "streamed": (("port", *sides, "--data", "none"), streamed, "save_record"),
        "finetune": (
            ("finetune", models / "old", *DATA, *STEPS, "--checkpoint-every", "1"),
            training._Training,
            "_save",
        ),
    }[kind]
    keep, calls = getattr(owner, name), []

    def keep_and_end(*arguments, **options) -> None:
        keep(*arguments, **options)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, keep_and_end)
        assert run(*command, "--out", tmp_path / "out").exit_code == 130
    hidden, kept = tmp_path / ".out.work", tmp_path / "kept"
    shutil.copytree(hidden, kept)
    assert run(*command, "--out", tmp_path / "whole").exit_code == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.safetensors")}
    places = random.Random(kind)
    files = [path.relative_to(kept) for path in sorted(kept.rglob("*")) if path.is_file()]
    assert len(files) >= 2
    for file in files:
        content = (kept / file).read_bytes()
        for place in {0, 7, 8, len(content) - 1, *(places.randrange(len(content)) for _ in range(8))}:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.copytree(kept, hidden)
            changed = bytearray(content)
            changed[place] ^= places.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
            (hidden / file).write_bytes(changed)
            done = run(*command, "--out", tmp_path / "out", "--resume")
            what = f"byte {place} of {file}: {done.output[-2000:]}"
            if done.exit_code == 1:
                assert type(done.exception) is SystemExit, what
                assert done.stderr.splitlines()[-1].startswith("Error: "), what
                assert not (tmp_path / "out").exists(), what
                continue
            assert done.exit_code == 0, what
            assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")} == whole, what
