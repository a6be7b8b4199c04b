"""Devices and precision, as accelerate gives them, and memory, as the system does."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hf_retarget.errors import RetargetError
from hf_retarget.run import choose_device


def test_precision_may_change_within_a_process():
    assert choose_device("cpu", "no").mixed_precision == "no"
    assert choose_device("cpu", "bf16").mixed_precision == "bf16"
    assert choose_device("cpu", "no").mixed_precision == "no"


def test_what_is_not_there_is_named():
    with pytest.raises(RetargetError, match="unknown precision 'half'; choose one of no, bf16, fp16"):
        choose_device("cpu", "half")
    with pytest.raises(RetargetError, match="device 'tpu' is not available"):
        choose_device("tpu")


TWO = """
from hf_retarget.run import choose_device, in_main_process
from hf_retarget.errors import PublishError

def fail(error):
    raise error

def caught(error):
    try:
        in_main_process(lambda: fail(error))
    except Exception as seen:
        return f"{type(seen).__name__}: {seen}"

chosen = choose_device()
seen = [chosen.num_processes, in_main_process(lambda: "done"), caught(PublishError("no")), caught(KeyError("k"))]
with open(f"{__file__}.{chosen.process_index}", "w") as file:
    print(*seen, sep=", ", file=file)
"""


def test_processes_work_together_without_being_told_the_device_and_fail_together(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [(tmp_path / f"two.py.{index}").read_text() for index in (0, 1)] == [
        "2, done, PublishError: no, KeyError: 'k'\n",
        "2, None, PublishError: no, RetargetError: the first process failed: KeyError: 'k'\n",
    ]


FREE = """
import sys, torch
from hf_retarget.run import return_memory

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

torch.ones(5 << 20)  # freed again: from now on, glibc keeps what is smaller
if sys.argv[1] == "return":
    return_memory()
large, small = [], []
for _ in range(40):
    large.append(torch.ones(2 << 20))
    small.append(torch.ones(1 << 17))
before = resident()
large.clear()
print((before - resident()) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory like this")
def test_large_tensors_return_to_the_system_when_they_are_freed():
    given_back = {
        how: int(subprocess.run([sys.executable, "-c", FREE, how], check=True, capture_output=True, text=True).stdout)
        for how in ("keep", "return")
    }
    assert given_back["return"] > 250 > given_back["keep"]  # of 320 MB
