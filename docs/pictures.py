"""Makes the pictures of docs/report.md, comparing.md and planes.md, and prints their figures (20 minutes of a core).

    python docs/pictures.py FOLDER

runs the commands of these pages in FOLDER (what is there already is kept), takes the charts they draw, and photographs
their pages in Chromium. The pages quote a run with two threads of torch.
"""

from __future__ import annotations

import base64
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Page, browse  # noqa: E402  # the same browser as that of the tests

SIDES = "--src-base demo/old --src-ft demo/tuned --new-base demo/independent --recipe demo/ported/recipe.yaml"
IMAGES_OF_DEMO = "--data demo/ported/recipe.yaml"
RUNS = {
    "demo": "demo --out demo",
    "demo/masked": f"port {SIDES} --method fgmt-sign --finetune-steps 20 --out demo/masked",
    "demo/plain": f"finetune demo/independent {IMAGES_OF_DEMO} --head zero --steps 150 --out demo/plain",
    "demo/masked/plane": "plane --models plain=demo/plain port=demo/masked old=demo/tuned --permute old=demo/masked "
    f"{IMAGES_OF_DEMO} --report demo/masked",
    "lines/port": f"plane --models demo/plain demo/masked {IMAGES_OF_DEMO} --out lines/port",
    "lines/old": f"plane --models demo/plain demo/tuned {IMAGES_OF_DEMO} --out lines/old",
    "lines/match": f"plane --models demo/plain demo/tuned --permute match {IMAGES_OF_DEMO} --out lines/match",
    "lines/ported": f"plane --models demo/plain demo/tuned --permute tuned=demo/masked {IMAGES_OF_DEMO} "
    "--out lines/ported",
    **{
        f"runs/{method}-{seed}": f"port {SIDES} --steps 5 --finetune-steps 20 --method {method} --seed {seed} "
        f"--out runs/{method}-{seed}"
        for seed in (0, 1)
        for method in ("fgmt", "fgmt-sign")
    },
    "compare.html": "compare runs/ --html compare.html",
}
"""What each command makes, in order."""
CHARTS = ("curve", "price", "gradients", "groups", "moved", "sweeps", "batchnorm", "classes", "confusion", "time")
BOX = "(({x, y, width, height}) => ({x: x + scrollX, y: y + scrollY, width, height}))(%s.getBoundingClientRect())"


def run_commands(folder: Path) -> None:
    """Run every command whose result is missing, as a reader would."""
    environment = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "COLUMNS": "160", **os.environ}
    for made, command in RUNS.items():
        if not (folder / made).exists():
            print(f"$ hf-retarget {command}", flush=True)
            subprocess.run(
                [sys.executable, "-m", "hf_retarget", *shlex.split(command)], cwd=folder, env=environment, check=True
            )


def take(page: Page, name: str, box: dict[str, float]) -> None:
    """Photograph a part of the page."""
    clip: dict[str, Any] = {**box, "scale": 1}
    shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    (IMAGES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def take_pages(folder: Path) -> None:
    """Photograph reports and the comparison, on screens of several sizes."""
    with tempfile.TemporaryDirectory() as profile, browse(Path(profile)) as browser:

        def show(path: str, width: int, scheme: str = "light") -> Page:
            page = browser.page()
            page.resize(width, 980)
            page.prefer(scheme)
            page.call("Emulation.setScrollbarsHidden", hidden=True)  # they would narrow the page only while measuring
            page.open(folder / path)
            page.run("document.querySelectorAll('.scroll').forEach((each) => { each.style.maxHeight = 'none' })")
            return page

        take(show("demo/ported/report.html", 1000), "report", {"x": 0, "y": 0, "width": 1000, "height": 980})
        take(show("demo/ported/report.html", 390), "report-phone", {"x": 0, "y": 0, "width": 390, "height": 1400})

        dark = show("demo/masked/report.html", 1000, "dark")
        dark.run("document.querySelector('#accuracy h2').scrollIntoView({behavior: 'instant'})")
        middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])(%s.getBoundingClientRect())"
        dark.point(*dark.run(middle % "document.querySelectorAll('#accuracy .chart .spot')[4]"))
        take(dark, "report-dark", {**dark.run(BOX % "document.body"), "height": 980, "y": dark.run("scrollY")})

        whole = show("demo/masked/report.html", 1100)
        take(whole, "samples", whole.run(BOX % "document.querySelector('#images .pair')"))
        take(whole, "graph", whole.run(BOX % "document.querySelector('#moved .framed')"))

        compared = show("compare.html", 1280)
        take(compared, "compare", {**compared.run(BOX % "document.body"), "height": 1560})


def main() -> None:
    """Run the commands, and put their pictures into docs/images."""
    folder = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="pictures-"))
    folder.mkdir(parents=True, exist_ok=True)
    run_commands(folder)
    for name in CHARTS:
        shutil.copy(folder / "demo/masked/figures" / f"{name}.png", IMAGES)
    shutil.copy(folder / "demo/masked/plane/plane.png", IMAGES)
    shutil.copy(folder / "lines/port/plane.png", IMAGES / "line.png")
    take_pages(folder)
    print(f"The pictures are in {IMAGES}, the reports in {folder}")


if __name__ == "__main__":
    main()
