"""``hf-retarget port``: move a fine-tuning to a new base, and report whether that was worth it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.advice import KEEP, advise, choose_action, compare_times
from hf_retarget.cli.options import (
    bases_options,
    debug_option,
    model_options,
    output_options,
    push_options,
    resumable,
    run_options,
)
from hf_retarget.cli.push import check_push, push_result
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import (
    Row,
    describe_command,
    describe_time,
    echo,
    echo_json,
    echo_rows,
    hidden_data,
    print_curves,
    print_scores,
    print_table,
)
from hf_retarget.contenders import AUTO
from hf_retarget.document import read_document
from hf_retarget.errors import FinishedError
from hf_retarget.names import DTYPES, PORT, SIDES
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.words import number

if TYPE_CHECKING:
    from hf_retarget.porting.check import Plan
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget port --src-base old/ --src-ft tuned/ --new-base new/ --data cub
  hf-retarget port … --data pets --dry-run    # …: the three models, as above
  hf-retarget port … --data pets --steps 15 --finetune-steps 50 --out ported
  hf-retarget port … --data pets --permutation ported/ --out another
  hf-retarget port … --data none --text law.txt    # a language model
"""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT_ONLY = ("gradient_cache", "dtype", "resume", "overwrite", "lock")  # not needed for a plan


_COMMON = (
    "--out --method --steps --finetune-steps --permutation --also-data --arch --device --dry-run --resume --push-to-hub"
)


@click.command(cls=SectionedCommand, common=_COMMON, epilog=_EXAMPLE)
@bases_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New folder for the ported model (default: TUNED-on-BASE).",
)
@click.option(
    "--permutation",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Reuse the permutation of an earlier port (its folder, or the file), without gradients.",
)
@click.option("--tuned-target", metavar="MODEL", help="Real fine-tuning of the new base, to compare with.")
@click.option("--initial-head", type=_FILE, metavar="FILE", help="Initial head of the fine-tuning.")
@click.option(
    "--checkpoints",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Port along a recorded trajectory (its folder), or along checkpoints (repeat in order).",
)
@click.option(
    "--gradient-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Cache the gradients along the fine-tuning, for ports of it to other bases.",
)
@click.option("--also-data", metavar="DATA", help="Second set of images to score on, shown in a separate column.")
@click.option("--also-data-fit", is_flag=True, help="Also fit closed-form heads on its training images.")
@click.option("--text", type=_FILE, metavar="FILE", help="Texts (.txt, .jsonl) on which to score a language model.")
@click.option(
    "--force-relation", is_flag=True, help="With --data none, add the fine-tuning even to an independent base."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Type to store weights in (default: that of the new base).")
@click.option("--dry-run", is_flag=True, help="Only show what would be done, and what it would cost.")
@output_options
@push_options
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@recipe_options()
@debug_option
def port(
    recipe: Recipe,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
    out: Path | None,
    destination: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Move a fine-tuning to a new base of the same architecture.

    A MODEL is a timm name (resnet18.a1_in1k), a Hub id (org/name@revision), a folder, or a file with --arch. The
    folder DIR appears when everything is done.
    """
    options["checkpoints"] = options["checkpoints"] or None
    if out is None:
        out = Path(name_result(options["src_ft"], options["new_base"]))
    place = check_push(destination, options["token"])
    if dry_run:
        _plan(recipe, quiet, as_json, {name: value for name, value in options.items() if name not in _PORT_ONLY})
        return
    with status("starting"):
        from hf_retarget.porting.port import port
    with resumable(), watch(quiet) as progress:
        progress.say(f"the result goes to {out}")
        try:
            command = describe_command(sys.argv)
            document = port(recipe=recipe, out=out, command=command, progress=progress, **options).document
        except FinishedError as finished:
            progress.say(str(finished))
            document = read_document(out.expanduser() / PORT)
    if not is_main_process():
        return
    if not as_json:
        if document.contenders:
            if not quiet:
                print_curves(document)
            print_scores(document)
            echo()
        if document.text:
            losses = document.text.losses.items()
            print_table(
                ("model", "loss per token"), [(SIDES.get(side, side), number(loss, 4)) for side, loss in losses]
            )
            echo()
        echo(document.verdict)
        if document.adapter:
            echo(document.adapter.sentence)
        echo(f"Saved to {out}")
    pushed = push_result(out, place, quiet, as_json)
    if as_json:
        echo_json({"folder": str(out), **pushed} | document.to_json())
        return
    if not quiet:
        if times := compare_times(document):
            echo(f"Time: {times}", err=True)
        echo(f"Look: {out}/report.html", err=True)
        if choose_action(document) == KEEP:
            echo("Keep the tuned model: it is clearly ahead of everything tried on the new base.", err=True)
        if command := advise(document, str(out), options, hidden_data(recipe)):
            echo(f"Next: {command}", err=True)


def name_result(tuned: str, new_base: str) -> str:
    """The default folder of a port, named after the tuned model and the new base.

    Example:
        >>> name_result("me/birds@v2", "timm/resnet18.a1_in1k"), name_result("runs/tuned/", "new/model.safetensors")
        ('birds-on-resnet18.a1_in1k', 'tuned-on-model')
    """

    def last(reference: str) -> str:
        name = reference.rpartition(":")[2].partition("@")[0].rstrip("/").rpartition("/")[2]
        return name.removesuffix(".safetensors").lstrip(".~") or "model"

    return f"{last(tuned)}-on-{last(new_base)}"


def _plan(recipe: Recipe, quiet: bool, as_json: bool, options: dict[str, Any]) -> None:
    with status("starting"):
        from hf_retarget.porting.check import plan
    with watch(quiet) as progress:
        found = plan(recipe=recipe, progress=progress, **options)
    if not is_main_process():
        return
    if as_json:
        echo_json(found.to_json())
        return
    echo_rows(_describe(found))


def _describe(plan: Plan) -> list[Row]:
    images = ", ".join(f"{count:,} {split}" for split, count in plan.images.items())
    held = f", {len(plan.held)} kept in place by tables" if plan.held else ""
    price = f"{plan.gradients:,} gradients of a minibatch"
    if plan.method == AUTO:
        price = f"at most {plan.forwards:,.0f} forward passes of a minibatch, and {price} if matching is needed"
    stacks = "leading directions of the gradients" if plan.compressed else "all gradients"
    rows = [
        ("model", f"{plan.architecture}, {plan.parameters:,} parameters, {plan.classes} classes"),
        ("head", f"{plan.head} ({plan.why})"),
        ("graph", f"{plan.groups} groups of neurons to match{held}"),
        ("data", f"{plan.data} ({images})"),
        ("images", plan.made),
        ("bases", plan.relation.sentence),
        ("port", f"{plan.method}, {plan.steps} steps, {price}"),
    ]
    if plan.finetune_steps:
        rows.append(("then", f"fine-tuning, {plan.finetune_steps:,} steps"))
    if plan.control_steps:
        rows.append(("control", f"plain fine-tuning, {plan.control_steps:,} steps"))
    rows += [
        ("memory", f"about {plan.memory / 1e9:.1f} GB, with {stacks} kept"),
        ("time", describe_time(plan.seconds, plan.seconds_unmatched)),
    ]
    return [*rows, *(("note", note) for note in plan.notes)]
