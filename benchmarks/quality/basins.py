"""Loss planes (Figure 7): gathers the models at the corners, which `hf-retarget plane` draws where it is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from quality.bench import Bench
from quality.runs import Run, perform

CORNERS = ("direct", "ported-and-tuned", "permuted-source")
"""The paper's Target, FGMT+FT and Source (Permuted)."""


def gather_corners(bench: Bench, seed: int = 0, method: str = "fgmt") -> dict[str, Path]:
    """The weights at the corners of the plane, copied to one folder."""
    port, source = Run(bench, method, seed), Run(bench, "permuted-source", seed)
    summary = perform(port)
    perform(source)
    if summary["answers"]["after"] is None:
        raise ValueError(f"'{bench.task.name}' does not fine-tune on after '{method}'; choose a method that it does")
    found = {
        "direct": bench.out / summary["answers"]["direct"],
        "ported-and-tuned": bench.out / summary["answers"]["after"],
        "permuted-source": source.kept.folder / "ported",
    }
    folder = bench.out / bench.task.name / "plane" / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    corners = {}
    for name, place in found.items():
        corners[name] = folder / f"{name}.safetensors"
        shutil.copyfile(place / "model.safetensors", corners[name])
    return corners


def draw_plane(bench: Bench, seed: int = 0) -> str:
    """Draw the plane, or say what is there to be drawn."""
    corners = gather_corners(bench, seed)
    known = subprocess.run([sys.executable, "-m", "hf_retarget", "plane", "--help"], capture_output=True, check=False)
    places = ", ".join(str(path) for path in corners.values())
    if known.returncode:
        return f"this version has no `hf-retarget plane`; the corners are {places}"
    return f"the corners are {places}; draw them with `hf-retarget plane`"
