"""A finished folder on the Hub: its card, one commit with all its files, and the proof that they arrived."""

from hf_retarget.publish.destination import Destination, check_destination
from hf_retarget.publish.push import Pushed, push_folder

__all__ = ["Destination", "Pushed", "check_destination", "push_folder"]
