"""The work of the command, once its options are parsed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quality.basins import survey_basin
from quality.bench import Bench
from quality.cosine import measure_cosine, wide_tasks
from quality.document import compose_parts, fill_page
from quality.estimate import count_work, time_image
from quality.runs import forget, list_runs, load_summaries, perform_all
from quality.tables import tabulate_ports
from quality.task import shorten
from quality.tasks import TASKS

COSINE_SEEDS = 3


def by_family(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Group tasks that share bases and fine-tunings, those known to be longest first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(TASKS[name].folder, []).append(name)
    order = ["mobilenet-flowers", "resnet20-flowers", "cifar10-conv8"]
    ranked = sorted(groups, key=lambda family: order.index(family) if family in order else len(order))
    return [tuple(groups[family]) for family in ranked]


def list_tasks(names: Sequence[str]) -> None:
    """List the tasks with estimated times, measured now on one core, which should be idle."""
    total = 0.0
    for family in by_family(names):
        tasks = [TASKS[name] for name in family]
        each = time_image(tasks[0])
        for task in tasks:
            seconds = count_work(task, tasks).seconds(each)
            total += seconds
            lacking = task.missing()
            about = f"not here: {lacking}" if lacking else f"{1000 * each:.1f} ms an image"
            print(f"{task.name:<24} {seconds / 60:6.1f} min  {task.seeds} seeds  {task.title}  [{about}]")
    print(f"{'all, one core':<24} {total / 60:6.1f} min; with --jobs 2 on two free cores about half of that")


@dataclass(frozen=True)
class Asked:
    """The options for each task."""

    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    anew: bool = False
    cosine: bool = False
    basins: bool = False
    both: bool = False
    """Ports and the study of trajectories."""
    quick: bool = False


def do(names: Sequence[str], out: Path, asked: Asked) -> list[str]:
    """Perform the runs (or studies) of tasks, and print the table; returns the failures."""
    failed: list[str] = []
    for name in names:
        task = shorten(TASKS[name]) if asked.quick else TASKS[name]
        bench = Bench(task, out.resolve(), say=_say)
        if lacking := task.missing():
            _say(f"{name} is left out: {lacking}")
            continue
        if asked.anew:
            forget(bench.out, name, asked.methods)
        if asked.basins:
            _say(f"{name}: {survey_basin(bench)}")
        elif not asked.cosine:
            failed += perform_all(list_runs(bench, asked.methods, asked.seeds))
        if asked.cosine or asked.both:
            _compare(bench, asked)
    if names and not asked.cosine:
        print(tabulate_ports([run for run in load_summaries(out) if run["task"] in names]))
    return failed


def write(out: Path, page: Path) -> None:
    """Fill the generated parts of the page."""
    filled = fill_page(page, compose_parts(out, page.parent / "images", page))
    print(f"{page}: {', '.join(filled) or 'nothing to fill in'}")


def _compare(bench: Bench, asked: Asked) -> None:
    for task in wide_tasks(bench.task) if bench.task.name == "mnist-mlp" else [bench.task]:
        for seed in range(min(COSINE_SEEDS, bench.task.seeds)):
            if not asked.seeds or seed in asked.seeds:
                found = measure_cosine(Bench(task, bench.out, bench.say), seed)
                _say(f"{task.name}, seed {seed}: {found['identity']:.3f} as they are, {found['matched']:.3f} matched")


def _say(line: str) -> None:
    print(f"[{os.getpid()}] {line}", flush=True)
