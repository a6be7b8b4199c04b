"""The full sweep: every timm family, and a hundred models drawn from all others (`make test-slow`; takes hours)."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
import timm

import hf_retarget as rt
from hf_retarget.models import empty_model, random_model

pytestmark = pytest.mark.slow

with (Path(__file__).parent / "families.csv").open(newline="") as file:
    FAMILIES = list(csv.DictReader(file))

OTHERS = random.Random(0).sample(sorted(set(timm.list_models()) - {row["model"] for row in FAMILIES}), 100)


def verify(name: str) -> rt.PermutationGraph:
    graph = rt.trace(empty_model(name))
    assert [str(unknown) for unknown in graph.unknown_operators] == []
    assert len(graph) > 0
    assert graph.share(1) > 0.75, "most parameters lie on a free axis"
    result = rt.verify(random_model(name), graph, draws=1, controls=2)
    assert result.passed, result.verdict
    return graph


def test_every_family_has_a_row():
    assert {row["module"] for row in FAMILIES} == set(timm.list_modules())


@pytest.mark.parametrize("row", FAMILIES, ids=[row["model"] for row in FAMILIES])
def test_family(row):
    graph = verify(row["model"])
    if row["groups"]:
        assert len(graph) == int(row["groups"])
        assert sum(bool(group.blocks) for group in graph) == int(row["per_block"])


@pytest.mark.parametrize("name", OTHERS)
def test_other(name):
    verify(name)
