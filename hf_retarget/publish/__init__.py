"""A finished folder on the Hub: its card, one commit with all its files, and the proof that they arrived."""

from hf_retarget.publish.push import Destination, Pushed, check_destination, push_folder
