"""Devices and precision, as accelerate gives them."""

from __future__ import annotations

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
