"""Options: validation, number of steps, and the learning rate."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from hf_retarget.errors import RecipeError
from hf_retarget.recipe.options import TrainOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": -1}, "steps is -1, .* at least 0"),
        ({"batch_size": 0}, "batch_size is 0, .* at least 1"),
        ({"lr": 0.0}, "lr is 0.0, .* above 0"),
        ({"lr": float("nan")}, "lr is nan, .* above 0"),
        ({"momentum": 1.0}, "momentum is 1.0, .* below 1"),
        ({"optimizer": "adam"}, "optimizer is 'adam', .* sgd, adamw; did you mean 'adamw'"),
        ({"schedule": "linear"}, "schedule is 'linear', .* cosine, constant"),
        ({"steps": 3, "epochs": 1.0}, "steps \\(3\\) or epochs \\(1\\), not both"),
    ],
)
def test_bad_values_are_named(given, message):
    with pytest.raises(RecipeError, match=message):
        TrainOptions(**given)


def test_every_option_has_help():
    assert all(each.metadata["help"] for each in fields(TrainOptions))


def test_epochs_are_converted_to_steps():
    assert TrainOptions(epochs=2, batch_size=100).total_steps(1050) == 21
    assert TrainOptions(epochs=1, batch_size=100).total_steps(1050) == 11
    assert TrainOptions(epochs=0.07, batch_size=1).total_steps(100) == 7  # 0.07 * 100 is a little more than 7
    assert TrainOptions(epochs=0.5, batch_size=100).total_steps(1000) == 5
    assert TrainOptions(epochs=0.01, batch_size=100).total_steps(1000) == 1
    assert TrainOptions(steps=7).total_steps(10) == 7
    assert TrainOptions().total_steps(10) == 0


def test_the_learning_rate_rises_and_falls():
    cosine = TrainOptions(lr=2.0, warmup=4)
    rates = [cosine.learning_rate(step, 12) for step in range(12)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(1.0)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert 0 < rates[-1] < 0.1
    constant = TrainOptions(lr=2.0, warmup=2, schedule="constant")
    assert [constant.learning_rate(step, 4) for step in range(4)] == [1, 2, 2, 2]
    assert TrainOptions(lr=2.0, warmup=9).learning_rate(2, 3) == pytest.approx(2 / 3)


def test_options_import_no_torch():
    code = "import sys, hf_retarget.recipe.options; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
