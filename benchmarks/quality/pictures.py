"""The pictures of the results: small PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quality.tables import Run, select, tasks_in

COLOURS = {
    "plain": "#555555",
    "naive": "#bbbbbb",
    "rebasin": "#8da0cb",
    "permuted-source": "#a6761d",
    "fgmt": "#1b9e77",
    "gmt": "#66c2a5",
    "fgmt-sign": "#d95f02",
    "naive-sign": "#fdc086",
    "oracle": "#7570b3",
}


def draw_steps(runs: list[Run], task: str, path: Path, methods: Sequence[str] = ()) -> None:
    """Validation accuracy along the trajectory, a line for each method (the paper's figures 4, 5 and 9)."""
    with _Axes(path) as axes:
        some = select(runs, task)
        for method in dict.fromkeys(run["method"] for run in some):
            if method in methods if methods else "+" not in method:
                curves = [run["validation"] for run in select(some, task, method)]
                far = [list(np.linspace(0, 1, len(curves[0]) + 1)[1:])] * len(curves)
                _band(axes, far, curves, method)
        direct = [run["validation_direct"] for run in some]
        axes.axhline(sum(direct) / len(direct), color="#555555", linestyle=":", label="direct fine-tuning")
        axes.set(xlabel="share of the trajectory", ylabel="validation accuracy", xlim=(0, 1.02), title=task)


def draw_after(runs: list[Run], task: str, path: Path) -> None:
    """Test accuracy of fine-tuning after the port against plain fine-tuning (the paper's figure 6)."""
    with _Axes(path) as axes:
        some = [run for run in select(runs, task) if run["after"]]
        for method in dict.fromkeys(run["method"] for run in some):
            _curves(axes, [run["after"] for run in select(some, task, method)], method)
        _curves(axes, [run["plain"] for run in select(some, task, some[0]["method"])], "plain")
        axes.set_xscale("symlog", linthresh=max(5, some[0]["plain"][1]["step"]))
        axes.set(xlabel="steps of fine-tuning", ylabel="test accuracy", title=task)


def draw_widths(found: dict[str, list[dict[str, Any]]], path: Path, stem: str = "mnist-mlp") -> None:
    """Cosine of two trajectories against the hidden width (the paper's figure 3a)."""
    widths = sorted(int(name.removeprefix(f"{stem}-")) for name in found if name[len(stem) + 1 :].isdecimal())
    if not widths:
        return
    with _Axes(path) as axes:
        for kind, style in (("matched", "-"), ("identity", "--")):
            values = [[each[kind] for each in found[f"{stem}-{width}"]] for width in widths]
            means = [sum(some) / len(some) for some in values]
            axes.errorbar(
                widths, means, yerr=[np.std(some) for some in values], linestyle=style, marker="o", label=kind
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="hidden neurons", ylabel="cosine", ylim=(0, 1), title="2-MLP, first 50 iterations")


def draw_all(runs: list[Run], cosines: dict[str, list[dict[str, Any]]], folder: Path) -> dict[str, Path]:
    """Draw all pictures for which there are runs; name → file."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for task in tasks_in(runs):
        drawn[f"steps-{task}"] = folder / f"steps-{task}.png"
        draw_steps(runs, task, drawn[f"steps-{task}"])
        twisted = [run["method"] for run in select(runs, task) if run["method"].endswith(("+actual", "+cosine"))]
        if twisted:
            chosen = (*twisted, *(method.partition("+")[0] for method in twisted))
            drawn[f"trajectory-{task}"] = folder / f"trajectory-{task}.png"
            draw_steps(runs, task, drawn[f"trajectory-{task}"], tuple(dict.fromkeys(chosen)))
        if any(run["after"] for run in select(runs, task)):
            drawn[f"after-{task}"] = folder / f"after-{task}.png"
            draw_after(runs, task, drawn[f"after-{task}"])
    draw_widths(cosines, folder / "widths.png")
    if (folder / "widths.png").exists():
        drawn["widths"] = folder / "widths.png"
    return drawn


def _curves(axes: Any, curves: Sequence[Sequence[dict[str, float]]], method: str) -> None:
    steps = [[row["step"] for row in curve] for curve in curves]
    _band(axes, steps, [[row["test"] for row in curve] for curve in curves], method)


def _band(axes: Any, across: Sequence[Sequence[float]], curves: Sequence[Sequence[float]], method: str) -> None:
    """Mean and deviation; curves are cut to the length of the shortest."""
    length = min(map(len, curves))
    values = np.array([curve[:length] for curve in curves])
    where, mean, deviation = across[0][:length], values.mean(0), values.std(0)
    base, _, twist = method.partition("+")
    colour = COLOURS.get(base, "#000000")
    axes.plot(where, mean, color=colour, linestyle={"": "-", "actual": "--"}.get(twist, ":"), label=method)
    axes.fill_between(where, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


class _Axes:
    """A small panel, saved at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        self.figure, self.axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        return self.axes

    def __exit__(self, kind: object, *_: object) -> None:
        import matplotlib.pyplot as plt

        if kind is None:
            self.axes.grid(alpha=0.3)
            self.figure.legend(loc="outside right upper", fontsize=8, frameon=False)
            self.figure.savefig(self.path, dpi=110, metadata={"Software": None})
        plt.close(self.figure)
