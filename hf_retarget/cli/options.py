"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from hf_retarget.names import PRECISIONS

DEBUG = "hf_retarget.debug"
"""The key in ``click.Context.meta`` that says whether a known error shows its traceback."""

_DESTINATION = ("private", "revision", "message", "create_pr", "replace_card")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _together(*options: Decorator) -> Decorator:
    """One decorator that adds several options, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):  # the last one added comes first in the help
            command = option(command)
        return command

    return add


def complete_paths(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let a shell complete files and folders, where names are possible, too."""
    return [CompletionItem(incomplete, type="file")]


def model_argument(name: str, **options: Any) -> Decorator:
    """An argument that is a model."""
    return click.argument(name, shell_complete=complete_paths, **options)


def model_option(flag: str, **options: Any) -> Decorator:
    """An option that takes a model."""
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
    callback=lambda ctx, _, value: ctx.meta.__setitem__(DEBUG, value),  # the group reads it when something fails
    help="Show the traceback of an error (also: HF_DEBUG=1).",
)
token_option = click.option("--token", metavar="TEXT", callback=_read_token, help="Token for the Hub (also: HF_TOKEN).")
arch_option = click.option(
    "--arch", metavar="NAME", help="Architecture of a weight file: a timm name, or module:factory."
)
allow_pickle_option = click.option(
    "--allow-pickle", is_flag=True, help="Read .pth, .pth.tar, .pt and .bin files, too (tensors and plain values only)."
)
model_options = _together(
    arch_option,
    allow_pickle_option,
    click.option(
        "--preprocess",
        metavar="HOW",
        help="What is done to images: none, or a JSON file with a timm data configuration (the model's if not given).",
    ),
    token_option,
)
"""How references to models are read."""

_BASES = {
    "--src-base": "Old base, where the fine-tuning started.",
    "--src-ft": "Tuned model: the old base after fine-tuning, or a PEFT adapter of it.",
    "--new-base": "New base, to which the fine-tuning moves.",
}
_force = click.option("--force-base", is_flag=True, help="Take an adapter that names another base than --src-base.")
bases_options, optional_bases = (
    _together(*(model_option(name, required=needed, help=text) for name, text in _BASES.items()), _force)
    for needed in (True, False)
)
"""The models of a port."""


def require(**values: Any) -> None:
    """Refuse options that are missing, where only other options tell that they are needed."""
    for name, value in values.items():
        if not value:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.")


num_classes_option = click.option(
    "--num-classes", type=click.IntRange(min=1), help="Classes that the model has now, if its files do not tell."
)
run_options = _together(
    click.option("--device", metavar="NAME", help="Where to run: cpu, cuda, mps (found if not given)."),
    click.option(
        "--precision", type=click.Choice(PRECISIONS), default="no", show_default=True, help="Mixed precision."
    ),
    click.option(
        "--num-workers",
        "workers",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Processes that read images; the result does not depend on it.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress."),
)
"""Where and how work runs."""

lock_option = click.option(
    "--no-lock",
    "lock",
    flag_value=False,
    default=True,
    help="Do not lock DIR, where the file system has no locks: no other run may write there.",
)
output_options = _together(
    click.option("--resume", is_flag=True, help="Continue the run for DIR that was interrupted."),
    click.option("--overwrite", is_flag=True, help="Replace what is in DIR, and forget an interrupted run."),
    lock_option,
)
"""What happens to an earlier result."""


def destination_options(revision: str) -> Decorator:
    """Add how to push, with `revision` as the option for the branch.

    The command receives the fields of a `hf_retarget.publish.Destination`.
    """
    return _together(
        click.option("--private", is_flag=True, help="Make the repository private, if it is new."),
        click.option(revision, "revision", metavar="BRANCH", help="Branch to push to, made if need be [main]."),
        click.option("--commit-message", "message", metavar="TEXT", help="What the commit says."),
        click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the branch."),
        click.option("--replace-card", is_flag=True, help="Replace a README.md that is there; else it is kept."),
    )


def push_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--push-to-hub`` and how to push; the command receives all of it as `destination`, or None."""

    @wraps(command)
    def with_destination(*arguments: Any, push_to_hub: str | None, **options: Any) -> Any:
        destination = {name: options.pop(name) for name in _DESTINATION}
        if push_to_hub is None and any(destination.values()):
            raise click.UsageError("--push-to-hub is missing: the options about pushing need a repository.")
        destination = {"repository": push_to_hub, **destination}
        return command(*arguments, destination=destination if push_to_hub else None, **options)

    add = click.option("--push-to-hub", metavar="REPO", help="Push the result to this repository of the Hub.")
    return add(destination_options("--hub-revision")(with_destination))


# ---- interruptions


class Terminated(KeyboardInterrupt):
    """SIGTERM: the command ends as after Ctrl-C, with its state kept and temporary files removed."""


class Interrupted(click.ClickException):
    """The last line of a command that a signal ended, and the exit code that shells expect of it."""

    def __init__(self, signal: KeyboardInterrupt, advice: str = "") -> None:
        super().__init__(f"interrupted{advice}")
        self.exit_code = 143 if isinstance(signal, Terminated) else 130  # type: ignore[misc]  # as click's own do


@contextmanager
def resumable(advice: str = "; the same command with --resume continues") -> Iterator[None]:
    """Say, when the work is interrupted, that it can be continued.

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
