"""Memory and time of a streamed port of a large model, against copying its files.

    OMP_NUM_THREADS=1 python benchmarks/stream.py --folder /somewhere/with/room        # 8 GB, needs 33 GB of disk
    OMP_NUM_THREADS=1 python benchmarks/stream.py --folder /tmp/hollow --hollow        # 9 GB of mostly sparse files

Three random models of one lineage are written in bfloat16, with the shapes of a Llama: an embedding of 128,256 tokens,
which is the largest tensor, and layers of 4,096 channels. A separate process imports the package, measures its memory,
ports, and measures its peak. Files are dropped from the page cache before each measurement, and a copy, like a port,
counts once it is on the disk. The folder is emptied afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch

WIDTH, INNER, TOKENS = 4096, 14336, 128_256
SHARD = 2_000_000_000  # bytes
PORT = """
import json, resource, sys
import hf_retarget.porting.port
import hf_retarget as rt
def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = memory("VmRSS")
done = rt.port(*sys.argv[1:4], "none", out=sys.argv[4])
print(json.dumps({"before": before, "peak": memory("VmHWM"), "seconds": done.document.seconds}))
"""


def shapes(size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of matrices, up to this many bytes in total."""
    yield "model.embed_tokens.weight", (TOKENS, WIDTH)
    left, layer = size - 2 * TOKENS * WIDTH, 0
    while left > 0:
        for name, shape in {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
            left -= 2 * shape[0] * shape[1]
        layer += 1


def make(folder: Path, size: int, seed: int, hollow: bool) -> None:
    """Write a model: the old base, or, with another seed, the old base with a little noise."""
    folder.mkdir(parents=True)
    base = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed)) if seed else 0
    block = (base + 0.05 * noise).bfloat16().view(torch.uint8).numpy().tobytes()
    shards: list[list[tuple[str, tuple[int, int]]]] = [[]]
    for name, shape in shapes(size):
        if sum(2 * rows * columns for _, (rows, columns) in shards[-1]) > SHARD:
            shards.append([])
        shards[-1].append((name, shape))
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, (rows, columns) in shard:
            places[name] = file
            span = [end, end := end + 2 * rows * columns]
            header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": span}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            begin = out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(begin + end)
            for each in header.values():
                first, last = (begin + place for place in each["data_offsets"])
                step = (last - first) // 2 if hollow else len(block)
                for place in range(first, last, step):
                    out.seek(place)
                    out.write(block[: min(last - place, len(block))])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": TOKENS}
    (folder / "config.json").write_text(json.dumps(config))


def forget(*folders: Path) -> None:
    """Flush files to the disk and drop them from the page cache."""
    for path in (path for folder in folders for path in folder.iterdir()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(command: list[str]) -> tuple[tuple[float, float], str]:
    """Run a command; return its wall-clock and processor seconds, and its output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), output


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--gigabytes", default=8.0)
@click.option("--hollow", is_flag=True, help="Write sparse files, which take little disk space.")
def main(folder: Path, gigabytes: float, hollow: bool) -> None:
    """Make three models, copy one, port, and print a table."""
    sides = [folder / name for name in ("old", "tuned", "new")]
    try:
        for seed, side in enumerate(sides):
            make(side, int(gigabytes * 1e9), seed, hollow)
        size = sum(path.stat().st_size for path in sides[2].iterdir())
        forget(*sides)
        copied, _ = measure(
            ["sh", "-c", f"cp -r --sparse=never '{sides[2]}' '{folder}/copy' && sync '{folder}'/copy/*"]
        )
        shutil.rmtree(folder / "copy")
        forget(*sides)
        command = [sys.executable, "-c", PORT, *map(str, sides), str(folder / "ported")]
        ported, output = measure(command)
        found = json.loads(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    largest = 2 * TOKENS * WIDTH
    allowed = 2 * largest + 300e6
    rows = {
        "the model": f"{size / 1e9:.2f} GB, its largest tensor {largest / 1e9:.2f} GB",
        "memory after the imports": f"{found['before'] / 1e6:,.0f} MB",
        "peak": f"{found['peak'] / 1e6:,.0f} MB, {(found['peak'] - found['before']) / 1e6:,.0f} MB above that",
        "allowed (two of the largest + 300 MB)": f"{allowed / 1e6:,.0f} MB",
        "copying the new base's files": f"{copied[0]:.0f} s, {copied[1]:.0f} s of the processor",
        "the port": f"{ported[0]:.0f} s, {ported[1]:.0f} s of the processor: {ported[0] / copied[0]:.1f} times as long",
        "of which": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["seconds"].items()),
    }
    for name, words in rows.items():
        click.echo(f"{name:<40}{words}")
    if found["peak"] - found["before"] > allowed:
        raise SystemExit("the port took more memory than allowed")


if __name__ == "__main__":
    main()
