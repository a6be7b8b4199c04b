"""What a person who watches sees: bars on a terminal, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console

from hf_retarget.progress import TerminalProgress, watch
from hf_retarget.run import Run


@pytest.fixture
def screen() -> Console:
    return Console(file=StringIO(), force_terminal=True, width=120, height=40, _environ={})


def drawn(progress: TerminalProgress, screen: Console) -> str:
    """What is shown right now, without waiting for the next refresh."""
    screen.file = StringIO()
    progress._bars.refresh()
    return screen.file.getvalue()


def test_nested_bars_say_what_how_far_how_fast_and_how_long(screen):
    with TerminalProgress(console=screen) as progress:
        for step in progress.track([1, 2, 3], "matching"):
            for batch in progress.track(iter("abcd"), "minibatches", total=4):
                if (step, batch) == (2, "d"):
                    text = drawn(progress, screen)
    outer, inner = (line for line in text.splitlines() if "/" in line)
    assert "matching" in outer
    assert "1/3" in outer
    assert "  minibatches" in inner
    assert "3/4" in inner
    assert "/s" in inner
    assert "0:00:00" in inner
    assert "left" in inner


def test_bars_vanish_when_their_work_is_done_or_given_up(screen):
    with TerminalProgress(console=screen) as progress:
        for item in progress.track(range(9), "searching"):
            if item == 2:
                break
        with pytest.raises(ZeroDivisionError):
            list(progress.track((1 // item for item in (1, 0)), "dividing"))
        assert list(progress.track(range(3), "counting")) == [0, 1, 2]
        assert progress._bars.tasks == []
        assert not any(word in drawn(progress, screen) for word in ("searching", "dividing", "counting"))


def test_a_line_stays_as_it_is(screen):
    with TerminalProgress(console=screen) as progress:
        progress.say("kept [bold]3[/bold] of 4: " + "x" * 200)
    assert "kept [bold]3[/bold] of 4: " + "x" * 200 in screen.file.getvalue()


def test_rows_make_a_table_with_one_heading(screen):
    with TerminalProgress(console=screen) as progress:
        progress.row({"step": "1 of 2", "validation": "50.0%", "best": "★"}, "step 1 of 2: 50.0%")
        progress.row({"step": "2 of 2", "validation": "[b]", "best": ""}, "step 2 of 2")
        progress.say("something else")
        progress.row({"step": "1 of 2", "validation": "9.0%", "best": "★"}, "")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.file.getvalue())
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    heading = ["STEP", "VALIDATION", "BEST"]
    rows = [heading, ["1", "of", "2", "50.0%", "★"], ["2", "of", "2", "[b]"], ["something", "else"], heading]
    assert [line for line in lines if line in rows] == rows


def test_without_a_terminal_there_are_only_lines(capsys):
    with watch(quiet=False) as progress:
        assert list(progress.track(range(3), "counting")) == [0, 1, 2]
        progress.say("a note")
        progress.row({"step": "1", "best": "★"}, "step 1 is the best")
    shown = capsys.readouterr()
    assert shown.err == "a note\nstep 1 is the best\n"
    assert shown.out == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_quiet_is_quiet_and_so_is_every_process_but_the_first(rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with watch(quiet=rank == "0") as progress:
        assert list(progress.track(range(3), "counting")) == [0, 1, 2]
        progress.say("a note")
    assert capsys.readouterr() == ("", "")


def run_on_a_terminal(code: str) -> tuple[bytes, str]:
    """What a script prints to stdout, and what it shows on a terminal."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        with suppress(OSError):  # how Linux says that a terminal has no more writers
            while piece := os.read(ours, 4096):
                shown += piece
        printed = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    return printed, shown.decode()


def test_on_a_real_terminal_only_the_lines_remain():
    code = """
from hf_retarget.progress import watch
with watch(False) as progress:
    for step in progress.track(range(2), "matching"):
        progress._bars.refresh()
        progress.say(f"step {step} done")
print("result")
"""
    printed, text = run_on_a_terminal(code)
    assert printed == b"result\n"
    assert "matching" in text
    assert "step 0 done" in text
    assert text.rindex("\x1b[2K") > text.rindex("matching"), "the bar was not erased"


# ---- from Python


def test_from_python_a_bar_begins_and_ends_with_the_work(screen):
    progress = TerminalProgress(console=screen)
    for _ in progress.track([1, 2], "matching"):
        for _ in progress.track("ab", "minibatches"):
            text = drawn(progress, screen)
            assert progress._bars.live.is_started
    assert ("matching" in text, "minibatches" in text) == (True, True)
    assert not progress._bars.live.is_started


def test_from_python_progress_is_shown_where_somebody_watches(monkeypatch, capsys):
    Run().progress.say("nobody watches a test")
    monkeypatch.setattr("hf_retarget.run.is_watched", lambda: True)
    Run(quiet=True).progress.say("quiet")
    Run().progress.say("watched")
    monkeypatch.setenv("RANK", "1")
    Run().progress.say("of several processes, only the first")
    assert capsys.readouterr().err == "watched\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_script_on_a_terminal_shows_what_it_does(quiet):
    code = f"""
import timm, torch, hf_retarget as rt
items = [(torch.rand(3, 32, 32), n % 2) for n in range(40)]
rt.evaluate(timm.create_model('test_resnet', num_classes=2), {{'train': items, 'test': items}}, quiet={quiet})
"""
    _, text = run_on_a_terminal(code)
    assert ("loading the model" in text) is not quiet
