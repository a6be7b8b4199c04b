"""Runs the rows of all tables, and says how many were refused, accepted or failed, area by area.

python tests/faults/campaign.py                # the rows written by hand, then those made from the fields that exist
python tests/faults/campaign.py --written      # only the ones, or with --generated only the others
python tests/faults/campaign.py --show headers # what is printed about each row of an area
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from faults.bench import Bench, Row  # noqa: E402  reads the environment

TABLES = ("weights", "configs", "recipes", "images", "ported", "adapters")


def rows() -> list[Row]:
    """All rows that are written by hand."""
    return [row for name in TABLES for row in importlib.import_module(f"faults.{name}").ROWS]


def generated() -> list[Row]:
    """Rows for each field that exists, and each value that it cannot have."""
    return list(importlib.import_module("faults.generated").rows())


def summarise(results: list[tuple[Row, str | None]]) -> str:
    """A table of areas."""
    lines = ["| area | tried | refused | accepted | failed |", "|---|---:|---:|---:|---:|"]
    areas = list(dict.fromkeys(row.area for row, _ in results))
    for area in [*areas, "all"]:
        counts = Counter(
            "failed" if problem else "accepted" if row.code == 0 else "refused"
            for row, problem in results
            if area in (row.area, "all")
        )
        figures = [sum(counts.values()), counts["refused"], counts["accepted"], counts["failed"]]
        lines.append(f"| {area} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the campaign; the exit code is that of a test."""
    written = [] if "--generated" in arguments else rows()
    chosen = written if "--written" in arguments else [*written, *generated()]
    show = "--show" in arguments
    wanted = [each for each in arguments if not each.startswith("--")]
    if wanted:
        chosen = [row for row in chosen if any(each == row.area or row.id.startswith(f"{each}-") for each in wanted)]
    assert len({row.id for row in chosen}) == len(chosen), "two rows have one name"
    began = time.monotonic()
    results, seconds = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder).resolve() / "bench")
        try:
            for row in chosen:
                results.append((row, bench.find_problem(row)))
                seconds[row.area] += bench.last["seconds"]
                if show:
                    last = (bench.last["err"] or bench.last["out"]).strip().splitlines()[-1:]
                    print(
                        f"{bench.last['seconds']:5.2f} s, {'FAILS' if results[-1][1] else 'ok':5} {row.id}: {''.join(last)[:400]}",
                        flush=True,
                    )
        finally:
            bench.close()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(*(f"- {problem}\n" for _, problem in results if problem), sep="\n")
    areas = {row.area for row in written}
    for words, by_hand in (("Written by hand:", True), ("Generated from the fields that exist:", False)):
        if found := [(row, problem) for row, problem in results if (row.area in areas) is by_hand]:
            print(words, summarise(found), sep="\n\n", end="\n\n")
    print("seconds of the processor:", ", ".join(f"{area} {spent:.0f}" for area, spent in seconds.items()))
    print(f"{time.monotonic() - began:.0f} s, of which the processor worked {spent.ru_utime + spent.ru_stime:.0f} s")
    return any(problem for _, problem in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
