"""The report of a port, written beside the model: what port.json says, made visible."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_retarget.graph import PermutationGraph
from hf_retarget.inspection import draw_fit
from hf_retarget.report import compose_report


def write_report(
    folder: Path, document: dict[str, Any], graph: PermutationGraph, thumbnails: Mapping[int, bytes]
) -> None:
    """Write report.html and figures/. What cannot be drawn is named there and warned of; the model does not suffer."""
    try:
        report = compose_report(document, thumbnails, _draw_graph(document, graph))
    except Exception as error:  # whatever it is: hours of work are worth more than a page about them
        warnings.warn(f"no report.html: {type(error).__name__}: {error}; all figures are in port.json", stacklevel=2)
        return
    for problem in report.problems:
        warnings.warn(f"the report lacks a part: {problem}", stacklevel=2)
    report.save(folder)


def _draw_graph(document: dict[str, Any], graph: PermutationGraph) -> str:
    groups = (document.get("matching") or {}).get("groups", ())
    gains = {each["name"]: each["after"] - each["before"] for each in groups if each["after"] is not None}
    notes = {
        each["name"]: f"{each['moved']:.0%} moved"
        + (f", cosine {each['before']:.3f} → {each['after']:.3f}" if each["after"] is not None else "")
        for each in groups
    }
    return draw_fit(graph, document["inputs"]["target"]["architecture"], gains, notes)
