"""Record the trajectory of your own training loop, and port the fine-tuning along it to a new base.

python docs/examples/own_training_loop.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from stripes import draw_stripes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hf_retarget as rt


def train(model: nn.Module, images: list, epochs: int, after_step: Callable[[int], None] = lambda step: None) -> None:
    """A training loop like yours; `after_step` is called with the number of steps so far."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = 0
    model.train()
    for _ in range(epochs):
        for inputs, labels in DataLoader(images, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            after_step(step)
    model.eval()


def main(folder: Path) -> None:
    """Train a base, fine-tune it while recording, train the base on, and port the fine-tuning to the result."""
    torch.manual_seed(0)
    wide, narrow = draw_stripes(320, seed=1, width=6.0), draw_stripes(320, seed=2, width=3.0)
    old = timm.create_model("test_resnet", num_classes=4)
    train(old, wide, epochs=2)

    tuned = copy.deepcopy(old)
    recorder = rt.TrajectoryRecorder(folder / "trajectory", every=5)
    recorder.start(tuned)
    train(tuned, narrow, epochs=2, after_step=lambda step: recorder.record(tuned, step))
    recorder.finish(tuned, step=20)

    new = copy.deepcopy(old)
    train(new, draw_stripes(320, seed=4, width=9.0), epochs=6)

    data = {"train": narrow, "test": draw_stripes(200, seed=3, width=3.0)}
    options = {"port.method": "naive", "port.batch_size": 32, "port.bn_batches": 2}
    trajectory = folder / "trajectory"
    result = rt.port(old, tuned, new, data, checkpoints=trajectory, overrides=options, preprocess="none")
    print(result.verdict)
    print("saved to", result.save(folder / "ported", overwrite=True))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own-training-loop"))
