"""What goes wrong on purpose, and what the real client makes of it."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

from loopback_hub import Client, Hub

WEIGHTS = bytes(range(256)) * 2000  # 512 kB


def raw(origin: str, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_a_download_survives_a_busy_hub_and_a_cut_connection(hub: Hub, anonymous: Client) -> None:
    weights = WEIGHTS * 24  # 12 MB: the client goes on from the last whole 10 MB it has
    hub.repository("ada/vit", {"config.json": b"{}", "model.safetensors": weights})
    hub.fail("resolve", 503, method="HEAD", containing="config")
    hub.fail("resolve", 429, method="GET", containing="config", retry_after=0)
    hub.cut("download", after=11_000_000)
    paths = anonymous.ask('answer([hf_hub_download("ada/vit", name) for name in ("config.json", "model.safetensors")])')
    assert [Path(path).read_bytes() for path in paths] == [b"{}", weights]
    assert [record.status for record in hub.log.of("resolve") if "config" in record.path] == [503, 200, 429, 200]
    first, second = hub.log.of("download")
    assert (first.sent, first.fault) == (11_000_000, True)
    assert (second.status, second.range) == (206, f"bytes={10 << 20}-")


def test_an_upload_survives_a_busy_hub_and_a_cut_connection(hub: Hub, ada: Client, folder: Path) -> None:
    hub.repository("ada/vit")
    hub.fail("preupload", 500)
    hub.cut("upload", after=100_000, sending=True)
    ada.ask('answer(api.upload_folder(repo_id="ada/vit", folder_path=sys.argv[1]).oid)', folder)
    assert hub.repository("ada/vit").read("model.safetensors") == WEIGHTS
    assert [record.received for record in hub.log.of("upload")] == [100_000, len(WEIGHTS)]


def test_an_upload_in_parts_survives_them_too(hub: Hub, ada: Client, folder: Path) -> None:
    hub.multipart_from, hub.part_size = 300_000, 200_000
    hub.repository("ada/vit")
    hub.cut("upload_part", after=50_000, sending=True, skip=1)
    hub.lose_answer("lfs_complete")
    ada.ask('answer(api.upload_folder(repo_id="ada/vit", folder_path=sys.argv[1]).oid)', folder)
    assert hub.repository("ada/vit").read("model.safetensors") == WEIGHTS
    assert [record.received for record in hub.log.of("upload_part")] == [200_000, 50_000, 200_000, 112_000]
    assert [record.status for record in hub.log.of("lfs_complete")] == [0, 200]


def test_a_commit_that_fails_leaves_nothing_and_one_that_is_lost_has_landed(
    hub: Hub, ada: Client, folder: Path
) -> None:
    repository = hub.repository("ada/vit")
    push = """
    error = failure(api.upload_folder, repo_id="ada/vit", folder_path=sys.argv[1], commit_message="push")
    answer([error, api.list_repo_files("ada/vit")])
    """
    hub.fail("commit", 503)
    error, files = ada.ask(push, folder)
    assert "503" in error, "the client does not repeat a commit by itself"
    assert files == [".gitattributes"]
    hub.lose_answer("commit")
    error, files = ada.ask(push, folder)
    assert "Server disconnected" in error
    assert "model.safetensors" in files
    assert [commit.title for commit in repository.history()] == ["push", "initial commit"]
    assert len(hub.log.of("upload")) == 1, "what had arrived before the first failure is not sent again"


def test_slow_answers_and_resets(hub: Hub) -> None:
    hub.repository("ada/vit", {"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.slow("resolve", 2, method="HEAD", containing="config")
    hub.cut("download", after=100_000, reset=True)
    client = hub.client(HF_HUB_ETAG_TIMEOUT="1")
    slow, reset = client.ask(
        """
        slow = failure(api.file_exists, "ada/vit", "config.json")
        answer([slow, failure(hf_hub_download, "ada/vit", "model.safetensors")])
        """,
    )
    assert slow.startswith("ReadTimeout")
    assert reset.startswith("ReadError"), "an orderly end is resumed by the client, a reset is not"
    assert not list(client.home.rglob("*.incomplete"))


def test_faults_wait_for_their_turn(hub: Hub) -> None:
    hub.repository("ada/vit", {"config.json": b"{}"})
    hub.fail("info", 500, skip=1, times=2)
    hub.fail("info", 418, times=None, containing="vit")
    assert [raw(hub.endpoint, "GET", "/api/models/ada/vit").status for _ in range(4)] == [418, 500, 500, 418]
    hub.faults.clear()
    assert raw(hub.endpoint, "GET", "/api/models/ada/vit").status == 200
    assert [record.fault for record in hub.log.of("info")] == [True] * 4 + [False]


def test_offline_and_while_the_hub_is_down_the_cache_answers(hub: Hub) -> None:
    hub.repository("ada/vit", {"config.json": b"{}", "other": b"o"})
    online, offline = hub.client(), hub.client(HF_HUB_OFFLINE="1")
    get = 'cached = open(hf_hub_download("ada/vit", "config.json")).read()\n'
    assert online.ask(f"{get}answer(cached)") == "{}"
    hub.log.clear()
    cached, error = offline.ask(f'{get}answer([cached, failure(hf_hub_download, "ada/vit", "other")])')
    assert cached == "{}"
    assert error.startswith("LocalEntryNotFoundError")
    assert len(hub.log) == 0
    with hub.down():
        cached, error = online.ask(f'{get}answer([cached, failure(api.model_info, "ada/vit")])')
    assert cached == "{}"
    assert error.startswith("ConnectError"), "not an HfHubHTTPError"
    assert online.ask('answer(open(hf_hub_download("ada/vit", "other")).read())') == "o"
