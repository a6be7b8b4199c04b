"""The Hub for tests, asked by the real client: what is pushed comes back, revision by revision."""

from __future__ import annotations

import hashlib
import http.client
from pathlib import Path
from urllib.parse import urlsplit

from loopback_hub import Client, Hub

WEIGHTS = bytes(range(256)) * 2000  # 512 kB


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_folder_comes_back_as_it_was_pushed(hub: Hub, ada: Client, anonymous: Client, folder: Path) -> None:
    pushed = ada.ask(
        """
        url = api.create_repo("ada/vit")
        api.create_repo("ada/vit", exist_ok=True)
        made = api.upload_folder(repo_id="ada/vit", folder_path=sys.argv[1], commit_message="All of it")
        again = api.upload_folder(repo_id="ada/vit", folder_path=sys.argv[1])
        answer([url.repo_id, made.oid, again.oid, failure(api.create_repo, "ada/vit")])
        """,
        folder,
    )
    assert pushed[0] == "ada/vit"
    assert pushed[1] == pushed[2], "nothing had changed, so there is no second commit"
    assert "409" in pushed[3]
    repository = hub.repository("ada/vit")
    assert [commit.title for commit in repository.history()] == ["All of it", "initial commit"]
    assert repository.resolve("main").files["model.safetensors"].lfs == sha256(WEIGHTS)
    assert repository.resolve("main").files["sub/notes.txt"].lfs is None

    got = anonymous.ask(
        """
        import pathlib
        snapshot = pathlib.Path(snapshot_download("ada/vit"))
        one = hf_hub_download("ada/vit", "sub/notes.txt", revision=sys.argv[2])
        files = {p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()}
        pushed = pathlib.Path(sys.argv[1])
        same = [(snapshot / each).read_bytes() == (pushed / each).read_bytes() for each in files - {".gitattributes"}]
        answer([sorted(files), all(same), snapshot.name, one])
        """,
        folder,
        pushed[1],
    )
    assert got[0] == [".gitattributes", "README.md", "empty.bin", "model.safetensors", "sub/notes.txt"]
    assert got[1]
    assert got[2] == pushed[1]
    assert pushed[1] in got[3]
    assert len(hub.log.of("upload")) == 1
    assert not any(record.authorised for record in [*hub.log.of("upload"), *hub.log.of("download")])


def test_large_files_go_in_parts_and_only_once(hub: Hub, ada: Client, folder: Path) -> None:
    hub.multipart_from, hub.part_size = 300_000, 100_000
    ada.ask(
        """
        api.create_repo("ada/vit")
        api.upload_file(repo_id="ada/vit", path_or_fileobj=sys.argv[1], path_in_repo="a/model.safetensors")
        api.upload_file(repo_id="ada/vit", path_or_fileobj=sys.argv[1], path_in_repo="b/model.safetensors")
        answer(None)
        """,
        folder / "model.safetensors",
    )
    assert [record.received for record in hub.log.of("upload_part")] == [100_000] * 5 + [12_000]
    assert len(hub.log.of("lfs_complete")) == len(hub.log.of("lfs_verify")) == 1
    repository = hub.repository("ada/vit")
    assert repository.read("a/model.safetensors") == repository.read("b/model.safetensors") == WEIGHTS
    assert not list(repository.folder.glob("uploads/*"))


def test_the_storage_keeps_only_what_was_announced(hub: Hub) -> None:
    hub.repository("ada/vit")
    path = f"/models/ada/vit/lfs/{sha256(b'announced')}"
    signed = hub.signed("", path)
    connection = http.client.HTTPConnection(urlsplit(hub.storage_endpoint).netloc, timeout=10)
    for address, body, token, status in (
        (path, b"announced", None, 403),
        (signed, b"another", None, 400),
        (signed, b"announced", "Bearer hf_ada_write", 400),
        (signed, b"announced", None, 200),
    ):
        connection.request("PUT", address, body, headers={"Authorization": token} if token else {})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
        assert hub.repository("ada/vit").lfs_file(sha256(b"announced")).exists() is (status == 200)


def test_commits_delete_copy_and_refuse_a_stale_parent(hub: Hub, ada: Client) -> None:
    first = hub.repository("ada/vit", {"old/a": b"a", "old/b": b"b", "c": b"c", "m.bin": WEIGHTS}).refs[
        "refs/heads/main"
    ]
    found = ada.ask(
        """
        operations = [Delete("old/", is_folder=True), Delete("c"), Copy("m.bin", "n.bin"), Add("new", b"new")]
        second = api.create_commit("ada/vit", operations, commit_message="two", parent_commit=sys.argv[1])
        stale = failure(api.create_commit, "ada/vit", [Add("x", b"x")], commit_message="3", parent_commit=sys.argv[1])
        missing = failure(api.create_commit, "ada/vit", [Delete("c"), Add("y", b"y")], commit_message="4")
        answer([second.oid, stale, missing, [c.title for c in api.list_repo_commits("ada/vit")]])
        """,
        first,
    )
    repository = hub.repository("ada/vit")
    assert repository.refs["refs/heads/main"] == found[0]
    assert repository.paths() == ["m.bin", "n.bin", "new"]
    assert "412" in found[1]
    assert found[2].startswith("RemoteEntryNotFoundError")
    assert found[3] == ["two", "Write files", "initial commit"]


def test_a_readme_the_hub_would_refuse_is_refused_before_anything_is_sent(hub: Hub, ada: Client) -> None:
    hub.repository("ada/vit")
    card = "---\\nlicense: my-own\\nmodel-index: [{name: vit, results: [{task: {}}]}]\\n---\\n"
    error = ada.ask(
        f'answer(failure(api.upload_file, repo_id="ada/vit", path_or_fileobj=b"{card}", path_in_repo="README.md"))'
    )
    assert error.startswith("ValueError: Invalid metadata in README.md")
    assert "license" in error
    assert "task.type" in error
    assert hub.repository("ada/vit").paths() == []


def test_branches_tags_and_pull_requests(hub: Hub, ada: Client, bob: Client) -> None:
    hub.repository("ada/vit", {"config.json": b"{}"})
    opened = bob.ask(
        """
        refused = failure(api.create_commit, "ada/vit", [Add("b", b"bob")], commit_message="mine")
        made = api.create_commit("ada/vit", [Add("b", b"bob")], commit_message="A proposal", create_pr=True)
        api.create_commit("ada/vit", [Add("m.bin", bytes(9))], commit_message="More of it", revision="refs/pr/1")
        answer([refused, made.pr_num, made.pr_revision, hf_hub_download("ada/vit", "b", revision="refs/pr/1")])
        """,
    )
    assert "403" in opened[0]
    assert opened[1:3] == [1, "refs/pr/1"]
    assert Path(opened[3]).read_text() == "bob"
    assert hub.repository("ada/vit").paths() == ["config.json"]
    found = ada.ask(
        """
        api.create_branch("ada/vit", branch="feature/ä")
        api.create_commit("ada/vit", [Add("f", b"f")], commit_message="f", revision="feature/ä")
        api.create_tag("ada/vit", tag="v1", revision="feature/ä")
        before = [(d.title, d.status, d.author) for d in api.get_repo_discussions("ada/vit")]
        api.merge_pull_request("ada/vit", 1)
        details = api.get_discussion_details("ada/vit", 1)
        refs = api.list_repo_refs("ada/vit", include_pull_requests=True)
        tagged = open(hf_hub_download("ada/vit", "f", revision="v1")).read()
        twice = failure(api.create_branch, "ada/vit", branch="feature/ä")
        api.delete_branch("ada/vit", branch="feature/ä")
        gone = failure(hf_hub_download, "ada/vit", "f", revision="feature/ä")
        answer([before, details.status, [e.summary for e in details.events], [b.name for b in refs.branches],
                [t.name for t in refs.tags], len(refs.pull_requests), tagged, twice, gone,
                failure(api.delete_branch, "ada/vit", branch="main")])
        """,
    )
    assert found[0] == [["A proposal", "open", "bob"]]
    assert found[1:7] == ["merged", ["A proposal", "More of it"], ["feature/ä", "main"], ["v1"], 1, "f"]
    assert "409" in found[7]
    assert found[8].startswith("RevisionNotFoundError")
    assert "403" in found[9]
    assert hub.repository("ada/vit").paths() == ["b", "config.json", "m.bin"]


def test_what_is_not_there_is_named_for_what_it_is(hub: Hub, ada: Client) -> None:
    hub.repository("ada/vit", {"config.json": b"{}"})
    errors = ada.ask(
        """
        answer([failure(hf_hub_download, "ada/vit", "nothing"),
                failure(hf_hub_download, "ada/vit", "config.json", revision="no"),
                failure(hf_hub_download, "ada/other", "config.json"), failure(api.model_info, "single"),
                failure(api.list_repo_files, "ada/vit", revision="no"), api.file_exists("ada/vit", "nothing")])
        """,
    )
    names = [error.split(":")[0] for error in errors[:-1]]
    assert names == [
        "RemoteEntryNotFoundError",
        "RevisionNotFoundError",
        "RepositoryNotFoundError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
    ]
    assert errors[-1] is False
    assert list(ada.home.rglob(".no_exist/*/nothing")), "the client remembers this only with X-Repo-Commit"
