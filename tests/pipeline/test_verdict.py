"""The one line at the end: worth it or not, and when nobody can tell."""

from __future__ import annotations

import pytest

from hf_retarget.evaluate import Score
from hf_retarget.pipeline.verdict import judge_port


def scores(**accuracies: float) -> dict[str, Score]:
    return {name: Score(1.0, value, None, 400, (), (), ()) for name, value in accuracies.items()}


@pytest.mark.parametrize(
    ("accuracies", "begins", "says"),
    [
        ({"port": 0.6, "control": 0.4, "naive": 0.3}, "Worth it:", "+20.0 points (±3.5) against plain fine-tuning"),
        ({"port": 0.6, "control": 0.4, "naive": 0.6}, "Worth it, but not for its permutation:", "--method naive"),
        (
            {"port": 0.6, "control": 0.4, "naive": 0.3, "masked": 0.59},
            "Worth it, but not for its",
            "--method naive-sign",
        ),
        (
            {"port": 0.3, "control": 0.4, "naive": 0.3, "finetuned": 0.6},
            "Worth it, but not for its",
            "worth +0.0 points",
        ),
        (
            {"port": 0.6, "control": 0.4, "naive": 0.3, "masked": 0.5},
            "Worth it:",
            "matching itself was worth +10.0 points",
        ),
        ({"port": 0.4, "control": 0.6, "naive": 0.3}, "Not worth it:", "-20.0 points"),
        ({"port": 0.41, "control": 0.4, "naive": 0.3}, "Undecided:", "(±3.5, within chance)"),
        ({"port": 0.4, "control": 0.6, "finetuned": 0.8}, "Worth it:", "80.0% of 400 test images, +20.0"),
        ({"port": 0.4, "naive": 0.3}, "Undecided:", "there is no control"),
    ],
)
def test_the_verdict_follows_the_figures(accuracies, begins, says):
    verdict = judge_port(scores(**accuracies), minibatches=100, control="full")
    assert verdict.startswith(begins)
    assert says in verdict
    assert "\n" not in verdict


def test_without_a_control_it_says_how_to_get_one():
    assert "--control full" in judge_port(scores(port=0.4), minibatches=0, control="none")


def test_a_naive_port_is_not_compared_with_itself():
    found = scores(port=0.4, control=0.2)
    assert "matching" not in judge_port(found | {"naive": found["port"]}, minibatches=10, control="full")
    masked = found | {"naive": scores(naive=0.2)["naive"], "masked": found["port"]}
    assert "matching" not in judge_port(masked, minibatches=10, control="full")
