"""The comparison page names the winner and its lead."""

from __future__ import annotations

from hf_retarget.report.comparison import name_winner


def group(name: str, mean: float, deviation: float | None, **others: float) -> dict:
    top1 = {key: {"mean": value, "deviation": None, "count": 1} for key, value in others.items()}
    return {"name": name, "port": {"mean": mean, "deviation": deviation, "count": 2}, "top1": top1}


def test_the_best_group_is_named_with_its_lead():
    words, reasons, clear = name_winner(
        {"groups": [group("a", 0.5, 0.01), group("b", 0.7, 0.02, tuned=0.8, plain=0.6)]}
    )
    assert (words, clear) == ("Best: b", True)
    assert reasons == (
        "b: 70.0 ± 2.0% on the test images; +20.0 points against the next, a; "
        "-10.0 points against tuned model, on the old base; +10.0 points against plain fine-tuning, same price."
    )


def test_a_lead_within_the_deviation_is_no_win():
    words, _, clear = name_winner({"groups": [group("a", 0.69, 0.01), group("b", 0.7, 0.02)]})
    assert (words, clear) == ("No clear winner", False)
    assert name_winner({"groups": [group("alone", 0.7, None)]})[0] == "Best: alone"


def test_a_long_name_is_replaced_by_its_number():
    names = [group("x" * 40, 0.5, None), group("y" * 40, 0.7, None)]
    assert name_winner({"groups": names})[0] == "Best: group 2"


def test_there_is_no_winner_with_different_test_images():
    groups = [group("a", 0.5, 0.01), group("b", 0.7, 0.02)]
    words, reasons, clear = name_winner({"groups": groups, "warnings": ["different test images: x: a; y: b"]})
    assert (words, reasons, clear) == ("No winner", "different test images: x: a; y: b.", False)
