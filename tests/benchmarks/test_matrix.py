"""A tiny matrix from end to end: its records, resuming, and the detection of changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from quality.basins import gather_corners, load_basins, survey_basin
from quality.bench import Bench
from quality.cosine import measure_cosine
from quality.document import compose_parts, fill_page
from quality.ensembles import compare_ensembles
from quality.runs import Run, list_runs, load_summaries, perform, perform_all
from quality.task import shorten
from quality.tasks import TASKS

from hf_retarget.document import read_document

OLD_PORT = Path(__file__).parents[1] / "data_files" / "port-v1" / "port.json"
TINY = replace(TASKS["tiny"], methods={**TASKS["tiny"].methods, "permuted-source": 1})


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    assert perform_all(list_runs(Bench(TINY, folder, say=lambda line: None))) == []
    return folder


def said(out: Path, task=TINY) -> list[str]:
    """The messages about remaining work."""
    lines: list[str] = []
    perform_all(list_runs(Bench(task, out, say=lines.append)))
    return lines


@pytest.fixture(autouse=True)
def no_records(monkeypatch, tmp_path):
    """Only the runs of these tests: the records of the repository are of other tasks."""
    monkeypatch.setattr("quality.runs.RECORDS", tmp_path / "records")


def test_every_run_leaves_its_figures(out):
    runs = load_summaries(out)
    assert {(run["method"], run["seed"]) for run in runs} == {
        ("naive", 0),
        ("naive", 1),
        ("fgmt", 0),
        ("fgmt", 1),
        ("oracle", 0),
        ("oracle", 1),
        ("fgmt+actual", 0),
        ("permuted-source", 0),
    }
    fgmt = next(run for run in runs if run["method"] == "fgmt")
    assert len(fgmt["validation"]) == 3
    assert fgmt["gradients"] == 2 * 3 * 1
    assert fgmt["price"] == 6 * 32 / 16
    assert [row["step"] for row in fgmt["plain"]] == [row["step"] for row in fgmt["after"]] == [0, 4, 12]
    assert all(0 <= value <= 1 for value in fgmt["test"].values())
    assert fgmt["after"][0]["test"] == pytest.approx(fgmt["test"]["port"])
    document = read_document(out / "tiny/runs/fgmt/seed-0/ported/port.json")
    assert (document.winner, document.recipe["port"]["method"]) == ("fgmt", "fgmt")
    assert fgmt["test"]["port"] == document.find("fgmt").test.top1


def test_related_tasks_share_bases_and_fine_tunings(out):
    first, second = (next(run for run in load_summaries(out) if run["seed"] == seed) for seed in (0, 1))
    assert first["pair"]["new"] == second["pair"]["old"]
    assert first["test"]["direct"] == second["test"]["source"]


def test_both_sides_use_the_same_minibatches_and_choose_on_validation(out):
    bench = Bench(TINY, out, say=lambda line: None)
    run = Run(bench, "fgmt", 0)
    for tune in (run._after, lambda steps, lr: bench.tune("seed-1", 1, lr, replace(TINY.tuning, steps=steps))):
        tried = {lr: tune(4, lr) for lr in TINY.tuning.lrs}
        assert {done["key"]["seed"] for done in tried.values()} == {1}
        best = max(tried, key=lambda lr: tried[lr]["curve"][-1]["validation"])
        rows = run.after() if tune == run._after else run.plain()
        assert rows[1]["lr"] == best
        assert rows[1]["test"] == tried[best]["curve"][-1]["test"]


def test_finished_runs_are_not_repeated(out):
    assert said(out) == []


def test_a_lost_run_is_repeated_with_the_same_result(out):
    path = out / "tiny/runs/fgmt/seed-1"
    before = (path / "ported/model.safetensors").read_bytes()
    (path / "done.json").unlink()
    assert said(out) == ["tiny: fgmt, seed 1"]
    assert (path / "ported/model.safetensors").read_bytes() == before


def test_a_changed_task_reuses_what_did_not_change(out):
    changed = replace(TINY, steps=2, methods={"fgmt": 1}, after={}, record=False)
    assert said(out, changed)[0] == "tiny: fgmt, seed 0"
    assert said(out) != []  # and back


def test_a_failing_run_is_reported_and_the_others_continue(out):
    lines: list[str] = []
    wrong = replace(TINY, name="wrong", family="tiny", head="own", methods={"naive": 1}, after={})
    failed = perform_all(list_runs(Bench(wrong, out, say=lines.append)))
    assert len(failed) == 1
    assert "needs heads of one size" in failed[0]
    assert lines[-1] == failed[0]


def test_runs_of_an_older_version_are_read(out):
    """A finished run with port.json of version 1 is not repeated."""
    run = Run(Bench(TINY, out, say=lambda line: None), "fgmt", 0)
    before = perform(run)
    path = run.kept.folder / "ported" / "port.json"
    text = path.read_text()
    try:
        path.write_text(OLD_PORT.read_text())
        found = perform(run)
    finally:
        path.write_text(text)
        perform(run)
    old = json.loads(OLD_PORT.read_text())
    assert found["test"]["port"] == old["test"]["port"]["top1"]
    assert found["validation"] == [step["top1"] for step in old["steps"]]
    assert found["gradients"] == old["gradients"]["port"]
    assert (found["head"], found["seconds"]["matching"]) == (old["head"]["policy"], old["seconds"]["matching"])
    assert found["after"] == before["after"]


def test_a_reused_permutation_takes_no_gradients(out):
    task = replace(TINY, name="again", family="tiny", lender="tiny", methods={"fgmt+borrowed": 1}, after={})
    lines: list[str] = []
    run = perform(Run(Bench(task, out, say=lines.append), "fgmt+borrowed", 0))
    assert lines == ["again: fgmt+borrowed, seed 0"], "the lender's port exists already"
    assert run["gradients"] == 0
    assert run["test"]["control"] is None
    borrowed, lent = (
        out / name / "runs" / method / "seed-0/ported"
        for name, method in (("again", "fgmt+borrowed"), ("tiny", "fgmt"))
    )
    assert (borrowed / "permutation.safetensors").read_bytes() == (lent / "permutation.safetensors").read_bytes()


def test_cosine_and_ensembles_use_the_same_runs(out):
    bench = Bench(TINY, out, say=lambda line: None)
    found = measure_cosine(bench, 0)
    assert found["matched"] > found["identity"]
    (row,) = [row for row in compare_ensembles(load_summaries(out), out) if row["method"] == "fgmt"]
    assert row["members"] == 2
    assert set(row["after"]) == {0, 4, 12}


def test_the_corners_of_a_plane_are_three_networks(out):
    bench = Bench(TINY, out, say=lambda line: None)
    corners = gather_corners(bench)
    assert list(corners) == ["direct", "ported", "source"]
    assert len({float(net.hidden.weight.detach().sum()) for net in corners.values()}) == 3
    assert "barrier from direct to ported" in survey_basin(bench)
    assert set(load_basins(out)["tiny"][0]["barriers"]) == {"ported", "source"}


def test_pages_are_filled_between_their_markers_idempotently(out, tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Mine\n<!-- ports -->\nold\n<!-- end of ports -->\nstays\n")
    parts = compose_parts(out, tmp_path / "images", page, tasks=("tiny",))
    assert fill_page(page, parts) == ["ports"]
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Mine\n")
    assert text.endswith("stays\n")
    assert "| `tiny` |" in text
    assert "![steps-tiny](images/steps-tiny.png)" in text
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    fill_page(page, compose_parts(out, tmp_path / "images", page, tasks=("tiny",)))
    assert page.read_text() == text
    assert {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()} == pictures


def test_no_page_loses_figures(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- figures -->\n| 5b | tiny: fgmt 14.0 |\n<!-- end of figures -->\n")
    assert fill_page(page, {"figures": "| 5b | tiny: not yet |"}) == []
    assert fill_page(page, {"figures": "| 5b | tiny: fgmt 15.0 |"}) == ["figures"]
    assert "15.0" in page.read_text()


def test_shortened_tasks_keep_their_methods():
    for task in TASKS.values():
        brief = shorten(task)
        assert set(brief.methods) == set(task.methods)
        assert brief.seeds == 1


def test_a_single_run_records_its_origin(out):
    summary = perform(Run(Bench(TINY, out, say=lambda line: None), "naive", 0))
    assert (summary["task"], summary["method"], summary["seed"]) == ("tiny", "naive", 0)


def command() -> object:
    import importlib.util

    path = Path(__file__).resolve().parents[2] / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality_command", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet"], "there is no task 'resnet'"),
        (["--figure", "12"], "there is no figure '12'"),
        (["--figure", "5c"], "needs a GPU machine"),
        ([], "name a task"),
    ],
)
def test_bad_options_are_explained(arguments, message):
    answer = CliRunner().invoke(command(), arguments)
    assert answer.exit_code
    assert message in answer.output


def test_the_command_lists_tasks_with_an_estimate():
    answer = CliRunner().invoke(command(), ["tiny", "--list"])
    assert "tiny" in answer.output
    assert "min" in answer.output
