"""Devices and precision, as accelerate gives them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_retarget.devices import choose_device
from hf_retarget.errors import RetargetError


def test_precision_may_change_within_a_process():
    assert choose_device("cpu", "no").mixed_precision == "no"
    assert choose_device("cpu", "bf16").mixed_precision == "bf16"
    assert choose_device("cpu", "no").mixed_precision == "no"


def test_what_is_not_there_is_named():
    with pytest.raises(RetargetError, match="unknown precision 'half'; choose one of no, bf16, fp16"):
        choose_device("cpu", "half")
    with pytest.raises(RetargetError, match="device 'tpu' is not there"):
        choose_device("tpu")


def test_processes_work_together_without_being_told_the_device(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(
        "from hf_retarget.devices import choose_device\n"
        "chosen = choose_device()\n"
        "with open(f'{__file__}.{chosen.process_index}', 'w') as file: file.write(str(chosen.num_processes))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [(tmp_path / f"two.py.{index}").read_text() for index in (0, 1)] == ["2", "2"]
