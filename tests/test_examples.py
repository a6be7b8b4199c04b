"""The examples in docs/examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_retarget as rt

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.parametrize("name", ["own_training_loop", "transformers_trainer"])
def test_an_example_records_ports_and_saves(name, tmp_path):
    if name == "transformers_trainer":
        pytest.importorskip("transformers")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"saved to {tmp_path / 'ported'}" in done.stdout
    assert len(rt.TrajectoryRecorder.load(tmp_path / "trajectory")) == 4
    assert (tmp_path / "ported" / "model.safetensors").is_file()


def test_the_notebook_runs_in_a_kernel_and_shows_progress(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "port.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert "old base" in shown[3]
    assert "head: keep" in shown[3], "progress by default"
    assert "loading the model" in shown[3], "bars, too"
    assert "head: zero" not in shown[3], "and none if quiet"
    assert "hf-retarget finetune demo/ported" in shown[5]
    assert "ensemble of 2" in shown[8]
    assert (tmp_path / "demo" / "ported" / "report.html").is_file()


def test_the_public_names_are_listed():
    listed = dir(rt)
    assert {"port", "finetune", "evaluate", "check", "compare", "convert", "TrajectoryRecorder"} <= set(listed)
    assert not [name for name in listed if name.startswith("_") and not name.startswith("__")]
