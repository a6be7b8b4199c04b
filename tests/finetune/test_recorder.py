"""The recorder: what it writes and reads, and the training loops it supports."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_retarget.errors import PortError, RetargetError
from hf_retarget.matching.trajectory import CheckpointTrajectory
from hf_retarget.training import TrajectoryRecorder


def model_at(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return nn.Sequential(model, nn.BatchNorm1d(1))


def record(folder, steps: int, every: int = 2) -> None:
    recorder = TrajectoryRecorder(folder, every=every)
    recorder.start(model_at(0))
    for step in range(1, steps + 1):
        recorder.record(model_at(step), step)
    recorder.finish(model_at(steps), steps)


def test_a_plain_loop_records_a_trajectory(tmp_path):
    record(tmp_path, 5)
    assert [path.name for path in TrajectoryRecorder.load(tmp_path)] == [
        f"step-00000{step}.safetensors" for step in (2, 4, 5)
    ]
    assert json.loads((tmp_path / "trajectory.json").read_text()) == {"every": 2, "steps": [0, 2, 4, 5]}
    start = load_file(tmp_path / "step-000000.safetensors")
    assert start.keys() == model_at(0).state_dict().keys()
    path = CheckpointTrajectory({"0.weight": start["0.weight"]}, TrajectoryRecorder.load(tmp_path))
    assert [path.delta(step)["0.weight"].tolist() for step in range(4)] == [[[far, far]] for far in (0, 2, 4, 5)]


def test_a_new_start_discards_and_a_later_one_continues(tmp_path):
    record(tmp_path, 6)
    record(tmp_path, 2)
    assert len(TrajectoryRecorder.load(tmp_path)) == 1
    again = TrajectoryRecorder(tmp_path, every=2)
    again.start(model_at(2), 2)
    again.record(model_at(4), 4)
    assert json.loads((tmp_path / "trajectory.json").read_text())["steps"] == [0, 2, 4]
    assert load_file(tmp_path / "step-000000.safetensors")["0.weight"].tolist() == [[0, 0]]


def test_wrappers_are_removed_and_tied_weights_written(tmp_path):
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    TrajectoryRecorder(tmp_path).start(torch.compile(tied, backend="eager"))
    assert load_file(tmp_path / "step-000000.safetensors").keys() == tied.state_dict().keys()


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(PortError, match=r"no trajectory in .*no trajectory\.json"):
        TrajectoryRecorder.load(tmp_path)
    record(tmp_path, 4)
    (tmp_path / "step-000002.safetensors").unlink()
    with pytest.raises(PortError, match=r"step-000002\.safetensors' is listed"):
        TrajectoryRecorder.load(tmp_path)
    (tmp_path / "trajectory.json").write_text("{}")
    with pytest.raises(PortError, match="record the trajectory again"):
        TrajectoryRecorder.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PortError, match="cannot record step 0 in"):
        TrajectoryRecorder(tmp_path / "file").start(model_at(0))
    TrajectoryRecorder(tmp_path / "new").start(model_at(0))
    with pytest.raises(PortError, match="ends where it starts"):
        TrajectoryRecorder.load(tmp_path / "new")
    with pytest.raises(RetargetError, match="not every 0"):
        TrajectoryRecorder(tmp_path, every=0)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_a_callback_without_transformers_names_the_extra(tmp_path):
    with pytest.raises(RetargetError, match=r"pip install 'hf-retarget\[transformers\]'"):
        TrajectoryRecorder(tmp_path).callback()


def test_a_trainer_records_a_trajectory(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, inputs, labels):
            return {"loss": (self.layer(inputs)[:, 0] - labels).square().mean()}

    model = Model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"inputs": torch.randn(2), "labels": torch.randn(())} for _ in range(20)]
    settings = {"max_steps": 5, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), per_device_train_batch_size=4, **settings)
    recorder = TrajectoryRecorder(tmp_path / "trajectory", every=2)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[recorder.callback()]).train()
    path = CheckpointTrajectory(start, TrajectoryRecorder.load(tmp_path / "trajectory"))
    assert path.steps == 3
    assert path.delta(3)["layer.weight"].any()
    assert torch.equal(path.delta(3)["layer.weight"] + start["layer.weight"], model.layer.weight.detach())
