"""How much of timm the permutation graphs cover: traces and verifies models, prints a table, writes a CSV.

    python benchmarks/coverage.py                         # one small model of each of timm's 97 families
    python benchmarks/coverage.py --sample 100 --seed 0   # further names, drawn at random
    python benchmarks/coverage.py resnet50 vit_large_patch16_224 --no-verify

Each model runs in its own process, so that its peak memory is its own. Rows are written as they are measured; with
`--resume`, models that are in the CSV without a failure are skipped.
"""

from __future__ import annotations

import csv
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch import nn

    from hf_retarget import PermutationGraph, Verification

FAMILIES = Path(__file__).parent.parent / "tests" / "graph" / "families.csv"
CHECK_LIMIT = 700_000_000
"""Parameters above which a model is traced but not run: float64 weights, permuted and not, would not fit in memory."""

COLUMNS = [
    "model",
    "parameters",
    "groups",
    "per_block",
    "free_on_one",
    "free_on_two",
    "unknown_operators",
    "error",
    "noise_floor",
    "controls",
    "export_seconds",
    "analysis_seconds",
    "check_seconds",
    "trace_megabytes",
    "failure",
]


def measure(name: str, check: bool) -> dict[str, object]:
    """Trace (and verify) one model in this process."""
    import torch

    from hf_retarget.graph.build import build
    from hf_retarget.graph.trace import export
    from hf_retarget.models import empty_model

    torch.set_num_threads(1)
    row: dict[str, object] = dict.fromkeys(COLUMNS, "") | {"model": name}
    try:
        model = empty_model(name)
        began = time.perf_counter()
        program = export(model)
        exported = time.perf_counter()
        graph = build(model, program)
        row |= {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "groups": len(graph),
            "per_block": sum(bool(group.blocks) for group in graph),
            "free_on_one": round(graph.share(1), 4),
            "free_on_two": round(graph.share(2), 4),
            "unknown_operators": " ".join(sorted({unknown.operator for unknown in graph.unknown_operators})),
            "export_seconds": round(exported - began, 3),
            "analysis_seconds": round(time.perf_counter() - exported, 4),
            "trace_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        del program
        if check and row["parameters"] > CHECK_LIMIT:  # type: ignore[operator]
            row["error"] = "too large"
        elif check:
            result = verify(model, graph)
            effective = sum(control.effective for control in result.controls)
            row |= {
                "error": f"{result.error:.1e}",
                "noise_floor": f"{result.noise_floor:.1e}",
                "controls": f"{effective}/{len(result.controls)}",
                "check_seconds": round(result.seconds, 1),
                "failure": "" if result.passed else result.verdict,
            }
    except Exception as error:  # a sweep reports failures and continues
        row["failure"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return row


def verify(model: nn.Module, graph: PermutationGraph) -> Verification:
    """Verify a graph on one image, a small one if the model accepts any size."""
    import hf_retarget as rt
    from hf_retarget.graph.trace import example_arguments

    (example,), _ = example_arguments(model, None)
    options = {"draws": 1, "controls": 2}
    if not model.pretrained_cfg.get("fixed_input_size"):  # type: ignore[union-attr, operator]
        with suppress(rt.TraceError):
            return rt.verify(model, graph, example[:1, :, :96, :96], **options)  # type: ignore[arg-type]
    return rt.verify(model, graph, example[:1], **options)  # type: ignore[arg-type]


def in_own_process(name: str, check: bool) -> dict[str, object]:
    """Run `measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--one", name, *([] if check else ["--no-verify"])]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return dict.fromkeys(COLUMNS, "") | {"model": name, "failure": f"the process ended with {done.returncode}"}
    return dict(json.loads(lines[-1]))


def chosen(names: tuple[str, ...], sample: int, seed: int) -> list[str]:
    """The models to run: the named ones, a random sample, or one of each family."""
    families = [row["model"] for row in csv.DictReader(FAMILIES.open())]
    if names:
        return list(names)
    if not sample:
        return families
    import timm

    return random.Random(seed).sample(sorted(set(timm.list_models()) - set(families)), sample)


def run(names: list[str], check: bool, jobs: int, output: Path, resume: bool) -> list[dict[str, object]]:
    """Measure all models, `jobs` at a time; print and write each row when it is done."""
    rows: list[dict[str, object]] = []
    if resume and output.exists():
        rows = [dict(row) for row in csv.DictReader(output.open()) if row["model"] in names and not row["failure"]]
    todo = [name for name in names if name not in {row["model"] for row in rows}]
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda name: in_own_process(name, check), todo):
            rows.append(row)
            print(line(row), flush=True)
            write_csv(rows, output)
    return rows


def line(row: dict[str, object]) -> str:
    """One row for the terminal."""
    if not row["groups"]:
        return f"{row['model']:45} {row['failure']}"
    return (
        f"{row['model']:45} {row['groups']:>4} groups {row['per_block']:>3} per block  one {row['free_on_one']:.4f} "
        f"two {row['free_on_two']:.3f}  error {row['error'] or '-':>7}  controls {row['controls'] or '-':>4}  "
        f"export {row['export_seconds']:6.1f} s  analysis {row['analysis_seconds']:6.2f} s  "
        f"{row['trace_megabytes']:>5} MB {row['unknown_operators']} {row['failure']}"
    )


def write_csv(rows: list[dict[str, object]], output: Path) -> None:
    """All rows so far."""
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def summary(rows: list[dict[str, object]]) -> Iterator[str]:
    """The figures that docs/coverage.md quotes."""
    good = [row for row in rows if row["groups"]]
    known = sum(not row["unknown_operators"] for row in good)
    yield f"{len(good)} of {len(rows)} models traced, {known} of them with no unknown operator"
    errors = [_number(row, "error") for row in good if row["error"] not in ("", "too large") and not row["failure"]]
    if errors:
        yield f"{len(errors)} verified; largest relative error {max(errors):.1e}"
    if good:
        ratios = [_number(row, "analysis_seconds") / _number(row, "export_seconds") for row in good]
        yield f"analysis takes {statistics.median(ratios):.1%} of the export time (median), {max(ratios):.1%} at most"
        yield f"{statistics.median(_number(row, 'groups') for row in good):.0f} groups in the median"
        largest = max(good, key=lambda row: _number(row, "parameters"))
        size = f"{_number(largest, 'parameters') / 1e6:.0f} M parameters ({largest['model']})"
        yield f"{size}: {largest['trace_megabytes']} MB at most while tracing"


def _number(row: dict[str, object], column: str) -> float:
    return float(str(row[column]))


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--sample", default=0, help="Draw this many further timm names instead of the families.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sample.")
@click.option("--verify/--no-verify", default=True, help="Verify every graph.")
@click.option("--jobs", default=2, show_default=True, help="Number of models measured at once.")
@click.option("--csv", "output", default="coverage.csv", show_default=True, type=Path, help="File for the rows.")
@click.option("--resume", is_flag=True, help="Keep the rows that are in the CSV already.")
@click.option("--one", hidden=True, help="Measure one model in this process and print it as JSON.")
def main(
    names: tuple[str, ...], sample: int, seed: int, check: bool, jobs: int, output: Path, resume: bool, one: str
) -> None:
    """Parse the options and run."""
    if one:
        print(json.dumps(measure(one, check)))
        return
    rows = run(chosen(names, sample, seed), check, jobs, output, resume)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
