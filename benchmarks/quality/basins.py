"""Loss planes (figure 7): are a port after fine-tuning and the directly fine-tuned new base in one basin?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

import hf_retarget as rt
from quality.bench import Bench
from quality.runs import Run, perform
from quality.store import Kept, short_hash

DIRECT, PORTED, SOURCE = "direct", "ported", "source"
"""The paper's Target, FGMT+FT and Source (Permuted), the tuned model matched to the new base by its weights."""
GRID, POINTS, IMAGES = 9, 11, 400
"""Points along a side of the plane and along a line, and test images at each."""


def gather_corners(bench: Bench, seed: int = 0, method: str = "fgmt") -> dict[str, nn.Module]:
    """The networks at the corners of the plane."""
    summary = perform(Run(bench, method, seed))
    if not summary["after"]:
        raise ValueError(f"'{bench.task.name}' does not fine-tune after '{method}'; choose another method")
    source = bench.tuned(bench.task.pair(seed).old, bench.task.pair(seed).old_seed)
    folders = {
        DIRECT: bench.out / summary["direct"],
        PORTED: bench.out / summary["after"][-1]["folder"],
        SOURCE: Path(source["folder"]),
    }
    return {
        name: bench.network(bench.classes, load_file(folder / "model.safetensors")) for name, folder in folders.items()
    }


def survey_basin(bench: Bench, seed: int = 0) -> str:
    """Draw the plane and measure the barriers along its sides; returns a summary."""
    corners = gather_corners(bench, seed)
    kept = Kept(bench.out / bench.task.name / "plane" / f"seed-{seed}")
    key = {name: short_hash(network.state_dict()) for name, network in corners.items()} | {"grid": GRID}
    if (done := kept.read(key)) is None:
        bench.say(f"{bench.task.name}: the plane through {', '.join(corners)}")
        folder = kept.begin()
        given: dict[str, Any] = {"recipe": bench.recipe, "limit": IMAGES}
        matched = {SOURCE: "match"}
        rt.plane(corners, bench.pictures, permute=matched, grid=GRID, out=folder / "plane", **given)
        barriers = {}
        for end, permute in ((PORTED, None), (SOURCE, matched)):
            ends = {DIRECT: corners[DIRECT], end: corners[end]}
            line = rt.plane(ends, bench.pictures, permute=permute, grid=POINTS, **given)
            barriers[end] = line.figures["barrier"]["top1"]
        done = kept.finish(key, {"barriers": barriers, "images": IMAGES})
    points = {end: f"{100 * value:.1f} points" for end, value in done["barriers"].items()}
    return f"barrier from {DIRECT} to {PORTED}: {points[PORTED]}, to {SOURCE}: {points[SOURCE]}"


def load_basins(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Task → the result for each seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("*/plane/seed-*/done.json")):
        found.setdefault(path.parents[2].name, []).append(json.loads(path.read_text("utf-8")))
    return found


def copy_pictures(out: Path, images: Path) -> dict[str, Path]:
    """The planes of the first seeds, beside the other pictures."""
    drawn = {}
    for path in sorted(out.glob("*/plane/seed-0/plane/plane.png")):
        name = f"plane-{path.parents[3].name}"
        images.mkdir(parents=True, exist_ok=True)
        drawn[name] = Path(shutil.copyfile(path, images / f"{name}.png"))
    return drawn
