"""``hf-retarget convert``: convert a training checkpoint to a safetensors folder that every command reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hf_retarget.cli.options import (
    allow_pickle_option,
    arch_option,
    debug_option,
    model_argument,
    num_classes_option,
    token_option,
)
from hf_retarget.cli.show import echo_rows
from hf_retarget.progress import status

_EXAMPLE = """\b
Examples:
  hf-retarget convert output/train/model_best.pth.tar tuned --allow-pickle
  hf-retarget convert weights.pth tuned --allow-pickle --arch resnet18
  hf-retarget convert me/old-upload tuned --allow-pickle
"""


@click.command(epilog=_EXAMPLE)
@model_argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@arch_option
@allow_pickle_option
@num_classes_option
@token_option
@debug_option
def convert(model: str, out: Path, **options: Any) -> None:
    """Convert MODEL to safetensors in the new folder OUT.

    MODEL is a file, a folder or a Hub id. Checkpoints of timm's train.py contain architecture and image size; their
    averaged (EMA) weights are used if present. Of pickles, only tensors and plain values are read.
    """
    with status(f"converting {model}"):
        import hf_retarget as rt

        found = rt.convert(model, out, **options)
    size = "×".join(map(str, found.config["input_size"])) if "input_size" in found.config else "unknown size"
    numbers = sum(tensor.numel() for tensor in found.weights.values())
    rows = [("model", f"{found.architecture}, {numbers:,} numbers, {found.num_classes} classes, images of {size}")]
    echo_rows([*rows, *(("note", note) for note in found.notes), ("saved", str(out))])
