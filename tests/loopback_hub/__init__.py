"""A Hugging Face Hub on loopback, for tests and for trying things out: real HTTP, real clients, nothing patched.

    with Hub(folder) as hub:
        ada = hub.add_user("ada")
        hub.repository("ada/vit", {"config.json": b"{}"}, private=True)
        hub.fail("resolve", 503)
        hub.client(token=ada.token).python("…")

On its own: `PYTHONPATH=tests python -m loopback_hub --root FOLDER --port 8765`.
"""

from .accounts import User
from .client import Client
from .faults import Fault
from .hub import Hub
from .log import Record
from .repository import Commit, Entry, Repository

__all__ = ["Client", "Commit", "Entry", "Fault", "Hub", "Record", "Repository", "User"]
