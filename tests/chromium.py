"""A real Chromium without a window, driven over a pipe by its DevTools protocol: no driver, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60  # seconds for one answer: only a browser that hangs takes that long


class Page:
    """One page, and all that it logged and asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._browser.wait(self, "Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def print(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    @property
    def requests(self) -> list[str]:
        """What it asked for, but for itself and what it holds."""
        urls = [
            each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on its console."""
        bad = ("error", "warning", "assert")
        found = [each["params"] for each in self.events if each["method"] == "Runtime.exceptionThrown"]
        found += [
            each["params"]
            for each in self.events
            if each["method"] == "Runtime.consoleAPICalled" and each["params"]["type"] in bad
        ]
        found += [
            each["params"]
            for each in self.events
            if each["method"] == "Log.entryAdded" and each["params"]["entry"]["level"] in bad
        ]
        return [json.dumps(each)[:500] for each in found]


class Browser:
    """A running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int, writes: int) -> None:
        self._process, self._reads, self._writes = process, reads, writes
        self._rest, self._number = b"", 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page.__new__(Page)
        self._pages[session] = page
        page.__init__(self, session)  # type: ignore[misc]  # known before it makes its first call
        return page

    def call(self, method: str, parameters: dict[str, Any], page: Page | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if page is not None:
            message["sessionId"] = page._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._until(lambda each: each.get("id") == number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def wait(self, page: Page, event: str) -> None:
        if not any(each["method"] == event for each in page.events):
            self._until(lambda each: each.get("method") == event and each.get("sessionId") == page._session)

    def _until(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(line)
                if "method" in message and message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].events.append(message)
                if wanted(message):
                    return message
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._reads, 1 << 20) if ready else b""
            assert chunk, "Chromium does not answer"
            self._rest += chunk


@contextmanager
def browse(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a fresh profile in `folder`; it ends with the block."""
    assert PROGRAM, "there is no Chromium"
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4; a shell puts the pipes there.
    command = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]  # fmt: skip
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, ours_in, ours_out)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
