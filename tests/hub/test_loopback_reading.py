"""What the Hub for tests says of its repositories, to whom, and which parts of files it gives."""

from __future__ import annotations

import hashlib
import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from loopback_hub import Client, Hub

WEIGHTS = bytes(range(256)) * 2000  # 512 kB


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def raw(origin: str, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_trees_come_in_pages(hub: Hub, anonymous: Client) -> None:
    hub.repository("ada/vit", {f"d{n // 3}/f{n}": b"%d" % n for n in range(9)} | {"top": b"t"})
    hub.page_size = 4
    found = anonymous.ask(
        """
        everything = sorted(f.path for f in api.list_repo_tree("ada/vit", recursive=True))
        flat = sorted(f.path for f in api.list_repo_tree("ada/vit", expand=True))
        inside = [(f.path, f.size, f.last_commit.title) for f in api.list_repo_tree("ada/vit", "d1", expand=True)]
        some = [(f.path, type(f).__name__) for f in api.get_paths_info("ada/vit", ["top", "d2", "none"])]
        answer([everything, flat, inside, some, failure(lambda: list(api.list_repo_tree("ada/vit", "d7")))])
        """,
    )
    assert len(found[0]) == len({*found[0]}) == 9 + 3 + 2
    assert found[1] == [".gitattributes", "d0", "d1", "d2", "top"]
    assert found[2] == [[f"d1/f{n}", 1, "Write files"] for n in (3, 4, 5)]
    assert found[3] == [["top", "RepoFile"], ["d2", "RepoFolder"]]
    assert found[4].startswith("RemoteEntryNotFoundError")
    assert any("cursor=" in record.path for record in hub.log.of("tree"))


def test_models_are_found_by_author_and_lineage(hub: Hub, anonymous: Client, ada: Client) -> None:
    card = b"---\nlicense: mit\nlibrary_name: timm\nbase_model: ada/base\nbase_model_relation: finetune\n---\n"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(24)
    hub.repository("ada/base", {"model.safetensors": weights})
    hub.repository("ada/tuned", {"README.md": card})
    hub.repository("ada/secret", {"README.md": card}, private=True)
    hub.repository("bob/other", {"README.md": b"no metadata"})
    code = """
    info = api.model_info("ada/tuned", files_metadata=True)
    answer([[m.id for m in api.list_models(author="ada")],
            [m.id for m in api.list_models(filter="base_model:finetune:ada/base")],
            info.card_data.license, info.library_name, {s.rfilename: s.size for s in info.siblings}["README.md"],
            api.model_info("ada/base").safetensors.total, vars(api.model_info("ada/base", expand=["sha"]))["siblings"]])
    """
    found = anonymous.ask(code)
    assert found == [["ada/base", "ada/tuned"], ["ada/tuned"], "mit", "timm", len(card), 6, None]
    assert ada.ask(code)[0] == ["ada/base", "ada/secret", "ada/tuned"]


def test_private_repositories_are_hidden_and_tokens_have_rights(hub: Hub, anonymous: Client, tmp_path: Path) -> None:
    hub.repository("ada/secret", {"config.json": b"{}"}, private=True)
    hub.repository("ada/open", {"config.json": b"{}"})
    hub.add_user("bob")
    hub.add_user("eve", "ada-labs")
    tokens = ("", "hf_bob_write", "hf_ada_write", "hf_ada_read", "hf_nobody")
    nobody, bob, ada, reader, wrong, reads, invalid, eve = anonymous.ask(
        """
        def read(token):
            options = {"token": token or False, "cache_dir": f"{sys.argv[1]}/{token}"}
            return failure(hf_hub_download, "ada/secret", "config.json", **options)

        reader, eve, wrong = (HfApi(token=f"hf_{name}") for name in ("ada_read", "eve_write", "nobody"))
        reads = [failure(reader.create_repo, "ada/new"),
                 failure(reader.upload_file, repo_id="ada/open", path_or_fileobj=b"x", path_in_repo="x"),
                 failure(reader.create_branch, "ada/open", branch="b"), failure(reader.delete_repo, "ada/open")]
        organisations = [each["name"] for each in eve.whoami()["orgs"]]
        eve.create_repo("ada-labs/x", private=True)
        made = eve.model_info("ada-labs/x")
        eve.update_repo_settings("ada-labs/x", private=False, gated="auto")
        changed = eve.model_info("ada-labs/x")
        eve.delete_repo("ada-labs/x")
        ends = [organisations, made.private, changed.private, changed.gated, eve.repo_exists("ada-labs/x")]
        answer([*map(read, sys.argv[2:]), reads, failure(wrong.whoami), [*ends, failure(eve.create_repo, "ada/x")]])
        """,
        tmp_path / "caches",
        *tokens,
    )
    assert nobody.startswith("RepositoryNotFoundError: 401")
    assert bob.startswith("RepositoryNotFoundError: 404")
    assert ada is reader is None
    assert "401" in wrong
    assert "Invalid user token" in invalid
    assert all("403" in error for error in reads)
    assert eve[:5] == [["ada-labs"], True, False, "auto", False]
    assert "403" in eve[5]


def test_gated_repositories_open_to_those_who_were_let_in(hub: Hub, anonymous: Client, tmp_path: Path) -> None:
    repository = hub.repository("ada/gated", {"config.json": b"{}"}, gated=True)
    hub.add_user("bob")
    code = """
    def attempts(token):
        options = {"token": token or False, "cache_dir": f"{sys.argv[1]}/{token}"}
        download = failure(hf_hub_download, "ada/gated", "config.json", **options)
        return [download, failure(api.auth_check, "ada/gated", token=options["token"])]

    answer([api.model_info("ada/gated", token=False).gated, *map(attempts, ("", "hf_bob_write", "hf_ada_read"))])
    """
    gated, nobody, bob, ada = anonymous.ask(code, tmp_path)
    assert gated == "auto"
    assert [error.split(".")[0] for error in nobody] == ["GatedRepoError: 401 Client Error"] * 2
    assert [error.split(".")[0] for error in bob] == ["GatedRepoError: 403 Client Error"] * 2
    assert ada == [None, None]
    repository.grant("bob")
    _, nobody, bob, ada = anonymous.ask(code, tmp_path)
    assert all(nobody)
    assert bob == ada == [None, None]


def test_a_header_is_read_without_the_weights(hub: Hub, anonymous: Client) -> None:
    size = 4_000_000
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    hub.repository("ada/vit", {"model.safetensors": len(header).to_bytes(8, "little") + header + bytes(size)})
    found = anonymous.ask(
        'answer(api.get_safetensors_metadata("ada/vit").files_metadata["model.safetensors"].tensors["w"].shape)',
    )
    assert found == [size // 4]
    (record,) = hub.log.of("download", "GET")
    assert (record.status, record.range, record.sent) == (206, "bytes=0-100000", 100_001)


@pytest.mark.parametrize(
    ("wanted", "status", "content", "said"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-99", 206, b"56789", "bytes 5-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_ranges(hub: Hub, wanted: str, status: int, content: bytes, said: str | None) -> None:
    hub.repository("ada/vit", {"digits.txt": b"0123456789"})
    answer = raw(hub.endpoint, "GET", "/ada/vit/resolve/main/digits.txt", Range=wanted)
    assert (answer.status, answer.read(), answer.headers["Content-Range"]) == (status, content, said)


def test_a_head_tells_what_the_client_must_know(hub: Hub) -> None:
    commit = hub.repository("ada/vit", {"config.json": b"{}", "model.safetensors": WEIGHTS}).resolve("main")
    small = raw(hub.endpoint, "HEAD", "/ada/vit/resolve/main/config.json")
    assert (small.status, small.headers["Content-Length"], small.headers["X-Repo-Commit"]) == (200, "2", commit.oid)
    assert small.headers["ETag"] == f'"{commit.files["config.json"].oid}"'
    large = raw(hub.endpoint, "HEAD", "/ada/vit/resolve/main/model.safetensors")
    assert (large.status, large.headers["X-Linked-Size"]) == (302, str(len(WEIGHTS)))
    assert large.headers["X-Linked-Etag"] == f'"{sha256(WEIGHTS)}"'
    assert large.headers["Location"].startswith(hub.storage_endpoint)
