"""Data from a failing Hub: retried with success, or one line with the next step."""

from __future__ import annotations

from io import BytesIO

from loopback_hub import Fault, Hub

LOAD = """
import datasets
from hf_retarget.data import Preprocess, load_data
from hf_retarget.recipe.options import DataOptions
datasets.disable_progress_bars()
gray = Preprocess.of({"input_size": (1, 8, 8)})

def load(name):
    return len(load_data(f"bob/{name}", DataOptions(), gray).train)

"""
ALL = """
answer([[load(name) for name in ("busy", "limited", "reset", "cut")],
        {name: failure(load, name) for name in ("down", "patient", "gated", "private")}])
"""


def test_hub_failures_are_retried_or_explained(hub: Hub, table) -> None:
    files = {}
    for split, count in (("train", 60), ("test", 21)):
        buffer = BytesIO()
        table(count).to_parquet(buffer)
        files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    for name in ("busy", "limited", "reset", "cut", "down", "patient", "gated", "private"):
        hub.repository(f"bob/{name}", files, kind="dataset", private=name == "private", gated=name == "gated" or None)
    for fault in (
        *(Fault(route, containing="bob/busy", status=503) for route in ("info", "tree", "paths_info", "resolve")),
        Fault("info", containing="bob/limited", status=429, headers={"Retry-After": "1"}),
        Fault("download", containing="bob/reset", cut_answer=2000, reset=True),
        Fault("download", containing="bob/cut", cut_answer=2000),
        Fault("*", containing="bob/down", status=503, times=None),
        Fault("*", containing="bob/patient", status=429, headers={"Retry-After": "3600"}, times=None),
    ):
        hub.inject(fault)
    loaded, refused = hub.client(token="hf_ada_write", HF_RETARGET_HUB_PATIENCE="4").ask(LOAD + ALL)
    assert loaded == [54, 54, 54, 54]
    assert refused["down"].endswith("it is busy or has a fault (503) for 4 s; try again later")
    assert refused["patient"].endswith("too many requests (429) and asks to wait 3600 s; try again later")
    assert refused["gated"].startswith("DataError: 'bob/gated' is gated: accept its terms on the Hub, then log in")
    assert "doesn't exist on the Hub or cannot be accessed" in refused["private"]
    with hub.down():
        client = hub.client(token="hf_ada_write", HF_RETARGET_HUB_PATIENCE="1")
        cached, absent = client.ask(LOAD + 'answer([load("busy"), failure(load, "none")])')
    assert cached == 54, "from the cache"
    assert absent.endswith("no connection for 1 s; try again later")
