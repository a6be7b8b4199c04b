"""A process whose Hugging Face libraries talk to a loopback Hub: they read its address once, when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

# What `Client.ask` puts before the code it is given.
PRELUDE = """
import json, sys
from huggingface_hub import CommitOperationAdd as Add, CommitOperationCopy as Copy, CommitOperationDelete as Delete
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

api = HfApi()

def answer(value):
    print(json.dumps(value))

def failure(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
"""

# What would lead a client past this Hub, to its user's own cache, or to no Hub at all.
_FOREIGN = ("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TRANSFORMERS_", "http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Client:
    """How to run a process against the Hub: with which token, and where it keeps its cache."""

    endpoint: str
    home: Path
    token: str | None = field(default=None, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """For `subprocess.run(…, env=…)`: this process's environment with the Hub in it, and plain LFS, no Xet."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN + tuple(map(str.upper, _FOREIGN)))
        }
        token = {} if self.token is None else {"HF_TOKEN": self.token}
        return {
            **kept,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            **token,
            **self.settings,
        }

    def run(self, *command: str | Path, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command; what it printed and its exit status come back, whatever they are."""
        settings: dict[str, Any] = {"env": self.environment, "capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run([str(part) for part in command], check=False, **settings | options)

    def python(self, code: str, *arguments: str | Path, timeout: float = 120) -> Any:
        """Run code that ends by printing JSON, and give that back; `sys.argv[1:]` are the arguments."""
        done = self.run(sys.executable, "-c", dedent(code), *arguments, timeout=timeout)
        if done.returncode != 0:
            raise AssertionError(f"The client failed with {done.returncode}:\n{done.stderr}\n{done.stdout}")
        return json.loads(done.stdout.splitlines()[-1])

    def ask(self, code: str, *arguments: str | Path, timeout: float = 120) -> Any:
        """Like `python`, with `api`, `hf_hub_download`, `Add` and so on at hand; `answer(value)` gives a value back.

        `failure(call, …)` makes the call and words the error it ends in, or is None.
        """
        return self.python(PRELUDE + dedent(code), *arguments, timeout=timeout)
