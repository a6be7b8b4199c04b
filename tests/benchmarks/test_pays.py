"""The page on where a port pays is generated from the committed records, and a run leaves a record."""

from __future__ import annotations

import json
from pathlib import Path

import pays
import pytest
from quality import pairs
from quality.pairs import Onward, Pair
from quality.pays_page import read_records
from quality.rule import judge_rules, list_cases
from quality.tasks import TASKS

from hf_retarget.advice import RIGHT
from hf_retarget.contenders import find_contender

PAGE = Path(__file__).parents[2] / "docs" / "pays.md"


def test_the_page_agrees_with_the_records():
    assert PAGE.read_text("utf-8") == pays.write_tables(), "run: python benchmarks/pays.py --write docs/pays.md"


def test_the_hit_rate_that_check_names_is_that_of_the_records():
    judged = judge_rules(list_cases(read_records().runs))
    assert round(next(right for name, (_, right) in judged.items() if "check" in name), 2) == RIGHT


def test_records_name_known_pairs_and_contenders():
    records = [json.loads(path.read_text("utf-8")) for path in pays.RESULTS.glob("*.json")]
    assert records
    for each in records:
        assert each["pair"] in pays.PAIRS
        assert pays.PAIRS[each["pair"]].task in TASKS
        for name in each.get("contenders", ()):
            assert find_contender(name).name == name


def test_a_run_leaves_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "OUT", tmp_path)
    monkeypatch.setattr(pairs, "SNAPSHOTS", (2, 4))
    monkeypatch.setitem(pairs.PAIRS, "tiny", Pair("tiny", "seed-0", Onward(4, 0.01)))
    monkeypatch.setitem(pairs.PAIRS, "tiny-snapshot", Pair("tiny", "seed-0", Onward(2, 0.01, of=4)))
    found = pays.measure("tiny", 0, "labels")
    assert found["word"] == "same lineage"
    assert found["winner"] in found["contenders"]
    assert found["test"] == found["contenders"][found["winner"]]["test"]
    assert sum(found["flips"]) >= 0 < found["price"]
    for situation in ("plain-3", "distil-3", "rival-3"):
        assert 0 <= pays.train_plainly("tiny", 0, situation)["test"] <= 1
    early = pays.measure("tiny-snapshot", 0, "robust")
    assert 0 < early["drift"] < found["drift"]
    assert {"tuned", "plain"} <= set(early["contenders"])
    assert all(0 <= each["also"] <= 1 for each in early["contenders"].values())
    with pytest.raises(KeyError):
        pays.measure("nobody", 0, "labels")
