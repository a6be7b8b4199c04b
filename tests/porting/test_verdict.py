"""The verdict: the winner, what would have been better, and when the images do not decide."""

from __future__ import annotations

import pytest

from hf_retarget.contenders import AFTER, BESIDE, PORT, find_contender
from hf_retarget.evaluation.scorer import Score, count_flips, paired_error
from hf_retarget.porting.contest import Entry, Made, choose_winner, judge_port

IMAGES = 400


def make_score(top1: float, shift: int = 0) -> Score:
    """A model with this accuracy: right on the first images, or on those after a shift."""
    right = round(top1 * IMAGES)
    said = tuple(int(not shift <= number < shift + right) for number in range(IMAGES))
    return Score(1.0, top1, None, IMAGES, (), (), said, (0,) * IMAGES)


def make_entry(name: str, role: str, top1: float, shift: int = 0) -> Entry:
    score = make_score(top1, shift)
    return Entry(find_contender(name), role, Made({}, score), score)


def judge(port: float, after: float | None = None, *, method: str = "fgmt", **others: float) -> str:
    """The verdict on these accuracies."""
    winner = make_entry(method, PORT, port)
    entries = [winner, *(make_entry(name.replace("_", "-"), BESIDE, top1) for name, top1 in others.items())]
    if after is not None:
        entries.append(make_entry("finetuned", AFTER, after))
    return judge_port(entries, winner, entries[-1] if after is not None else winner)


@pytest.mark.parametrize(
    ("accuracies", "begins", "says"),
    [
        ({"port": 0.6, "plain": 0.4, "naive": 0.3}, "Worth it:", "+20.0 points (±2.0) against plain fine-tuning"),
        (
            {"port": 0.6, "plain": 0.4, "naive": 0.6},
            "Worth it, but not for its permutation:",
            "not shown to have helped",
        ),
        ({"port": 0.3, "plain": 0.4, "naive": 0.3, "after": 0.6}, "Worth it, but not for its", "worth +0.0 points"),
        (
            {"port": 0.6, "plain": 0.4, "naive_sign": 0.5, "method": "fgmt-sign"},
            "Worth it:",
            "matching itself was worth",
        ),
        ({"port": 0.4, "plain": 0.6, "naive": 0.3}, "Not worth it:", "fine-tune the new base directly"),
        ({"port": 0.5, "plain": 0.4, "head": 0.7}, "Not worth it:", "fit a head on the new base"),
        ({"port": 0.5, "plain": 0.6, "head": 0.7}, "Not worth it:", "fit a head on the new base"),
        ({"port": 0.4025, "plain": 0.4, "naive": 0.3}, "Undecided:", "not shown to differ"),
        ({"port": 0.4, "plain": 0.6, "after": 0.8}, "Worth it:", "80.0% on 400 test images"),
        ({"port": 0.4, "naive": 0.3}, "Undecided:", "--control full"),
        ({"port": 0.6, "head": 0.4}, "Undecided:", "not compared with plain fine-tuning"),
        ({"port": 0.4, "head": 0.6}, "Not worth it:", "fit a head"),
        ({"port": 0.6, "plain": 0.4, "tuned": 0.8}, "Worth it:", "75% of the tuned model's 80.0%"),
        ({"port": 0.6, "plain": 0.4, "method": "head"}, "No port needed:", "that is what was saved"),
    ],
)
def test_the_verdict_follows_the_figures(accuracies, begins, says):
    verdict = judge(**accuracies)
    assert verdict.startswith(begins)
    assert says in verdict
    assert "\n" not in verdict


def test_a_naive_port_is_not_compared_with_itself():
    assert "matching itself" not in judge(0.4, plain=0.2, method="naive")
    unmatched = {name: find_contender(name).without_matching for name in ("naive", "naive-sign", "fgmt", "fgmt-sign")}
    assert unmatched == {"naive": "", "naive-sign": "", "fgmt": "naive", "fgmt-sign": "naive-sign"}


def test_without_labels_the_verdict_speaks_of_agreement():
    winner = make_entry("naive-line", PORT, 0.9)
    entries = [winner, make_entry("plain", BESIDE, 0.4), make_entry("tuned", BESIDE, 1.0)]
    said = judge_port(entries, winner, winner, labelled=False)
    assert "90.0% agreement with the tuned model" in said
    assert "of the tuned model's" not in said


def test_only_differing_images_contribute_to_the_error():
    one, other = make_score(0.5), make_score(0.5, shift=100)
    assert paired_error(one, one) == 0
    assert paired_error(one, other) == pytest.approx((200**0.5) / 400)
    assert count_flips(one, other) == (100, 100)
    assert count_flips(make_score(0.6), make_score(0.4)) == (80, 0)


@pytest.mark.parametrize(
    ("validation", "winner"),
    [
        ({"naive-line": 0.70, "naive-head": 0.70, "head": 0.60}, "naive-line"),  # on a tie, the simplest
        ({"naive-line": 0.70, "naive-head": 0.80, "head": 0.60}, "naive-head"),
        ({"head": 0.799, "matched": 0.80}, "head"),
        ({"naive-line": 0.30, "head": 0.60, "matched": 0.70}, "matched"),
    ],
)
def test_ties_go_to_the_simpler_contender(validation, winner):
    # A shift makes the models differ on other images, too, so that a small lead is within the error.
    ports = [make_entry(name, PORT, top1, shift=7 * n) for n, (name, top1) in enumerate(validation.items())]
    assert choose_winner(ports).contender.name == winner
