"""What many images, many models and many ports cost: time and memory, which must not grow with them.

    python benchmarks/load.py                # all four, some minutes
    python benchmarks/load.py images         # a port over 200 classes and 100,000 generated images

Each row runs in a process of its own. Its memory is the peak above what the process had after its imports.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hf_retarget as rt
from hf_retarget.models import load_checkpoint, save_model

CLASSES, SIZE = 200, 32
PORT = {"port.control": "none", "port.bn_batches": 2, "port.batch_size": 32}


class Generated:
    """Images that are drawn when they are asked for: a colour for each class, and noise."""

    def __init__(self, count: int) -> None:
        self.targets = [number % CLASSES for number in range(count)]
        self.drawn = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.drawn += 1
        generator = torch.Generator().manual_seed(number)
        label = self.targets[number]
        colour = torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(label))
        return (colour + 0.2 * torch.rand(3, SIZE, SIZE, generator=generator)).clamp(0, 1), label


def _make(place: Path, seed: int, classes: int, name: str = "test_resnet") -> Path:
    torch.manual_seed(0)
    images = {"input_size": (3, SIZE, SIZE), "crop_pct": 1.0}
    model = timm.create_model(name, num_classes=classes, pretrained_cfg_overlay=images)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return save_model(place, model.state_dict(), load_checkpoint(model))


def port_images(count: int) -> dict[str, Any]:
    """Port a fine-tuning of 200 classes with as many training images, a tenth of them to validate on."""
    with tempfile.TemporaryDirectory() as place:
        sides = [_make(Path(place, name), seed, CLASSES) for seed, name in enumerate(("old", "tuned", "new"))]
        data, peak = {"train": Generated(count), "test": Generated(2000)}, _peak()
        result = rt.port(*sides, data, overrides=PORT, quiet=True)
        drawn = data["train"].drawn + data["test"].drawn
    return {"images": count, "drawn": drawn, "winner": result.document.winner, "megabytes": _peak() - peak}


def port_many(count: int) -> dict[str, Any]:
    """Port many fine-tunings of one base without images; three of them are broken."""
    with tempfile.TemporaryDirectory() as place:
        names = ("old", "new", *(f"tuned-{number}" for number in range(count)))
        old, new, *models = (_make(Path(place, name), seed, 3, "test_vit") for seed, name in enumerate(names))
        for path, content in zip(models[:3], (b"", b"{", b"\xff" * 100), strict=True):
            (path / "model.safetensors").write_bytes(content)
        peak = _peak()
        found = rt.port_all(old, new, models, "none", out=Path(place, "out"), quiet=True)
    return {"models": count, "failed": len(found.failed), "megabytes": _peak() - peak}


def _finish_one(place: Path) -> Path:
    sides = [_make(place / name, seed, 3) for seed, name in enumerate(("old", "tuned", "new"))]
    images = {"train": Generated(200), "test": Generated(100)}
    for each in images.values():
        each.targets = [number % 3 for number in range(len(each))]
    rt.port(*sides, images, overrides=PORT | {"port.method": "naive", "port.steps": 2}, out=place / "one", quiet=True)
    return place / "one"


def compare_many(count: int) -> dict[str, Any]:
    """Compare many finished ports, which differ in method and seed."""
    with tempfile.TemporaryDirectory() as place:
        document = json.loads((_finish_one(Path(place)) / "port.json").read_text())
        for number in range(count):
            folder = Path(place, "runs", str(number))
            folder.mkdir(parents=True)
            document["recipe"]["port"]["seed"] = number // 5
            document["recipe"]["port"]["steps"] = 1 + number % 5
            (folder / "port.json").write_text(json.dumps(document))
        peak, began = _peak(), time.perf_counter()
        found = rt.compare([Path(place, "runs")])
        seconds = time.perf_counter() - began
    return {"ports": count, "groups": len(found.groups), "compared in": seconds, "megabytes": _peak() - peak}


def find_outdated(count: int) -> dict[str, Any]:
    """Look for successors of the bases of many models, on a Hub on this machine."""
    from loopback_hub import Hub

    with tempfile.TemporaryDirectory() as place, Hub(Path(place, "hub")) as hub:
        model = _make(Path(place, "model"), 0, 3, "test_vit")
        files: dict[str, Any] = {path.name: path for path in model.iterdir()}
        hub.add_user("lab")
        hub.repository("lab/new", files)
        hub.repository("lab/old", files | {"README.md": b"---\nnew_version: lab/new\n---\n"})
        for number in range(count):
            folder = Path(place, "models", str(number))
            shutil.copytree(model, folder)
            (folder / "README.md").write_text("---\nbase_model: lab/old\n---\n")
        done = hub.client().run(sys.executable, "-c", _OUTDATED, Path(place, "models"), timeout=1800)
    return {"models": count, **json.loads(done.stdout.splitlines()[-1])}


_OUTDATED = """
import json, sys, time
import hf_retarget as rt
began = time.perf_counter()
found = rt.outdated(folder=sys.argv[1])
print(json.dumps({"outdated": len(found.outdated), "looked at in": time.perf_counter() - began}))
"""


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


ROWS: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[int, ...]]] = {
    "images": (port_images, (4_000, 100_000)),
    "port-all": (port_many, (5, 50)),
    "compare": (compare_many, (50, 500)),
    "outdated": (find_outdated, (100, 1_000)),
}


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("rows", nargs=-1, type=click.Choice(list(ROWS)))
@click.option("--one", type=int, hidden=True)
def main(rows: tuple[str, ...], one: int | None) -> None:
    """Run each row at a small and at a large size."""
    for name in rows or ROWS:
        run, sizes = ROWS[name]
        if one is not None:
            began = time.perf_counter()
            print(json.dumps(run(one) | {"seconds": time.perf_counter() - began}))
            return
        for size in sizes:
            command = [sys.executable, __file__, name, "--one", str(size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(name, *(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in found.items()), sep="  ", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
