"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

DEBUG = "hf_retarget.debug"
"""The key in ``click.Context.meta`` that says whether a known error shows its traceback."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def debug_option(command: _Function) -> _Function:
    """Add ``--debug``; the group reads it when something fails."""
    option = click.option(
        "--debug",
        is_flag=True,
        envvar="HF_DEBUG",
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, _, value: ctx.meta.__setitem__(DEBUG, value),
        help="Show the traceback of an error (also: HF_DEBUG=1).",
    )
    return option(command)
