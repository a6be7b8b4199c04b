"""A failing Hub: a push succeeds after retries, or ends in one line with the next step, and is never partial."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback_hub import Fault, Hub

WEIGHTS = "model.safetensors"


def whole(hub: Hub, folder: Path) -> bool:
    """Whether all files are there; False if none are."""
    paths = hub.repository("ada/birds").paths() if hub.has_repository("ada/birds") else []
    if not paths:
        return False
    assert hub.repository("ada/birds").read(WEIGHTS) == (folder / WEIGHTS).read_bytes()
    assert len(paths) == 6
    return True


@pytest.mark.parametrize(
    "route", ["whoami", "info", "create_repo", "validate_yaml", "preupload", "lfs_batch", "upload", "commit"]
)
def test_a_busy_hub_is_retried(hub: Hub, push, folder: Path, route: str) -> None:
    hub.fail(route, 503)
    done = push(folder, "birds")
    assert done.exit_code == 0, done.stderr
    assert whole(hub, folder)
    answers = [record.status for record in hub.log.of(route)]
    assert answers.count(503) == 1  # in any order: files are uploaded side by side
    assert len(answers) > 1, "asked again"
    assert len(list(hub.repository("ada/birds").history())) == 2


def test_many_faults_at_once(hub: Hub, push_alone, folder: Path) -> None:
    hub.fail("create_repo", 429, retry_after=1)
    hub.cut("upload", after=100_000, sending=True)
    hub.fail("commit", 500)
    hub.lose_answer("commit")
    hub.inject(Fault("download", cut_answer=50_000, reset=True))
    done = push_alone(folder, "birds")
    assert done.returncode == 0, done.stderr
    assert whole(hub, folder)
    assert len(list(hub.repository("ada/birds").history())) == 2, "the lost commit was not repeated"
    assert [record.status for record in hub.log.of("commit")] == [500, 0]
    assert done.stdout.startswith("Pushed to ")


def test_a_push_in_parts(hub: Hub, push, folder: Path) -> None:
    hub.multipart_from, hub.part_size = 100_000, 600_000
    hub.cut("upload_part", after=50_000, sending=True, skip=1)
    hub.lose_answer("lfs_complete")
    hub.lose_answer("commit")
    done = push(folder, "birds", "--no-verify")
    assert done.exit_code == 0, done.stderr
    assert whole(hub, folder)
    assert len(hub.log.of("upload_part")) == 1 + -(-(folder / WEIGHTS).stat().st_size // 600_000)
    assert len(hub.log.of("commit")) == 1


def test_a_concurrent_commit(hub: Hub, push, folder: Path) -> None:
    hub.repository("ada/birds", {"README.md": b"# Mine\n"})
    hub.fail("commit", 412)
    done = push(folder, "birds", "--no-verify")
    assert done.exit_code == 0, done.stderr
    assert [record.status for record in hub.log.of("commit")] == [412, 200]
    hub.fail("commit", 412, times=None)
    (folder / "recipe.yaml").write_text("name: another\n")
    failed = push(folder, "birds")
    assert failed.exit_code == 1
    assert "other commits to 'ada/birds' keep interfering" in failed.stderr.splitlines()[-1]


def test_uploads_continue_where_they_stopped(hub: Hub, push, refused, folder: Path) -> None:
    hub.fail("commit", 503, times=None)
    line = refused(folder, "birds")
    assert "the Hub could not be reached for 'ada/birds': it is busy or has a fault (503); try again later" in line
    assert not whole(hub, folder)
    uploads = len(hub.log.of("upload"))
    hub.faults.clear()
    assert push(folder, "birds").exit_code == 0
    assert len(hub.log.of("upload")) == uploads, "nothing is sent twice"
    assert whole(hub, folder)


@pytest.mark.parametrize("reset", [True, False])
def test_an_upload_that_keeps_failing(hub: Hub, push, refused, folder: Path, reset: bool) -> None:
    hub.cut("upload", after=100_000, sending=True, reset=reset, times=None)
    assert "no connection" in refused(folder, "birds")
    assert not whole(hub, folder)
    hub.faults.clear()
    assert push(folder, "birds").exit_code == 0
    assert whole(hub, folder)


def test_a_hub_that_asks_to_wait_too_long(hub: Hub, refused, folder: Path) -> None:
    for route in ("whoami", "preupload", "commit"):
        hub.faults.clear()
        hub.fail(route, 429, retry_after=3600, times=None)
        hub.log.clear()
        assert "too many requests (429)" in refused(folder, "birds")
        assert len(hub.log.of(route)) == 1
    assert not whole(hub, folder)


_ROUTES = ("whoami", "info", "create_repo", "preupload", "lfs_batch", "upload", "commit")
_ANSWERS = {
    400: "try again later",
    401: "log in again",
    404: "is the name right?",
    409: "try again later",
    413: "it takes no files of this size",
    507: "there is no room left",
}


@pytest.mark.parametrize("status", [*_ANSWERS])
def test_what_an_answer_asks_for(hub: Hub, refused, folder: Path, status: int) -> None:
    for route in ("create_repo", "lfs_batch", "upload", "commit"):
        hub.faults.clear()
        hub.fail(route, status, times=None)
        line = refused(folder, "birds")
        assert _ANSWERS[status] in line, (route, line)
        assert "is the name right?" not in line or status == 404
        assert not whole(hub, folder)


def test_a_network_that_asks_for_a_login(hub: Hub, refused, push, folder: Path) -> None:
    for route in _ROUTES:
        hub.faults.clear()
        hub.inject(Fault(route, page=True, times=None))
        line = refused(folder, "birds")
        if route == "upload":  # the storage's own answer to a file is empty, so that its absence shows only later
            assert "is not here in full" in line
        else:
            assert "is not the Hub; if this network asks you to log in, do so" in line, route
        assert not whole(hub, folder)
    hub.faults.clear()
    assert push(folder, "birds").exit_code == 0
    assert whole(hub, folder)


def test_an_unreachable_hub_is_reported(hub: Hub, refused, folder: Path) -> None:
    with hub.down():
        line = refused(folder, "birds")
    assert line.startswith("the Hub could not be reached for 'birds': no connection")
    assert line.endswith("try again later")


def test_tokens_and_rights(hub: Hub, refused, folder: Path, monkeypatch) -> None:
    none = refused(folder, "birds", HF_TOKEN=None)
    assert none == ("pushing to 'birds' needs a token; log in (hf auth login), set HF_TOKEN, or give --token")
    assert refused(folder, "birds", HF_TOKEN="hf_wrong").startswith("the Hub does not accept the token; log in again")
    assert "is read-only; create one with write access" in refused(folder, "birds", HF_TOKEN="hf_ada_read")
    assert "'ada' may not write to 'bob'; push to one of ada" in refused(folder, "bob/birds")
    assert "is not a valid repository name" in refused(folder, "a/b/c")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "unset HF_HUB_OFFLINE" in refused(folder, "birds")
    hub.repository("ada/open", {"config.json": b"{}"})
    assert "already exists and is public" in refused(folder, "open", "--private")
    hub.fail("commit", 403, times=None)
    forbidden = refused(folder, "birds")
    assert forbidden.startswith("the Hub denies access to 'ada/birds'")
    assert "hf_" not in forbidden
    assert not whole(hub, folder)


def test_a_failed_verification_is_reported(hub: Hub, refused, folder: Path) -> None:
    hub.fail("download", 404, times=None)
    line = refused(folder, "birds")
    assert line.startswith("'ada/birds' has the commit ")
    assert "could not be verified" in line
    assert whole(hub, folder)
    hub.faults.clear()


def test_files_that_arrived_differently_are_found(hub: Hub, refused, push, folder: Path) -> None:
    push(folder, "birds", "--no-verify")
    repository = hub.repository("ada/birds")
    stored = repository.content_of(repository.resolve("main").files[WEIGHTS])
    stored.write_bytes(bytes(stored.stat().st_size))
    assert "but its model.safetensors differs from the local one" in refused(folder, "birds")


def test_an_invalid_patience_gives_one_line(hub: Hub, refused, folder: Path) -> None:
    line = refused(folder, "birds", HF_RETARGET_HUB_PATIENCE="long")
    assert line == "HF_RETARGET_HUB_PATIENCE is 'long'; give a number of seconds"


def test_an_interrupted_push_publishes_nothing_and_continues(hub: Hub, push, folder: Path) -> None:
    hub.slow("upload", 2)
    environment = hub.client(token="hf_ada_write").environment
    command = [sys.executable, "-m", "hf_retarget", "push", str(folder), "birds"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) as running:
        while not hub.log.of("lfs_batch") and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        text, errors = running.communicate(timeout=60)
    assert (running.returncode, text) == (130, "")
    assert errors.endswith("interrupted; the same command continues without sending uploaded files again\n")
    assert not whole(hub, folder)
    assert push(folder, "birds").exit_code == 0
    assert whole(hub, folder)
