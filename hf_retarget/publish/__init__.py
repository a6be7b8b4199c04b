"""Pushing a finished folder to the Hub: its card, one commit with all files, and their verification."""

from hf_retarget.publish.push import Destination, Pushed, check_destination, push_folder
