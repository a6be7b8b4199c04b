"""The rows of the tables: each bad input is refused in one line that says what is wrong, or accepted for a reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from faults.bench import Bench, Row
from faults.campaign import generated, rows

_SAMPLE = 40  # of so many generated rows, one runs in `make test`
_HEAVY = ("adapters", "graphs", "permutations", "resume folders", "trajectories")  # models are traced or trained
_SOME, _FEW = 3, 9  # of so many rows, and of so many of those areas, one runs there; all with `-m slow`


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("faults") / "bench")
    yield made
    made.close()


def test_every_row_has_a_name_of_its_own():
    names = [row.id for row in (*rows(), *generated())]
    assert len(set(names)) == len(names)


def test_there_are_many_rows():
    assert len(rows()) > 400
    assert len(list(generated())) > 1000
    assert all(row.says or row.code == 0 for row in rows()), "no row takes any error for the right one"


def _marked() -> Iterator[Any]:
    light, heavy = count(), count()
    for row in rows():
        later = next(heavy) % _FEW if row.area in _HEAVY else next(light) % _SOME
        yield pytest.param(row, id=row.id, marks=[pytest.mark.slow] if later else [])


@pytest.mark.parametrize("row", list(_marked()))
def test_row(bench: Bench, row: Row):
    problem = bench.find_problem(row)
    assert problem is None, problem


@pytest.mark.parametrize("row", list(generated())[::_SAMPLE], ids=lambda row: row.id)
def test_generated_row(bench: Bench, row: Row):
    problem = bench.find_problem(row)
    assert problem is None, problem


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_generated_rows(bench: Bench):
    problems = [problem for row in generated() if (problem := bench.find_problem(row))]
    assert not problems, "\n".join(problems)
