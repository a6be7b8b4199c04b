"""The cost of a push and a pull, compared with copying and hashing the same file, on the loopback Hub of the tests.

    python benchmarks/hub.py                               # ResNet-50, 102 MB
    python benchmarks/hub.py --model resnet18 --runs 5

No network is involved: this measures the work of the client, of this package and of the test Hub, which hashes what it
receives on the same machine. Each push and pull is its own process; time and peak memory exclude its imports.
"""

from __future__ import annotations

import json
import shutil
import statistics
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

from loopback_hub import Hub

from hf_retarget.files import hash_file
from hf_retarget.models import load_checkpoint, save_model

MEASURE = """
import json, resource, sys, time
from pathlib import Path
import safetensors.torch, timm
from huggingface_hub import HfApi
from hf_retarget.models import load_checkpoint
from hf_retarget.models.hub import fetch_model
from hf_retarget.publish import Destination, push_folder

def memory():  # MB; a process inherits the peak of its parent, except in /proc
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6

before, start = memory(), time.perf_counter()
what, folder, repository = sys.argv[1:]
if what.startswith("push"):
    push_folder(folder, Destination(repository), verify=what == "push and read back")
elif what == "load from the cache":
    load_checkpoint(repository)
else:
    fetch_model(repository, token=None)
print(json.dumps({"seconds": time.perf_counter() - start, "memory": memory() - before}))
"""

PUSHES = (("push", "a"), ("push again", "a"), ("push and read back", "b"))
PULLS = (("pull", "a"), ("pull from the cache", "a"), ("load from the cache", "a"))

Row = dict[str, Any]


def main_rows(model: str, runs: int, place: Path) -> tuple[float, list[Row]]:
    """All measurements, and the megabytes of the model."""
    torch.manual_seed(0)
    made = timm.create_model(model)
    folder = save_model(place / "model", made.state_dict(), load_checkpoint(made))
    weights = folder / "model.safetensors"
    rows = [
        _local("copy the file", runs, lambda: shutil.copyfile(weights, place / "copy")),
        _local("sha256 of the file", runs, lambda: hash_file(weights)),
    ]
    for kind, limit in (("plain LFS", 1 << 40), ("multipart", 1)):
        rows += _remote(kind, limit, runs, place, folder)
    return weights.stat().st_size / 1e6, rows


def _local(what: str, runs: int, work: Callable[[], object]) -> Row:
    work()  # once before measuring, so that the file is cached
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return {"what": what, "seconds": statistics.median(seconds)}


def _remote(kind: str, multipart_from: int, runs: int, place: Path, folder: Path) -> list[Row]:
    found: dict[str, list[Row]] = {}
    for run in range(runs):
        with Hub(place / f"{kind}-{run}", multipart_from=multipart_from) as hub:
            hub.add_user("ada")
            for what, name in (*PUSHES, *(PULLS if kind == "plain LFS" else ())):  # pulls are the same for both kinds
                client = hub.client(token="hf_ada_write")
                hub.log.clear()
                row = client.python(MEASURE, what, folder, f"ada/{name}", timeout=600)
                found.setdefault(what, []).append({**row, "requests": len(hub.log)})
        shutil.rmtree(place / f"{kind}-{run}")
    return [
        {"what": f"{what}, {kind}"}
        | {name: statistics.median(row[name] for row in rows) for name in ("seconds", "memory", "requests")}
        for what, rows in found.items()
    ]


@click.command(help=__doc__)
@click.option("--model", default="resnet50", show_default=True, help="A timm model; its weights are random.")
@click.option("--runs", default=3, show_default=True, help="Number of runs; the median is reported.")
@click.option("--json", "as_json", is_flag=True)
def main(model: str, runs: int, as_json: bool) -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory() as place:
        size, rows = main_rows(model, runs, Path(place))
    if as_json:
        print(json.dumps({"megabytes": size, "rows": rows}, indent=2))
        return
    copy = rows[0]["seconds"]
    print(f"{model}, {size:.0f} MB, median of {runs}\n")
    print("| | seconds | MB/s | times a copy | peak memory, MB | requests |\n|---|---|---|---|---|---|")
    for row in rows:
        memory, requests = (f"{row[name]:,.0f}" if name in row else "" for name in ("memory", "requests"))
        seconds = row["seconds"]
        print(
            f"| {row['what']} | {seconds:.2f} | {size / seconds:,.0f} | {seconds / copy:.1f} | {memory} | {requests} |"
        )


if __name__ == "__main__":
    main()
