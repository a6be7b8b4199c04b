"""A sample of the campaign: kills, two runs at once, signals, power cuts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_is_lost():
    command = [sys.executable, Path(__file__).with_name("campaign.py"), "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| 0 |") == 5, done.stdout
