"""Several ports beside each other: read them, find what differs, average what is repeated."""

from hf_retarget.comparison.groups import Group, PortComparison, Spread, compare_ports
from hf_retarget.comparison.runs import Run, read_runs

__all__ = ["Group", "PortComparison", "Run", "Spread", "compare_ports", "read_runs"]
