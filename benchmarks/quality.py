"""The value of ports: runs a matrix of tasks, methods and seeds, and writes the results.

    python benchmarks/quality.py --list                              # the tasks, with estimated times
    python benchmarks/quality.py resnet20-flowers                    # one task; finished runs are kept
    python benchmarks/quality.py --figure 5d                         # the tasks of a figure of the paper
    python benchmarks/quality.py --all --jobs 2                      # everything
    python benchmarks/quality.py --write docs/results.md             # tables and pictures of all finished runs

Runs are kept in runs/quality, with their port.json. Larger sets of images and trained networks are looked for in
../shared; without them, the tasks that need them are left out, and the rest takes the embedded images.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("tasks", nargs=-1)
@click.option("--figure", help="A figure or table of the paper: 3a … 9, table-3.")
@click.option("--all", "everything", is_flag=True, help="All tasks, and the study of trajectories.")
@click.option("--list", "listing", is_flag=True, help="List the tasks with estimated times, and exit.")
@click.option("--method", "methods", multiple=True, help="Only these methods (fgmt, fgmt+cosine, …).")
@click.option("--seed", "seeds", multiple=True, type=int, help="Only these seeds.")
@click.option("--jobs", default=1, show_default=True, help="Processes, with one thread each.")
@click.option(
    "--out", type=Path, default=ROOT / "runs" / "quality", help="Folder for the runs.  [default: runs/quality]"
)
@click.option("--quick", is_flag=True, help="Train only briefly, as a smoke test (in OUT-quick).")
@click.option("--anew", is_flag=True, help="Repeat ports; keep bases and fine-tunings.")
@click.option("--cosine", is_flag=True, help="Compare trajectories (figure 3) instead of porting.")
@click.option("--basins", is_flag=True, help="Measure the loss planes (figure 7).")
@click.option("--write", "page", type=Path, help="Write the results to this page, and pictures to images/ beside it.")
def main(
    tasks: tuple[str, ...],
    figure: str | None,
    everything: bool,
    listing: bool,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    jobs: int,
    out: Path,
    quick: bool,
    anew: bool,
    cosine: bool,
    basins: bool,
    page: Path | None,
) -> None:
    """Run the benchmark."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if jobs > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from quality import work
    from quality.figures import FIGURES
    from quality.tasks import FULL, TASKS

    if figure is not None:
        if figure not in FIGURES:
            raise click.BadParameter(f"there is no figure '{figure}'; choose one of {', '.join(FIGURES)}")
        chosen = FIGURES[figure]
        if not chosen.tasks:
            raise click.ClickException(f"figure {figure} needs a GPU machine; sh benchmarks/paper.sh has the commands")
        tasks, methods = chosen.tasks, methods or chosen.methods
        cosine, basins = chosen.study == "cosine", chosen.study == "basins"
    if unknown := [name for name in tasks if name not in TASKS]:
        raise click.BadParameter(f"there is no task '{unknown[0]}'; choose among {', '.join(TASKS)}")
    names = tasks or (FULL if everything or listing else ())
    if not names and page is None:
        raise click.UsageError("name a task, or give --all, --list, --figure or --write")
    if listing:
        work.list_tasks(names)
        return
    failed: list[str] = []
    given = out
    if quick:
        out = out.with_name(f"{out.name}-quick")
    if jobs > 1 and len(names) > 1:
        options = [*_repeat("--method", methods), *_repeat("--seed", seeds), *["--anew"] * anew, *["--quick"] * quick]
        options += ["--cosine"] * cosine + ["--basins"] * basins + ["--all"] * everything
        failed = _in_processes(work.by_family(names), [*options, "--out", str(given)], jobs)
    else:
        asked = work.Asked(methods, seeds, anew=anew, cosine=cosine, basins=basins, both=everything, quick=quick)
        failed = work.do(names, out, asked)
    if page is not None:
        work.write(out, page)
    if failed:
        raise click.ClickException(f"{len(failed)} failed: {'; '.join(failed[:3])}")


def _in_processes(groups: list[tuple[str, ...]], options: list[str], jobs: int) -> list[str]:
    """Run families of tasks in parallel, each in its own process, because the tasks of a family share their work."""

    def call(group: tuple[str, ...]) -> str:
        answer = subprocess.run([sys.executable, __file__, *group, *options], check=False)
        return f"{', '.join(group)}" if answer.returncode else ""

    with ThreadPoolExecutor(jobs) as pool:
        return [group for group in pool.map(call, groups) if group]


def _repeat(option: str, values: tuple[object, ...]) -> list[str]:
    return [part for value in values for part in (option, str(value))]


if __name__ == "__main__":
    main()
