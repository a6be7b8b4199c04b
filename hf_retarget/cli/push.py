"""``hf-retarget push``: push a finished folder to the Hub; also implements ``--push-to-hub`` of other commands."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import Interrupted, debug_option, destination_options, resumable, token_option
from hf_retarget.cli.show import echo, echo_json
from hf_retarget.errors import PublishError
from hf_retarget.progress import is_main_process, status, watch

if TYPE_CHECKING:
    from hf_retarget.publish import Destination

FORMAT = "hf-retarget/push/1"


_EXAMPLE = """\b
Examples:
  hf-retarget push ported/ birds --private
  hf-retarget push ported/ my-org/birds --revision v2
  hf-retarget push tuned/ their-org/birds --create-pr
"""


@click.command(epilog=_EXAMPLE)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repo")
@destination_options("--revision")
@click.option("--trajectory", is_flag=True, help="Also push the recorded trajectory.")
@click.option("--samples", is_flag=True, help="Also push a report that shows images which are not on the Hub.")
@click.option("--no-verify", is_flag=True, help="Do not download the weights to verify them.")
@token_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@debug_option
def push(
    folder: Path,
    repo: str,
    trajectory: bool,
    samples: bool,
    no_verify: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Push FOLDER, a finished port or fine-tuning, to the Hub.

    All files are pushed in one commit. REPO is owner/name, or just a name; it is created if necessary. Other files in
    it are kept. Files uploaded in an earlier attempt are not sent again. The token is that of hf auth login, HF_TOKEN
    or --token.
    """
    with status("starting"):
        from hf_retarget.publish import Destination, push_folder
    _show_bars(quiet)
    with resumable("; the same command continues without sending uploaded files again"), watch(quiet) as progress:
        what = {"trajectory": trajectory, "samples": samples, "verify": not no_verify}
        pushed = asdict(push_folder(folder, Destination(repo, **options), **what, progress=progress))
    if as_json:
        echo_json({"format": FORMAT} | pushed)
    else:
        print_pushed(pushed)


def check_push(options: dict[str, Any] | None, token: str | None) -> Destination | None:
    """Check the destination of --push-to-hub before the work begins, in the main process."""
    if options is None or not is_main_process():
        return None
    with status("asking the Hub"):
        from hf_retarget.publish import Destination, check_destination

        return check_destination(Destination(**options, token=token))


def push_result(folder: Path, destination: Destination | None, quiet: bool, as_json: bool) -> dict[str, Any]:
    """Push the finished folder, and return an entry for its JSON document; an error tells how to push it later."""
    if destination is None:
        return {}
    from hf_retarget.publish import push_folder

    _show_bars(quiet)
    try:
        with watch(quiet) as progress:
            pushed = asdict(push_folder(folder, destination, progress=progress))
    except (PublishError, KeyboardInterrupt) as error:
        later = f"The result is saved in '{folder}'; push it later: {describe_push(folder, destination)}"
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(error, f". {later}") from None
        raise PublishError(f"{error}. {later}") from error
    if not as_json:
        print_pushed(pushed)
    return {"pushed": pushed}


def describe_push(folder: Path, destination: Destination) -> str:
    """The command that pushes a folder, without the token.

    Example:
        >>> from hf_retarget.publish import Destination
        >>> describe_push(Path("my port"), Destination("ada/birds", private=True, message="A port"))
        "hf-retarget push 'my port' ada/birds --private --commit-message 'A port'"
    """
    words = ["hf-retarget", "push", str(folder), destination.repository]
    flags = {"private": "--private", "create_pr": "--create-pr", "replace_card": "--replace-card"}
    words += [flag for name, flag in flags.items() if getattr(destination, name)]
    for flag, value in (("--revision", destination.revision), ("--commit-message", destination.message)):
        words += [flag, value] if value else []
    return shlex.join(words)


def print_pushed(facts: dict[str, Any]) -> None:
    """Print the location of a pushed folder; `facts` are the fields of a `Pushed`."""
    where = facts["pull_request"] or facts["url"]
    branch = "" if facts["revision"] == "main" or facts["pull_request"] else f", branch {facts['revision']}"
    done = "Pushed to" if facts["new"] else "Already up to date:"
    echo(f"{done} {where}{branch} (commit {facts['commit'][:8]})")


def _show_bars(quiet: bool) -> None:
    """Show the Hub client's progress bars only on a terminal."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # exported without its type

    if quiet or not sys.stderr.isatty():
        disable_progress_bars()
