"""Tables and claims from made-up runs with known results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from quality.claims import CLAIMS, judge_claims
from quality.curves import steps_to
from quality.figures import FIGURES, tabulate_figures
from quality.tables import (
    make_table,
    savings,
    spread,
    tabulate_after,
    tabulate_cosines,
    tabulate_gap,
    tabulate_ports,
    tabulate_prices,
    tabulate_savings,
    tabulate_twists,
)
from quality.task import TWISTS
from quality.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]


def curve(*tests: float) -> list[dict[str, float]]:
    return [
        {"step": 10 * number, "test": test, "validation": test, "train": test + 0.1}
        for number, test in enumerate(tests)
    ]


def make_run(method: str, seed: int, port: float, after: Sequence[dict[str, float]] = ()) -> dict:
    return {
        "task": "tiny",
        "method": method,
        "seed": seed,
        "best_step": 2,
        "validation": [port - 0.1, port],
        "test": {"port": port, "source": 0.8, "direct": 0.8, "control": 0.5},
        "validation_direct": 0.8,
        "gradients": 6,
        "price": 12.0,
        "plain": curve(0.2, 0.4, 0.6, 0.8),
        "after": after,
        "lr": {"source": 0.1, "direct": 0.1},
        "seconds": {},
    }


@pytest.fixture
def runs() -> list[dict]:
    made = []
    for seed, shift in enumerate((0.0, 0.02)):
        made += [
            make_run("naive", seed, 0.30 + shift),
            make_run("oracle", seed, 0.50 + shift),
            make_run("gmt", seed, 0.50 + shift),
            make_run("fgmt", seed, 0.52 + shift, curve(0.5, 0.78, 0.8, 0.8)),
            make_run("fgmt-sign", seed, 0.60 + shift, curve(0.6, 0.6, 0.7, 0.75)),
            make_run("fgmt+cosine", seed, 0.50 + shift),
        ]
    return made


def test_means_have_a_deviation(runs):
    assert tabulate_ports(runs).splitlines()[-1] == (
        "| `tiny` | 31.0 ± 1.4 | 53.0 ± 1.4 | 51.0 ± 1.4 | 61.0 ± 1.4 | 51.0 ± 1.4 |"
    )
    assert spread([None, 0.25]) == "25.0"


def test_steps_are_interpolated_between_points():
    rising = curve(0.2, 0.4, 0.8)
    assert steps_to(rising, 0.2) == 0
    assert steps_to(rising, 0.5) == pytest.approx(12.5)
    assert steps_to(rising, 0.9) is None


def test_savings_are_ratios_or_never(runs):
    plain, after = savings(runs[3], 0.95)  # 0.76: plain between 20 and 30, after the port between 0 and 10
    assert plain == pytest.approx(28)
    assert after == pytest.approx(10 * 0.26 / 0.28)
    table = tabulate_savings(runs).splitlines()
    assert "9 : 28 = 0.33" in table[2]
    assert "– : 28" in table[3]
    assert table[2].endswith("| 12 | 0.76 |")  # (9.3 + 12) : 28


def test_each_claim_is_judged_separately(runs):
    verdicts = dict(zip(CLAIMS, judge_claims(runs, "tiny"), strict=True))
    assert verdicts == {
        "FGMT beats naive": "yes (+22.0)",
        "FGMT within 3 points of the oracle, or above": "yes (+2.0)",
        "GMT within 3 points of FGMT": "yes (+2.0)",
        "fgmt-sign 5 points above FGMT": "yes (+8.0)",
        "fgmt-sign 5 points above the oracle": "yes (+10.0)",
        "95 % in half the steps (fgmt)": "yes (0.33)",
        "95 % in half the steps (fgmt-sign)": "no (not reached)",
    }


def test_a_margin_within_its_error_does_not_count():
    made = [
        make_run(method, seed, port)
        for method, ports in {"naive": (0.3, 0.3), "fgmt": (0.3, 0.5)}.items()
        for seed, port in enumerate(ports)
    ]
    assert judge_claims(made, "tiny")[0] == "no (+10.0)"
    assert judge_claims(made, "tiny")[1] == "–"


def test_variants_are_compared_on_the_same_seeds(runs):
    alone = [run for run in runs if run["method"] != "fgmt+cosine" or run["seed"] == 1]
    assert tabulate_twists(alone).splitlines()[-1] == "| `tiny` | `fgmt+cosine` | 54.0 | 52.0 | -2.0 |"


def test_prices_are_sorted_and_one_way_is_kept_per_price(runs):
    cheap = make_run("fgmt+one-batch", 0, 0.45) | {"gradients": 3}
    unpriced = make_run("naive", 0, 0.3)
    unpriced["test"]["control"] = None
    lines = tabulate_prices([run for run in runs if "fgmt" in run["method"]] + [cheap, unpriced]).splitlines()
    assert [line.split("`")[3] for line in lines[2:]] == ["fgmt+one-batch", "fgmt", "fgmt-sign"]
    assert lines[2] == "| `tiny` | `fgmt+one-batch` | 3 × 32 | 45.0 | 50.0 | -5.0 | 1 |"
    assert lines[3].endswith("| 53.0 ± 1.4 | 50.0 ± 0.0 | +3.0 ± 1.4 | 2 |")


def test_curves_and_gaps_have_a_row_for_each_method(runs):
    rows = tabulate_after(runs).splitlines()
    assert [row.split(" | ")[0] for row in rows[4:]] == ["| plain", "| after `fgmt`", "| after `fgmt-sign`"]
    assert "| `tiny` | after `fgmt` | 80.0 ± 0.0 | 10.0 ± 0.0 |" in tabulate_gap(runs)


def test_widths_are_sorted():
    found = {f"mlp-{width}": [{"identity": 0.1, "matched": 0.5}] for width in (1024, 64, 256)}
    names = [row.split("`")[1] for row in tabulate_cosines(found).splitlines()[2:]]
    assert names == ["mlp-64", "mlp-256", "mlp-1024"]


def test_missing_measurements_are_stated():
    assert make_table(["task"], []) == "*Not measured yet.*"


def test_every_figure_names_known_tasks_and_methods():
    for figure in FIGURES.values():
        known = {method for task in figure.tasks for method in TASKS[task].methods}
        assert set(figure.tasks) <= set(TASKS)
        assert known.issuperset(figure.methods), figure.name


def test_the_map_of_the_paper_lists_measurements(runs):
    named = [{**run, "task": "mnist-mlp"} for run in runs]
    lines = {line.split(" | ")[0]: line for line in tabulate_figures(named, {}, {}).splitlines()}
    assert "--figure 5a" in lines["| 5a"]
    assert "fgmt 53.0 ± 1.4" in lines["| 5a"]
    assert "not yet" in lines["| 5b"]
    assert "on a GPU machine" in lines["| 5c"]
    cosines = {"mnist-mlp-64": [{"identity": 0.1, "matched": 0.5}]}
    assert "64: 0.10 → 0.50" in tabulate_figures([], cosines, {})


def test_variants_are_known_and_fine_tunings_are_recorded_to_their_end():
    for task in TASKS.values():
        assert {twist for method in task.methods for twist in method.split("+")[1:]} <= set(TWISTS)
        assert task.points[0] == 0
        assert task.points[-1] == task.tuning.steps
        assert set(task.after) <= set(task.methods)
        assert all(task.after[method] <= task.methods[method] for method in task.after)
        assert not any(method.endswith("+actual") for method in task.methods) or task.record


def test_all_markers_of_the_results_page_are_closed():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    begins = re.findall(r"<!-- (?!end of )(\S+) -->", text)
    assert begins
    assert begins == re.findall(r"<!-- end of (\S+) -->", text)
