"""The one line at the end: worth it or not, and when nobody can tell."""

from __future__ import annotations

import pytest

from hf_retarget.contenders import find_contender
from hf_retarget.evaluation.scorer import Score
from hf_retarget.porting.verdict import Compared, judge_port


def make_score(top1: float) -> Score:
    return Score(1.0, top1, None, 400, (), (), ())


def judge(*, minibatches: int = 100, control: str = "full", method: str = "naive", **accuracies: float) -> str:
    """The verdict on these accuracies."""
    scores = {name: make_score(top1) for name, top1 in accuracies.items()}
    return judge_port(Compared(**scores, unmatched_method=method, minibatches=minibatches, control=control))


@pytest.mark.parametrize(
    ("accuracies", "begins", "says"),
    [
        (
            {"port": 0.6, "alternative": 0.4, "unmatched": 0.3},
            "Worth it:",
            "+20.0 points (±3.5) against plain fine-tuning",
        ),
        (
            {"port": 0.6, "alternative": 0.4, "unmatched": 0.6},
            "Worth it, but not for its permutation:",
            "--method naive",
        ),
        (
            {"port": 0.6, "alternative": 0.4, "unmatched": 0.59, "method": "naive-sign"},
            "Worth it, but not for its",
            "--method naive-sign",
        ),
        (
            {"port": 0.3, "alternative": 0.4, "unmatched": 0.3, "after": 0.6},
            "Worth it, but not for its",
            "worth +0.0 points",
        ),
        (
            {"port": 0.6, "alternative": 0.4, "unmatched": 0.5, "method": "naive-sign"},
            "Worth it:",
            "matching itself was worth +10.0 points",
        ),
        ({"port": 0.4, "alternative": 0.6, "unmatched": 0.3}, "Not worth it:", "-20.0 points"),
        ({"port": 0.41, "alternative": 0.4, "unmatched": 0.3}, "Undecided:", "(±3.5, within chance)"),
        ({"port": 0.4, "alternative": 0.6, "after": 0.8}, "Worth it:", "80.0% of 400 test images, +20.0"),
        ({"port": 0.4, "unmatched": 0.3}, "Undecided:", "there is no control"),
    ],
)
def test_the_verdict_follows_the_figures(accuracies, begins, says):
    verdict = judge(**accuracies)
    assert verdict.startswith(begins)
    assert says in verdict
    assert "\n" not in verdict


def test_without_a_control_it_says_how_to_get_one():
    assert "--control full" in judge(port=0.4, minibatches=0, control="none")


def test_a_naive_port_is_not_compared_with_itself():
    assert "matching" not in judge(port=0.4, alternative=0.2)
    unmatched = {name: find_contender(name).without_matching for name in ("naive", "naive-sign", "fgmt", "fgmt-sign")}
    assert unmatched == {"naive": "", "naive-sign": "", "fgmt": "naive", "fgmt-sign": "naive-sign"}
