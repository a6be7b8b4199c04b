"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from hf_retarget.names import PRECISIONS

DEBUG = "hf_retarget.debug"
"""Key in ``click.Context.meta``: whether a known error shows its traceback."""

_DESTINATION = ("private", "revision", "message", "create_pr", "replace_card")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _together(*options: Decorator) -> Decorator:
    """Combine several options into one decorator, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):  # the last one added is listed first
            command = option(command)
        return command

    return add


def complete_paths(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let shells complete paths, for parameters that accept names as well."""
    return [CompletionItem(incomplete, type="file")]


def model_argument(name: str, **options: Any) -> Decorator:
    """A click argument for a model."""
    return click.argument(name, shell_complete=complete_paths, **options)


def model_option(flag: str, **options: Any) -> Decorator:
    """A click option for a model."""
    return click.option(flag, metavar="MODEL", shell_complete=complete_paths, **options)


def _read_token(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from hf_retarget.hub import clean_token

    return clean_token(value)


debug_option = click.option(
    "--debug",
    is_flag=True,
    envvar="HF_DEBUG",
    expose_value=False,
    is_eager=True,
    callback=lambda ctx, _, value: ctx.meta.__setitem__(DEBUG, value),  # read by the group on errors
    help="Show the traceback of an error (also: HF_DEBUG=1).",
)
token_option = click.option("--token", metavar="TEXT", callback=_read_token, help="Token for the Hub (also: HF_TOKEN).")
arch_option = click.option(
    "--arch", metavar="NAME", help="Architecture of a weight file: a timm name, or module:factory."
)
allow_pickle_option = click.option(
    "--allow-pickle", is_flag=True, help="Also read .pth, .pth.tar, .pt and .bin files (tensors and plain values only)."
)
model_options = _together(
    arch_option,
    allow_pickle_option,
    click.option(
        "--preprocess",
        metavar="HOW",
        help="Preprocessing: none, or a JSON file with a timm data configuration (default: the model's).",
    ),
    token_option,
)
"""How to read references to models."""

_BASES = {
    "--src-base": "Old base, where the fine-tuning started.",
    "--src-ft": "Tuned model: the old base after fine-tuning, or a PEFT adapter of it.",
    "--new-base": "New base, to which the fine-tuning moves.",
}
_force = click.option("--force-base", is_flag=True, help="Accept an adapter that names a base other than --src-base.")
bases_options, optional_bases = (
    _together(*(model_option(name, required=needed, help=text) for name, text in _BASES.items()), _force)
    for needed in (True, False)
)
"""The models of a port."""


def require(**values: Any) -> None:
    """Refuse missing options that are required only in combination with others."""
    for name, value in values.items():
        if not value:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.")


num_classes_option = click.option(
    "--num-classes", type=click.IntRange(min=1), help="Number of classes of MODEL, if its files do not tell."
)
run_options = _together(
    click.option("--device", metavar="NAME", help="Where to run: cpu, cuda, mps (default: detected)."),
    click.option(
        "--precision", type=click.Choice(PRECISIONS), default="no", show_default=True, help="Mixed precision."
    ),
    click.option(
        "--num-workers",
        "workers",
        type=click.IntRange(min=0, max=256),
        default=0,
        show_default=True,
        help="Processes that load images; results do not depend on it.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress."),
)
"""Where and how to run."""

lock_option = click.option(
    "--no-lock",
    "lock",
    flag_value=False,
    default=True,
    help="Do not lock DIR, for file systems without locks; make sure that no other run writes there.",
)
output_options = _together(
    click.option("--resume", is_flag=True, help="Continue the interrupted run for DIR."),
    click.option("--overwrite", is_flag=True, help="Replace DIR, and discard an interrupted run."),
    lock_option,
)
"""How to treat an earlier result."""


def destination_options(revision: str) -> Decorator:
    """Options for pushing, with `revision` as the flag for the branch.

    The command receives the fields of a `hf_retarget.publish.Destination`.
    """
    return _together(
        click.option("--private", is_flag=True, help="Make a new repository private."),
        click.option(revision, "revision", metavar="BRANCH", help="Branch to push to, created if necessary [main]."),
        click.option("--commit-message", "message", metavar="TEXT", help="Commit message."),
        click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the branch."),
        click.option("--replace-card", is_flag=True, help="Replace an existing README.md, which is kept by default."),
    )


def push_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--push-to-hub`` and its options; the command receives them as `destination`, or None."""

    @wraps(command)
    def with_destination(*arguments: Any, push_to_hub: str | None, **options: Any) -> Any:
        destination = {name: options.pop(name) for name in _DESTINATION}
        if push_to_hub is None and any(destination.values()):
            raise click.UsageError("--push-to-hub is missing: options for pushing need a repository.")
        destination = {"repository": push_to_hub, **destination}
        return command(*arguments, destination=destination if push_to_hub else None, **options)

    add = click.option("--push-to-hub", metavar="REPO", help="Push the result to this Hub repository.")
    return add(destination_options("--hub-revision")(with_destination))


# ---- interruptions


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM: the command ends as after Ctrl-C, keeping its state and removing temporary files."""


class Interrupted(click.ClickException):
    """The last line of a command that was ended by a signal, with the exit code shells expect."""

    def __init__(self, signal: KeyboardInterrupt, advice: str = "") -> None:
        super().__init__(f"interrupted{advice}")
        self.exit_code = 143 if isinstance(signal, Terminated) else 130  # type: ignore[misc]  # as in click's own exceptions


@contextmanager
def resumable(advice: str = "; the same command with --resume continues") -> Iterator[None]:
    """On interruption, end with advice on how to continue.

    Example:
        >>> with resumable():
        ...     raise KeyboardInterrupt
        Traceback (most recent call last):
        ...
        hf_retarget.cli.options.Interrupted: interrupted; the same command with --resume continues
    """
    try:
        yield
    except KeyboardInterrupt as signal:
        raise Interrupted(signal, advice) from None
