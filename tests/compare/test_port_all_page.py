"""`port-all --collect`: the results of all parts in one table and one page that recommends an action for each."""

from __future__ import annotations

import json
import os

import pytest
from chromium import PROGRAM, browse
from click.testing import CliRunner, Result

from hf_retarget.advice import choose_action
from hf_retarget.cli import main
from hf_retarget.document import parse_document

NASTY = "javascript:alert('x')<script>"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["port-all", "--collect", *map(str, arguments)])


def entry(contender, name, top1, role="beside", lead=None, **more):
    return contender(name, top1, role) | {"lead": None if lead is None else {"value": lead, "error": 0.01}} | more


@pytest.mark.parametrize(
    ("winner", "top1", "others", "action"),
    [
        ("naive-line", 0.75, {"tuned": 0.76, "plain": 0.69, "head": 0.67}, "port"),
        ("naive-line", 0.75, {"tuned": 0.90, "plain": 0.69, "head": 0.67}, "port"),
        ("naive-line", 0.75, {"tuned": 0.76, "plain": 0.76, "head": 0.76}, "port"),  # not shown to differ
        ("head", 0.75, {"tuned": 0.75, "plain": 0.70}, "fit a head"),
        ("head", 0.75, {"tuned": 0.85, "plain": 0.70}, "keep"),
        ("naive-line", 0.60, {"tuned": 0.76, "head": 0.77, "plain": 0.70}, "fit a head"),
        ("naive-line", 0.60, {"tuned": 0.76, "head": 0.70, "plain": 0.79}, "retrain"),
        ("naive-line", 0.60, {"tuned": 0.80, "head": 0.70, "plain": 0.72}, "keep"),
        ("fgmt", 0.60, {"tuned": 0.80, "naive": 0.79}, "port"),  # without matching, which is a port, too
    ],
)
def test_recommended_actions(document, contender, winner, top1, others, action):
    rows = [entry(contender, winner, top1, "port")]
    rows += [entry(contender, name, value, lead=top1 - value) for name, value in others.items()]
    assert choose_action(parse_document(document(contenders=rows, winner=winner))) == action


def test_a_second_set_of_images_can_outweigh_keeping(document, contender):
    def also(top1):
        return {"top1": top1, "top5": None, "loss": None, "images": 100}

    rows = [
        entry(contender, "head", 0.70, "port", also=also(0.6)),
        entry(contender, "tuned", 0.80, lead=-0.1, also=also(0.5)),
    ]
    assert choose_action(parse_document(document(contenders=rows, winner="head"))) == "fit a head"
    rows[1]["also"] = also(0.7)
    assert choose_action(parse_document(document(contenders=rows, winner="head"))) == "keep"


def test_a_port_without_images_is_not_scored(document):
    assert choose_action(parse_document(document(contenders=[], winner=""))) == "port, not scored"


def summarise(folder, number, count, *models):
    known = [{"model": f"me/{name}", "folder": name, "status": status} | more for name, status, more in models]
    (folder / f"port-all-{number}-of-{count}.json").write_text(json.dumps({"models": known}))


def test_parts_are_joined(port, tmp_path):
    out = port("birds", 0.6).parent
    port("flowers", 0.7, verdict="Worth it: </script>")
    port("unlisted")
    summarise(out, 0, 3, ("birds", "ported", {}), ("cars", "failed", {"error": "no such <model>"}))
    summarise(out, 1, 3, ("flowers", "waiting", {}), ("pets", "waiting", {}), ("gone", "ported", {}))
    result = run("--out", out)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in lines[1:7]}
    assert rows == {
        "me/birds": "already",
        "me/cars": "failed",
        "me/flowers": "already",
        "me/gone": "failed",
        "me/pets": "waiting",
        "unlisted": "already",
    }
    assert lines[0].split()[:4] == ["MODEL", "WHAT", "TO", "DO"]
    assert "part 2/3 has no result; run it with --shard 2/3" in lines
    assert "me/cars: no such <model>" in lines
    assert lines[-1] == f"3 of 6 ported, in {out}"
    page = (out / "port-all.html").read_text()
    assert 'href="./birds/report.html"' in page
    assert "no such &lt;model&gt;" in page
    assert "part 2/3 has no result" in page
    summary = json.loads((out / "port-all.json").read_text())
    assert [each["action"] for each in summary["models"]] == ["port", None, "port", None, None, "port"]
    summarise(out, 2, 3)
    again = run("--out", out, "--json")
    document = json.loads(again.stdout)
    assert (again.exit_code, document["problems"], len(document["models"])) == (1, [], 6)


def test_the_latest_division_counts(port):
    out = port("birds").parent
    summarise(out, 0, 4, ("birds", "failed", {"error": "then"}))
    os.utime(out / "port-all-0-of-4.json", (1, 1))
    summarise(out, 0, 2, ("birds", "ported", {}))
    summarise(out, 1, 2)
    assert run("--out", out).exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ('{"models": [{"model": 3}]}', "is damaged"),
        ('{"models": [{"model": "a", "folder": "../../etc", "status": "ported"}]}', "cannot be the name of a folder"),
        ("[]", "is damaged"),
    ],
)
def test_a_damaged_summary_gives_one_line(port, content, message):
    out = port("birds").parent
    (out / "port-all-0-of-2.json").write_text(content)
    result = run("--out", out)
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr
    assert not (out / "port-all.html").exists()


def test_a_damaged_port_counts_as_failed(port):
    out = port("birds").parent
    (out / "pets").mkdir()
    (out / "pets" / "port.json").write_text("{")
    result = run("--out", out)
    assert result.exit_code == 1
    assert "cannot be read" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 of 2 ported")


def test_an_empty_folder_and_wrong_usage_are_refused(tmp_path):
    for out in (tmp_path, tmp_path / "none"):
        result = run("--out", out)
        assert (result.exit_code, "there are no ports in" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
    assert run("--out", tmp_path, "--shard", "0/2").exit_code == 2
    assert run("--out", tmp_path, "--models", "a").exit_code == 2


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium")
def test_the_page_in_a_browser(port, tmp_path):
    out = port("birds").parent
    folder = port(NASTY)
    assert folder.is_dir()
    summarise(out, 0, 1, (NASTY, "ported", {"model": NASTY}))
    run("--out", out)
    page = (out / "port-all.html").read_text()
    assert "<script>alert" not in page
    assert 'href="./javascript%3Aalert' in page
    with browse(tmp_path) as browser:
        shown = browser.page()
        shown.resize(1280)
        shown.open(out / "port-all.html")
        assert shown.run("document.querySelectorAll('tbody tr').length") == 2
        assert shown.run("document.documentElement.scrollWidth <= innerWidth")
        links = shown.run("[...document.querySelectorAll('tbody a')].map(each => each.href)")
        assert all(link.startswith("file:///") for link in links), links
