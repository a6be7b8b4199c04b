"""The benchmarks are no package of ours: they are found beside the tests, after everything that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))  # last, so that coverage.py there does not hide the package of that name
