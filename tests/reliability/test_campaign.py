"""The campaign: a sample of kills, errors, power cuts, signals and pairs of runs; all of it with `-m slow`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")
SAMPLE = 11
"""How many campaigns the sample has."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="calls are watched on Linux, with a C compiler"
)


def run(*arguments: str, seconds: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, CAMPAIGN, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("names", [("kill", "two", "signals"), ("fail", "recovery", "power")], ids=["kills", "errors"])
def test_nothing_is_lost(names):
    tallies = run("--quick", *names, seconds=290).splitlines()[2:]
    assert len(tallies) == (3 if "kill" in names else SAMPLE - 3)
    assert all(each.endswith("| 0 |") for each in tallies), tallies


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kill", "exchange", "fail-short", "fail-finetune", "fail-streamed", "fail-port-all", "fail-push"]
)
def test_nothing_is_lost_whichever_call_fails(name):
    run(name, seconds=3500)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recovery", "power-short", "power-finetune", "power-streamed", "power-port-all"])
def test_nothing_is_lost_whenever_the_power_goes(name):
    run(name, seconds=3500)
