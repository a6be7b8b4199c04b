"""Fills the generated parts of docs/results.md from the finished runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_retarget.files import atomic_path
from quality.basins import copy_pictures, load_basins
from quality.claims import tabulate_claims
from quality.cosine import load_cosines
from quality.ensembles import compare_ensembles
from quality.figures import MISSING, tabulate_figures
from quality.pictures import draw_all
from quality.runs import load_summaries
from quality.tables import (
    tabulate_after,
    tabulate_basins,
    tabulate_bounds,
    tabulate_cosines,
    tabulate_ensembles,
    tabulate_gap,
    tabulate_ports,
    tabulate_prices,
    tabulate_savings,
    tabulate_seconds,
    tabulate_twists,
)
from quality.tasks import FULL, TASKS, WHOLE


def compose_parts(out: Path, images: Path, page: Path, tasks: tuple[str, ...] = FULL) -> dict[str, str]:
    """All generated parts by name; pictures are drawn into `images` and linked relative to `page`."""
    found = load_summaries(out)
    runs = [run for run in found if run["task"] in tasks]
    whole = [run for run in found if run["task"] in WHOLE]
    cosines = load_cosines(out)
    basins = load_basins(out)
    drawn = draw_all(runs, cosines, images) if runs or cosines else {}
    drawn |= copy_pictures(out, images)

    def show(prefix: str) -> str:
        links = [
            f"![{name}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
            for name, path in drawn.items()
            if name.startswith(prefix)
        ]
        return "\n".join(links)

    return {
        "figures": tabulate_figures(runs, cosines, basins),
        "claims": tabulate_claims(runs),
        "whole": _join(tabulate_ports(whole), tabulate_bounds(whole)),
        "ports": _join(tabulate_ports(runs), show("steps-")),
        "bounds": tabulate_bounds(runs),
        "prices": tabulate_prices(runs),
        "savings": tabulate_savings(runs),
        "after": _join(tabulate_after(runs), show("after-")),
        "twists": _join(tabulate_twists(runs), show("trajectory-")),
        "cosines": _join(tabulate_cosines(cosines), show("widths")),
        "ensembles": tabulate_ensembles(compare_ensembles(runs, out)),
        "gap": tabulate_gap(runs),
        "basins": _join(tabulate_basins(basins), show("plane-")),
        "seconds": tabulate_seconds(runs),
    }


def fill_page(page: Path, parts: dict[str, Any]) -> list[str]:
    """Replace the text between `<!-- NAME -->` and `<!-- end of NAME -->`; returns the names that were filled.

    Parts that would lose figures, because tasks have no runs here, are not changed.
    """
    text, filled = page.read_text("utf-8"), []
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
        old = pattern.search(text)
        if old is None or _tasks_in(old[0]) - _tasks_in(part) or part.count(MISSING) > old[0].count(MISSING):
            continue
        text = text.replace(old[0], f"{old[1]}\n{part}\n\n{old[2]}")
        filled.append(name)
    with atomic_path(page) as temporary:
        temporary.write_text(text, "utf-8")
    return filled


def _tasks_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", text)) & set(TASKS)


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
