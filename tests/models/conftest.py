"""Pico checkpoints on disk, and a Hub of a few routes on this machine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def saved(folder: Path, name: str = "test_resnet", *, seed: int = 0, half: bool = False, **options: Any) -> Path:
    """A model of timm with random weights, saved by timm itself."""
    torch.manual_seed(seed)
    labels = options.pop("labels", None)
    model = timm.create_model(name, **options)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()  # type: ignore[union-attr]
    arguments = {key: value for key, value in options.items() if key != "num_classes"}
    save_for_hf(
        model.half() if half else model,
        folder,
        model_config={"label_names": labels} if labels else None,
        model_args=arguments or None,
        safe_serialization=True,
    )
    return folder


class FileHub:
    """What the Hub answers for files: content, not found, or a code of its own. Keeps a list of what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.refuse: str | None = None
        self.asked: list[str] = []
        self.commit = COMMIT

    def add(self, repository: str, folder: Path) -> None:
        for path in folder.iterdir():
            self.files[f"{repository}/{path.name}"] = path.read_bytes()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        repository, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self.refuse:
            return 403, {"X-Error-Code": self.refuse}, b""
        if not any(each.startswith(f"{repository}/") for each in self.files):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in ("main", "v1", self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        content = self.files.get(f"{repository}/{name}")
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}, b""
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit}, content


@pytest.fixture
def file_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileHub]:
    served = FileHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = served.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield served
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def save() -> Any:
    return saved
