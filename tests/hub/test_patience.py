"""How long the Hub is asked again, and what its refusals are called."""

from __future__ import annotations

import time

import huggingface_hub
import pytest
import timm
from huggingface_hub import HfApi, hf_hub_download
from loopback_hub import Fault, Hub

from hf_retarget.errors import ModelError, RetargetError
from hf_retarget.hub import PATIENCE, GaveUp, ask, explain, explained
from hf_retarget.models import load_checkpoint, save_model


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of sleeping, write down for how long."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def test_a_call_that_the_client_makes_once_is_made_again(connected: Hub, pauses: list[float]) -> None:
    connected.fail("whoami", 503, times=2)
    connected.fail("whoami", 429, retry_after=2)
    assert ask(HfApi().whoami)["name"] == "ada"
    assert pauses == [0.5, 1.0, 2.0], "growing, or as the Hub asks"


def test_it_ends(connected: Hub, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    connected.fail("whoami", 500, times=None)
    with pytest.raises(GaveUp, match=r"busy or has a fault \(500\)"):
        ask(HfApi().whoami)
    assert sum(pauses) <= 4
    monkeypatch.setenv("HF_RETARGET_HUB_PATIENCE", "1000")
    pauses.clear()
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        ask(HfApi().whoami)
    assert pauses == [0.5, 1, 2, 4, 8]


def test_what_is_no_trouble_is_not_repeated(connected: Hub, pauses: list[float]) -> None:
    for status in (400, 403, 404, 409):
        connected.fail("whoami", status)
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
            ask(HfApi().whoami)
    assert pauses == []
    with pytest.raises(ZeroDivisionError):
        ask(lambda: 1 / 0)


def test_an_answer_that_never_comes_has_a_time_limit(connected: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_RETARGET_HUB_PATIENCE", "0")
    monkeypatch.setattr("hf_retarget.hub._ANSWER", 0.2)
    connected.slow("whoami", 1)
    with pytest.raises(GaveUp, match="no connection"):
        ask(HfApi().whoami)


def test_outside_of_ask_the_client_is_as_it_was(connected: Hub, pauses: list[float]) -> None:
    connected.repository("ada/net", {"config.json": b"{}"})
    ask(HfApi().whoami)
    connected.fail("resolve", 429, method="GET", retry_after=3600)
    hf_hub_download("ada/net", "config.json")
    assert pauses == [3601], "nobody cut it short"


def test_a_factory_of_the_user_is_kept() -> None:
    import subprocess
    import sys

    code = """
import huggingface_hub
from huggingface_hub.utils._http import default_client_factory
made = []
def mine():
    made.append(1)
    return default_client_factory()
huggingface_hub.set_client_factory(mine)
from hf_retarget.hub import ask
ask(lambda: huggingface_hub.get_session())
print(len(made))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_words(connected: Hub) -> None:
    connected.repository("ada/gated", {"config.json": b"{}"}, gated=True)
    connected.add_user("bob")
    calls = {
        "is gated: accept its terms": lambda: hf_hub_download("ada/gated", "config.json", token="hf_bob_write"),
        "there is no model 'ada/gated'": lambda: HfApi().model_info("ada/none"),
        "has no revision 'v9'": lambda: HfApi().model_info("ada/gated", revision="v9"),
        "does not accept the token": lambda: HfApi(token="hf_wrong").model_info("ada/gated"),
        "the Hub answered 418 for 'ada/gated': A fault that was asked for": lambda: HfApi().list_repo_refs("ada/gated"),
    }
    connected.inject(Fault("refs", status=418))
    for words, call in calls.items():
        with pytest.raises(ModelError) as caught, explained(ModelError, "ada/gated", "v9"):
            ask(call)
        assert words in str(caught.value)
        assert "hf_" not in str(caught.value)
    assert explain(ValueError("no"), "ada/x") is None
    with pytest.raises(RetargetError, match="unchanged"), explained(ModelError, "ada/x"):
        raise RetargetError("unchanged")


def test_a_person_is_told_once_of_each_attempt(connected: Hub, pauses: list[float], caplog, tmp_path) -> None:
    connected.repository("ada/vit", {"config.json": b"{}"})
    connected.fail("resolve", 503, times=2)
    ask(lambda: hf_hub_download("ada/vit", "config.json", cache_dir=tmp_path))
    assert pauses, "the client itself asked again"
    assert [each.name for each in caplog.records if each.name.startswith("huggingface_hub")] == []


@pytest.mark.parametrize("what", ["model", "data"])
def test_a_mistyped_folder_without_a_connection_is_an_error_at_once(what: str, tmp_path) -> None:
    import os
    import subprocess
    import sys

    save_model(tmp_path / "net", (net := timm.create_model("test_resnet")).state_dict(), load_checkpoint(net))
    model, data = ("nosuch/dir", "fashion-mnist") if what == "model" else (str(tmp_path / "net"), "nosuch/dir")
    command = [sys.executable, "-m", "hf_retarget", "evaluate", model, "--data", data]
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", PATIENCE)}
    environment = {**kept, "HF_ENDPOINT": "http://nosuch.invalid", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.count("trying again") <= 1
    message = done.stderr.splitlines()[-1]
    assert "'nosuch/dir'" in message
    assert ("There is no folder" if what == "model" else "nor is it a local file or folder") in message
