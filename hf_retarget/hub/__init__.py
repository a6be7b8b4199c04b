"""Calls to the Hub: how long they are tried again, and what a refusal means. All parts that talk to it do so here."""

from hf_retarget.hub.patience import PATIENCE, GaveUp, ask
from hf_retarget.hub.words import clean_token, describe_gate, explain, explained, find_cause, token_was_refused

__all__ = [
    "PATIENCE",
    "GaveUp",
    "ask",
    "clean_token",
    "describe_gate",
    "explain",
    "explained",
    "find_cause",
    "token_was_refused",
]
