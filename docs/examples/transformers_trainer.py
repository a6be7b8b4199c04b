"""Record the trajectory of a transformers Trainer, and port the fine-tuning along it to a new base.

python docs/examples/transformers_trainer.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from stripes import draw_stripes
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import hf_retarget as rt


def train(model: ViTForImageClassification, images: list, folder: Path, callbacks: list[Any] | None = None) -> None:
    """Train with the Trainer, on the CPU, without reports."""
    rows = [{"pixel_values": image, "labels": label} for image, label in images]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    model.eval()


def main(folder: Path) -> None:
    """Train a base, fine-tune it while recording, train the base on, and port the fine-tuning to the result."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    old = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4))
    wide, narrow = draw_stripes(320, seed=1, width=6.0), draw_stripes(320, seed=2, width=3.0)
    train(old, wide, folder)

    tuned = copy.deepcopy(old)
    recorder = rt.TrajectoryRecorder(folder / "trajectory", every=5)
    train(tuned, narrow, folder, callbacks=[recorder.callback()])

    new = copy.deepcopy(old)
    train(new, draw_stripes(480, seed=4, width=5.0), folder)

    data = {"train": narrow, "test": draw_stripes(200, seed=3, width=3.0)}
    options = {"port.method": "naive", "port.batch_size": 32}
    trajectory = folder / "trajectory"
    result = rt.port(old, tuned, new, data, checkpoints=trajectory, overrides=options, preprocess="none")
    print(result.verdict)
    print("saved to", result.save(folder / "ported", overwrite=True))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "transformers-trainer"))
