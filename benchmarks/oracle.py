"""Compares the files made by two versions of the code, bit for bit: a redesign must not change them.

    git worktree add /tmp/before COMMIT
    python benchmarks/oracle.py --code /tmp/before --write /tmp/before.json
    python benchmarks/oracle.py --code . --compare /tmp/before.json

runs the demo, a port of a convolutional network with heads of different sizes, and one of a small transformer, with the
code in a folder: each in one process, the ports also in two. Hashes of model, permutation and graph must be equal, and
so must all numbers of port.json, regardless of their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILES = ("model.safetensors", "permutation.safetensors", "graph.json", "config.json")
DATA = ("--data", "fashion-mnist", "--data-limit", "200", "--data-image-size", "32", "--data-validation", "0.2")
TIMES = ("seconds", "memory", "peak_memory", "run", "versions", "version", "command", "location")
PORTS = {
    "resnet": (
        *("--method", "fgmt-sign", "--steps", "3", "--grad-batches", "2", "--batch-size", "16"),
        "--bn-batches",
        "2",
    ),
    "vit": (
        *("--method", "fgmt", "--steps", "3", "--grad-batches", "2", "--batch-size", "16"),
        "--finetune-steps",
        "4",
    ),
}
MODELS = """
import sys, timm, torch
from pathlib import Path
from hf_retarget.models import load_checkpoint, save_model
root = Path(sys.argv[1])
for name, options, classes in (
    ("resnet", {"in_chans": 1}, (5, 10, 7)), ("vit", {"in_chans": 1, "img_size": 32, "patch_size": 8}, (10, 10, 10))
):
    net = timm.create_model(f"test_{name}", num_classes=classes[0], **options)
    for seed, (side, count) in enumerate(zip(("old", "tuned", "new"), classes)):
        torch.manual_seed(0 if side != "new" else 1)
        net = timm.create_model(f"test_{name}", num_classes=count, **options)
        if side == "tuned":
            torch.manual_seed(2)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
        from timm.models import save_for_hf
        save_for_hf(net, root / name / side, model_args=options, safe_serialization=True)
"""


def run(code: Path, *command: str, folder: Path) -> None:
    """Run Python with the code in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}\n{done.stderr}")


def measure(code: Path) -> dict[str, Any]:
    """The hashes and numbers of all ports made by the code in a folder."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(code, "-c", MODELS, folder, folder=place)
        run(code, "-m", "hf_retarget", "demo", "--out", "demo", folder=place)
        found["demo"] = describe(place / "demo" / "ported")
        for name, options in PORTS.items():
            sides = [f"--{side}={place / name / model}" for side, model in SIDES.items()]
            for processes in (1, 2):
                module = ("-m", "hf_retarget") if processes == 1 else (*TORCHRUN, "-m", "hf_retarget")
                out = f"{name}-{processes}"
                run(code, *module, "port", *sides, *DATA, *options, "--out", out, folder=place)
                found[out] = describe(place / out)
    return found


SIDES = {"src-base": "old", "src-ft": "tuned", "new-base": "new"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def describe(folder: Path) -> dict[str, Any]:
    """Hashes of the files, and all numbers of port.json, sorted: names may change, numbers may not."""
    there = [name for name in FILES if (folder / name).exists()]  # without matching, there is no permutation
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in there}
    document = json.loads((folder / "port.json").read_text())
    return {"hashes": hashes, "numbers": sorted(set(numbers(document)))}


def numbers(value: Any, key: str = "") -> list[float]:
    """All measured numbers except times."""
    if isinstance(value, dict):
        return [each for name, inner in value.items() if name not in TIMES for each in numbers(inner, name)]
    if isinstance(value, list):
        return [each for inner in value for each in numbers(inner, key)]
    return [float(value)] if isinstance(value, float) else []


def main() -> None:
    """Measure, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, default=Path(), help="folder of the code")
    parser.add_argument("--write", type=Path, help="file for the result")
    parser.add_argument("--compare", type=Path, help="file of an earlier result")
    options = parser.parse_args()
    found = measure(options.code.resolve())
    if options.write:
        options.write.write_text(json.dumps(found, indent=1))
    if options.compare:
        before, wrong = json.loads(options.compare.read_text()), 0
        for name, old in before.items():
            for file, digest in old["hashes"].items():
                same = found[name]["hashes"].get(file) == digest
                wrong += not same
                print(f"{name:<10} {file:<26} {'same' if same else 'DIFFERS'}")
            lost = sorted(set(old["numbers"]) - set(found[name]["numbers"]))
            more = sorted(set(found[name]["numbers"]) - set(old["numbers"]))
            print(f"{name:<10} numbers of port.json: {len(old['numbers'])} before, lost {lost[:20]}, new {more[:20]}")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
