"""Calls to the Hub: how long they are tried again, and what a refusal means. All parts that talk to it do so here."""

from hf_retarget.hub.patience import PATIENCE, GaveUp, ask
from hf_retarget.hub.verify import drop, fetch_whole, is_cached, is_whole, named_hash
from hf_retarget.hub.words import (
    clean_token,
    describe_gate,
    explain,
    explained,
    find_cause,
    is_trouble,
    token_was_refused,
)

__all__ = [
    "PATIENCE",
    "GaveUp",
    "ask",
    "clean_token",
    "describe_gate",
    "drop",
    "explain",
    "explained",
    "fetch_whole",
    "find_cause",
    "is_cached",
    "is_trouble",
    "is_whole",
    "named_hash",
    "token_was_refused",
]
