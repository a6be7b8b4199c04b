"""Everything that commands write and print: no token, no path of the machine, no markup or escape of a stranger."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from chromium import PROGRAM, browse
from machine import Machine
from PIL import Image
from tiny_lm import save_trio

from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.untrusted import CONTROL

CLASSES = ("<img src=x onerror='window.hacked = 1'>", "\x1b[2J\x9b31m\u202etac", '"><svg onload=window.hacked=1> $x_$')
NAMES = ("<script>window.hacked = 1<", "\x1b]0;x\x07\u2066new", "'); window.hacked = 1; ('")
SHORT = ("--steps", "2", "--batch-size", "8", "--grad-batches", "1", "--bn-batches", "1", "--seed", "0")
TOKEN = "hf_ada_write"


class Made:
    """What the commands of a session have written and printed."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.place = machine, machine.root / "elsewhere" / "private"
        self.printed: list[str] = []
        self.place.mkdir()
        photos = self.place / "photos"
        for split, count in (("train", 12), ("test", 4)):
            for number, name in enumerate(CLASSES):
                (photos / split / name).mkdir(parents=True)
                for each in range(count):
                    Image.new("L", (28, 28), 20 * each + 5 * number).save(photos / split / name / f"{each}{name}.png")
        (photos / "train" / CLASSES[0] / "broken.png").write_bytes(b"broken")
        sides = {}
        for seed, name in enumerate(NAMES):
            torch.manual_seed(seed)
            net = timm.create_model("test_resnet", num_classes=len(CLASSES), in_chans=1)
            sides[name] = save_model(self.place / name, net.state_dict(), load_checkpoint(net), labels=CLASSES)
        old, tuned, new = sides.values()
        data = ("--data", photos, "--data-image-size", "28")
        trio = ("--src-base", old, "--src-ft", tuned, "--new-base", new)
        self.run("finetune", old, *data, "--steps", "2", "--batch-size", "8", "--record", "1", "--out", "tuned")
        port = ("port", *trio, *data, *SHORT, "--control", "full", "--samples", "6")
        self.run(*port, "--method", "fgmt", "--out", "ported")
        self.run(*port, "--method", "naive", "--save-as", "model", "--out", "naive")
        self.run("compare", "ported", "naive", "--html", "compared.html", "--csv", "compared.csv", "--json")
        self.run("compare", "ported", "naive")
        self.run(
            "plane",
            "--models",
            f"\u202e<script>x\x1b[31m={old}",
            new,
            *data,
            "--grid",
            "3",
            "--limit",
            "6",
            "--report",
            "ported",
        )
        self.run("plane", "--models", old, new, *data, "--grid", "2", "--limit", "6", "--out", "line")
        self.run("check", "ported")
        self.run("evaluate", tuned, *data)
        self.run("inspect", "ported", "--html", "graph.html", "--svg", "graph.svg")
        for name in ("tuned", "ported"):
            self.run("push", name, f"ada/{name}")
            self.fetch(f"ada/{name}")
        texts = []
        for name, (side, path) in zip(NAMES, save_trio(self.place / "lm").items(), strict=True):
            texts += [f"--{side.replace('_', '-')}", shutil.move(path, self.place / f"lm{name}")]
        (self.place / f"{NAMES[0]}.txt").write_text(f"the law of the land {TOKEN}\n" * 20)
        self.run("port", *texts, "--data", "none", "--text", self.place / f"{NAMES[0]}.txt", "--out", "streamed")

    def run(self, *arguments: object) -> None:
        ports = [server.port for server in self.machine.hub._servers]
        done = self.machine.forks.run(arguments, self.machine.work, ports)
        assert (done["code"], done["forbidden"]) == (0, []), done["err"]
        self.printed += [done["out"], done["err"]]

    def fetch(self, repository: str) -> None:
        found = self.machine.hub.repository(repository)
        for name in found.paths():
            path = self.machine.work / "pushed" / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found.read(name))

    @property
    def files(self) -> list[Path]:
        return [path for path in sorted(self.machine.work.rglob("*")) if path.is_file()]

    @property
    def texts(self) -> dict[Path, str]:
        kinds = (".json", ".md", ".html", ".svg", ".csv", ".yaml", ".txt")
        return {path: path.read_text(encoding="utf-8") for path in self.files if path.suffix in kinds}


@pytest.mark.timeout(900)
def test_all_that_is_written_and_printed(machine: Machine, tmp_path: Path):
    """One test, since its commands take half a minute."""
    try:
        made = Made(machine)
        check_secrets(made)
        check_escapes(made)
        check_markup(made)
        if PROGRAM is not None:  # Debian: apt install chromium
            check_pages(made, tmp_path)
    finally:
        for folder in (machine.work, machine.root / "elsewhere"):
            shutil.rmtree(folder)
            folder.mkdir()


def check_secrets(made: Made) -> None:
    """No file has the token or a path of the machine, and no message the token."""
    assert {path.suffix for path in made.files} >= {".json", ".md", ".html", ".png", ".csv", ".yaml", ".safetensors"}
    for path in made.files:
        content = path.read_bytes()
        for secret in (TOKEN, str(made.machine.root), made.machine.root.name, "private"):
            assert secret.encode() not in content, f"'{secret}' is in {path.relative_to(made.machine.work)}"
    assert not any(TOKEN in text for text in made.printed)


def check_escapes(made: Made) -> None:
    """No text has a control character or a mark that turns the direction."""
    for path, text in made.texts.items():
        found = CONTROL.search(text)
        assert found is None, f"{found[0]!a} in {path.name}: {text[max(0, found.start() - 80) : found.end() + 40]!a}"
    for text in made.printed:
        found = CONTROL.search(text.replace("\r", ""))
        assert found is None, f"{found[0]!a}: {text[max(0, found.start() - 80) : found.end() + 40]!a}"


class Reader(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check_markup(made: Made) -> None:
    """Names are text, never elements or attributes."""
    pages = [path for path in made.texts if path.suffix in (".html", ".svg", ".md")]
    assert len(pages) > 20
    for path in pages:
        text = made.texts[path]
        if path.suffix == ".md":  # in code, it is text
            text = "".join(text.split("```")[::2])
        for tag, attributes in Reader(text).tags:
            assert not any(name.startswith("on") for name in attributes), (path, tag, attributes)
            assert "hacked" not in str(attributes.get("href")), path
            assert tag != "img" or str(attributes["src"]).startswith(("data:", "figures/", "plane/")), (
                path,
                attributes,
            )
        assert "<script>window" not in text, path
    assert any("&lt;img src=x" in text for text in made.texts.values()), "the names are there, as text"
    for name in ("ported/port.json", "naive/port.json", "tuned/finetune.json"):
        assert json.loads((made.machine.work / name).read_text())


def check_pages(made: Made, tmp_path: Path) -> None:
    """In a real browser, no page runs what a name says, complains, or asks for anything."""
    pages = [path for path in made.files if path.suffix in (".html", ".svg")]
    assert {path.name for path in pages} >= {"report.html", "plane.html", "compared.html", "graph.html", "graph.svg"}
    with browse(tmp_path) as browser:
        page = browser.page()
        for path in pages:
            page.events.clear()
            page.open(path)
            assert page.run("window.hacked") is None, path
            assert (page.complaints, page.requests) == ([], []), path
