"""Made-up port.json documents: small or large, complete or with missing parts, harmless or malicious."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, Page, browse
from PIL import Image

from hf_retarget.document import FORMAT, PortDocument, parse_document

Content = dict[str, Any]
"""Of port.json."""

EVIL = [
    "<script>window.hacked = 1</script>",
    "\"><img src=x onerror='window.hacked = 1'>",
    "'); window.hacked = 1; ('",
    "</svg></title></style><script>window.hacked = 1</script>",
    "{{ 7 * 7 }} {% raise %}",
    "$\\frac{1}{$ \x00\x07\x1b[31m \ud800",
    "\u202e\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u2066abc",
    "wide " + "W" * 4000,
    "javascript:window.hacked=1",
    "猫 🐈",
]


def _score(top1: float, classes: int, draw: random.Random, confusion: bool = False) -> Content:
    rows = [[0] * classes for _ in range(classes)]
    for true in range(classes):
        for _ in range(30):
            rows[true][true if draw.random() < top1 else draw.randrange(classes)] += 1
    found = {
        "top1": top1,
        "top5": min(1.0, top1 + 0.2) if classes > 5 else None,
        "loss": 1.5 - top1,
        "images": 30 * classes,
        "per_class": [row[true] / 30 for true, row in enumerate(rows)],
    }
    return found | ({"confusion": rows} if confusion else {})


def _steps(tops: list[float], cosines: bool = True) -> list[Content]:
    return [
        {
            "step": step,
            "far": step / len(tops),
            "top1": top1,
            "loss": 2 - top1,
            "objective": 3.0,
            "sweeps": 3,
            "moved": 0.9 if cosines else 0.0,
            "seconds": {"gradients": 1.25, "matching": 0.5},
            "objectives": [2.0, 2.5, 3.0] if cosines else [],
            "cosines": {"before": 0.02, "unseen": None if step == 1 else 0.2, "after": 0.4} if cosines else None,
        }
        for step, top1 in enumerate(tops, start=1)
    ]


def make_content(
    classes: int = 4, names: list[str] | None = None, groups: int = 11, steps: int = 5, **changes: Any
) -> Content:
    """The port.json of a port with all parts; `changes` replaces some of them."""
    draw = random.Random(0)
    labels = names or [f"class {number}" for number in range(classes)]
    side = {
        "architecture": "resnet18",
        "classes": classes,
        "revision": None,
        "hashes": {"model.safetensors": "ab" * 32},
        "dtype": "float32",
    }
    name = labels[0] if names else "layer"
    document = {
        "format": FORMAT,
        "version": "0.1.0",
        "verdict": "Worth it: 62.5% of 120 test images, +4.0 points (±1.5) against plain fine-tuning; continue.",
        "winner": "fgmt",
        "contenders": [
            make_contender(
                "fgmt",
                _score(0.6, classes, draw, confusion=True),
                _steps([0.3 + 0.3 * step / steps for step in range(1, steps)] + [0.5]),
                role="port",
                gradients=20,
                curve=[[640 * step / steps, 0.1 * step / steps] for step in range(1, steps + 1)],
            ),
            make_contender(
                "finetuned",
                _score(0.7, classes, draw, confusion=True),
                role="after",
                gradients=10,
                curve=[[640, 0.6], [800, 0.68]],
            ),
            make_contender(
                "plain",
                _score(0.66, classes, draw, confusion=True),
                gradients=25,
                curve=[[0, 0.25], [320, 0.5], [800, 0.66]],
            ),
            make_contender("naive", _score(0.3, classes, draw), _steps([0.25] * steps, cosines=False)),
            make_contender("tuned", _score(0.8, classes, draw), validation=0.81),
            make_contender("base", _score(0.25, classes, draw)),
        ],
        "steps_planned": steps,
        "samples": {
            "ours": "finetuned",
            "theirs": "plain",
            "rule": "at random",
            "counts": {"only ours": 20, "only theirs": 15, "neither": 30, "both": 55},
            "images": [
                {"number": n, "label": n % classes, "predictions": {"finetuned": 0, "plain": 1}, "kind": kind}
                for n, kind in enumerate(("only ours", "only theirs", "neither", "both") * 3)
            ],
        },
        "head": {"policy": "zero", "why": "the heads differ"},
        "graph": {"groups": groups, "fingerprint": "cd" * 32, "check": {"verdict": "passed"}},
        "permutation": {"moved": 0.9, "given": False},
        "matching": {
            "identity": 0.5,
            "matched": 3.0,
            "perfect": 10.0,
            "groups": [
                {"name": f"{name}{n}.conv", "neurons": 64, "moved": 0.9, "before": 0.01, "after": 0.3 + n / 1000}
                for n in range(groups)
            ],
        },
        "batchnorm": {
            "layers": groups,
            "batches": 2,
            "statistics": {
                f"{name}{n}.bn": {side: {"mean_norm": 1.0, "variance": 0.5 + n} for side in ("before", "after")}
                for n in range(groups)
            },
        },
        "models": {
            "source": {"reference": "old", **side},
            "tuned": {"reference": "/home/somebody/tuned", **side},
            "target": {"reference": "timm/new@main", **side, "revision": "e" * 40},
        },
        "data": {
            "name": "clothes",
            "revision": None,
            "fingerprint": "ef" * 32,
            "images": {"train": 400, "validation": 50, "test": 30 * classes},
            "classes": classes,
            "labels": labels,
        },
        "recipe": {"port": {"batch_size": 32, "method": "fgmt", "bn_batches": 2}, "finetune": {"batch_size": 16}},
        "device": {"type": "cpu", "precision": "no", "processes": 1},
        "notes": ["a note"],
        "seconds": {"loading": 2.0, "gradients": 10.0, "matching": 3.0},
        "memory": {"loading": 10**8, "gradients": 10**9},
        "peak_memory": 10**9,
        "command": "hf-retarget port --steps 5",
        "versions": {"hf-retarget": "0.1.0", "torch": "2.14"},
    }
    return document | changes


def make_contender(name: str, test: Content, steps: list[Content] | None = None, **more: Any) -> Content:
    """One entry of `contenders`; its best step is the first with the highest accuracy."""
    tops = [step["top1"] for step in steps or ()]
    return {
        "name": name,
        "role": "beside",
        "gradients": 0,
        "validation": max(tops, default=test["top1"]),
        "test": test,
        "best_step": tops.index(max(tops)) + 1 if tops else None,
        "steps": steps or [],
    } | more


def make_masked() -> Content:
    """The port.json of a sign-masked port, which is compared with the naive port and the mask alone."""
    content = make_content()
    content["contenders"][0]["name"] = content["winner"] = content["recipe"]["port"]["method"] = "fgmt-sign"
    alone = make_contender("naive-sign", _score(0.5, 4, random.Random(1)), _steps([0.45] * 5, cosines=False))
    content["contenders"].append(alone)
    return content


def make_evil() -> Content:
    """A document in which every untrusted text is malicious."""
    document = make_content(classes=len(EVIL), names=EVIL)
    for place, side in enumerate(("source", "tuned", "target")):
        document["models"][side]["reference"] = EVIL[place]
        document["models"][side]["architecture"] = EVIL[place + 1]
        document["models"][side]["hashes"] = {EVIL[3]: EVIL[0]}
    document["data"]["name"] = EVIL[3]
    document["recipe"]["name"] = EVIL[0]
    document["contenders"] += [make_contender(name, _score(0.4, len(EVIL), random.Random(0))) for name in EVIL]
    return document | {"notes": EVIL, "command": EVIL[0], "verdict": f"Worth it: {EVIL[3]}", "version": EVIL[1]}


def make_thumbnails(count: int = 12) -> dict[int, bytes]:
    """Thumbnails as hard to compress as photographs."""
    pictures = {}
    for number in range(count):
        noise = random.Random(number).randbytes(112 * 112 * 3)
        buffer = io.BytesIO()
        Image.frombytes("RGB", (112, 112), noise).save(buffer, "JPEG", quality=80)
        pictures[number] = buffer.getvalue()
    return pictures


@pytest.fixture
def content() -> Content:
    """A document whose values a test may change."""
    return make_content()


@pytest.fixture
def masked() -> Content:
    return make_masked()


@pytest.fixture
def document() -> PortDocument:
    return parse_document(make_content())


@pytest.fixture(scope="session")
def documents() -> Callable[..., PortDocument]:
    """Complete documents with changed parts; `lacking` names contenders that did not enter."""

    def make(lacking: tuple[str, ...] = (), **changes: Any) -> PortDocument:
        content = make_content(**changes)
        content["contenders"] = [each for each in content["contenders"] if each["name"] not in lacking]
        return parse_document(content)

    return make


@pytest.fixture(scope="session")
def evil() -> PortDocument:
    return parse_document(make_evil())


@pytest.fixture(scope="session")
def thumbnails() -> dict[int, bytes]:
    return make_thumbnails()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Page]]:
    """A function that opens empty pages in one real Chromium."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    with browse(Path(tmp_path_factory.mktemp("chromium"))) as browser:
        yield browser.page
