"""Trajectories and transplants."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import hf_retarget as rt
from hf_retarget.errors import MatchError, TensorMismatchError
from hf_retarget.matching.trajectory import SCHEDULES, CheckpointTrajectory, LinearTrajectory, transplant

ZERO, ONE = {"w": torch.zeros(2)}, {"w": torch.ones(2)}


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_schedules_rise_from_zero_to_one(schedule, steps):
    values = [SCHEDULES[schedule](step, steps) for step in range(steps + 1)]
    assert values[0] == 0
    assert values[-1] == pytest.approx(1)
    assert values == sorted(values)


def test_cosine_takes_its_large_steps_first():
    far = [SCHEDULES["cosine"](step, 10) for step in range(11)]
    assert far[1] - far[0] > far[10] - far[9]


def test_linear_trajectory_ends_at_the_tuned_weights():
    path = LinearTrajectory(ZERO, ONE, 4)
    assert path.delta(4)["w"].tolist() == [1, 1]
    assert path.delta(1)["w"].tolist() == [0.25, 0.25]


def test_bad_trajectories_are_refused():
    with pytest.raises(MatchError, match="at least one step, not 0"):
        LinearTrajectory(ZERO, ONE, 0)
    with pytest.raises(MatchError, match="unknown schedule 'linear'; choose one of cosine, uniform"):
        LinearTrajectory(ZERO, ONE, 2, "linear")
    with pytest.raises(TensorMismatchError, match=r"'w' has shape \[2\] in the source weights, but \[3\] in the tuned"):
        LinearTrajectory(ZERO, {"w": torch.ones(3)}, 2)
    with pytest.raises(MatchError, match="at least one checkpoint"):
        CheckpointTrajectory(ZERO, [])


def test_checkpoints_are_read_when_needed(tmp_path):
    file = tmp_path / "late.safetensors"
    path = CheckpointTrajectory(ZERO, [ONE, file])
    assert path.steps == 2
    assert path.delta(0)["w"].tolist() == [0, 0]
    assert path.delta(1)["w"].tolist() == [1, 1]
    with pytest.raises(MatchError, match=r"late\.safetensors"):
        path.delta(2)
    save_file({"w": torch.full((2,), 3.0)}, file)
    assert path.delta(2)["w"].tolist() == [3, 3]
    save_file({"v": torch.ones(2)}, file)
    with pytest.raises(TensorMismatchError, match="'w' is in the source weights but not in the checkpoint 2 weights"):
        path.delta(2)


def test_transplant_adds_the_permuted_delta(network, noise):
    model, graph, _ = network
    target, delta = noise(model, 0), noise(model, 1)
    permutation = graph.random(0)
    ported = transplant(target, delta, graph, permutation, scale=0.5)
    moved = graph.apply(permutation, delta)
    for name, weight in ported.items():
        torch.testing.assert_close(weight, target[name] + 0.5 * moved[name])
    with pytest.raises(rt.GraphMismatchError):
        transplant(target, delta, graph, rt.Permutation("another", permutation.indices))
