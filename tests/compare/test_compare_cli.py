"""`hf-retarget compare`: the table, the page, files and exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
from chromium import PROGRAM, browse
from click.testing import CliRunner, Result

from hf_retarget.cli import main

NASTY = "</script><script>alert('x')</script>\"'& مرحبا " + "long " * 40


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture
def ports(port):
    folder = port("fgmt-0", 0.50).parent
    port("fgmt-1", 0.60, port__seed=1)
    port("sign-0", 0.70, port__method="fgmt-sign")
    return folder


def test_the_command_prints_one_table_without_importing_torch(ports):
    code = "import sys; from hf_retarget.cli import main; main(standalone_mode=False); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "compare", str(ports)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120, check=True)
    head, fgmt, sign, torch = done.stdout.splitlines()
    assert head.startswith("GROUP      RUNS")
    columns = ("PORT", "TUNED MODEL", "NAIVE", "PLAIN", "FINE-TUNED FURTHER", "BEST STEP", "MINIBATCHES", "TIME")
    assert all(column in head for column in columns)
    assert "FGMT" not in head, "ports by different methods are in one column"
    assert fgmt.split()[:5] == ["fgmt", "2", "55.0", "±", "7.1%"]
    assert sign.split()[:3] == ["fgmt-sign", "1", "70.0%"]
    assert (torch, done.stderr) == ("False", "")


def test_files_and_json(ports, tmp_path):
    page, table = tmp_path / "out" / "compare.html", tmp_path / "out" / "compare.csv"
    result = run(ports / "fgmt-0", ports / "sign-0", "--html", page, "--csv", table, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["differing"] == ["port.method"]
    rows = list(csv.DictReader(table.open()))
    assert [row["group"] for row in rows] == ["fgmt", "fgmt-sign"]
    assert [row["method"] for row in rows] == ["fgmt", "fgmt-sign"]
    assert [float(row["top1 port"]) for row in rows] == [0.5, 0.7]
    assert [float(row["top1 plain"]) for row in rows] == [0.5, 0.5]
    assert rows[0]["port"] == str(ports / "fgmt-0")
    assert page.stat().st_size < 500_000


def test_damaged_ports_are_skipped_and_incomparable_ones_reported(ports, port, document):
    (ports / "broken").mkdir()
    (ports / "broken" / "port.json").write_text("{")
    models = document()["models"]
    port("other", models={**models, "target": {**models["target"], "reference": "newer"}})
    result = run(ports, ports / "missing")
    assert result.exit_code == 1
    told = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in told] == ["Left out", "Left out", "Warning"]
    assert "broken" in told[0]
    assert "missing" in told[1]
    assert "different new base" in told[2]
    assert len(result.stdout.splitlines()) == 4
    nothing = run(ports / "missing")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert nothing.stderr == f"Error: '{ports / 'missing'}' does not exist\n"


def test_usage_and_help(ports):
    assert run().exit_code == 2
    assert run("--help").stdout.rstrip().splitlines()[-1].strip().startswith("hf-retarget compare ")
    refused = run("--over", "magic", ports)
    assert refused.exit_code == 1
    assert "there is no field 'magic'" in refused.stderr


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")
def test_the_page_in_a_browser(ports, port, document, tmp_path):
    models = document()["models"]
    port("nasty", port__steps=7, models={**models, "tuned": {**models["tuned"], "reference": NASTY}}, verdict=NASTY)
    for number in range(7):
        port(f"more-{number}", 0.2 + 0.1 * number, port__grad_batches=number + 11, only=("fgmt", "naive"))
    assert run(ports, "--html", tmp_path / "page.html").exit_code == 0
    with browse(tmp_path) as browser:
        page = browser.page()
        page.resize(1100)
        page.open(tmp_path / "page.html")
        assert page.run("document.querySelectorAll('svg.chart').length") == 3
        assert page.run("document.querySelectorAll('script').length") == 1
        page.run("document.querySelector('#content svg.chart').focus()")
        page.press("ArrowRight")
        assert "55.0 ± 7.1%, 2 runs" in page.run("document.getElementById('tooltip').textContent")
        page.press("Escape")
        page.resize(380)
        assert page.run("document.documentElement.scrollWidth") <= 380
        assert page.complaints == []
        assert page.requests == []


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_only_earlier_pages_and_tables_are_overwritten(ports, tmp_path, option):
    document = ports / "fgmt-0" / "port.json"
    before = document.read_bytes()
    os.mkfifo(tmp_path / "pipe.html")
    for target in (document, tmp_path / "pipe.html"):
        result = run(ports, option, target)
        assert (result.exit_code, "name another file" in result.output) == (1, True)
    assert document.read_bytes() == before


def test_names_in_csv_are_not_formulas(ports, tmp_path):
    path = ports / "fgmt-0" / "port.json"
    content = json.loads(path.read_text())
    content["recipe"]["name"] = "=cmd|' /C calc'!A0"
    path.write_text(json.dumps(content))
    run(ports, "--csv", tmp_path / "table.csv")
    cells = [cell for row in csv.reader((tmp_path / "table.csv").open()) for cell in row]
    assert [cell for cell in cells if cell[:1] in "=+@" and cell] == []


def test_implausible_figures_count_as_damage(ports):
    path = ports / "fgmt-0" / "port.json"
    content = json.loads(path.read_text())
    content["seconds"] = {"matching": 1.7e308}
    path.write_text(json.dumps(content))
    result = run(ports)
    assert "(in 'seconds.matching')" in result.stderr
