"""What a person who watches sees: bars on a terminal, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from hf_retarget.cli.progress import TerminalProgress, watch


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


def test_on_a_real_terminal_only_the_lines_remain():
    code = """
from hf_retarget.cli.progress import watch
with watch(False) as progress:
    for step in progress.track(range(2), "matching"):
        progress._bars.refresh()
        progress.say(f"step {step} done")
print("result")
"""
    ours, theirs = pty.openpty()
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux says that a terminal has no more writers
        pass
    os.close(ours)
    text = shown.decode()
    assert process.stdout == b"result\n"
    assert "matching" in text
    assert "step 0 done" in text
    assert text.rindex("\x1b[2K") > text.rindex("matching"), "the bar was not erased"
