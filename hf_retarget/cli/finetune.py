"""``hf-retarget finetune``: fine-tune a model on images, and save it to a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import (
    debug_option,
    model_argument,
    model_options,
    num_classes_option,
    output_options,
    push_options,
    resumable,
    run_options,
)
from hf_retarget.cli.push import check_push, push_result
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import describe_command, describe_inputs, echo, echo_json, echo_rows
from hf_retarget.errors import FinishedError
from hf_retarget.names import FINETUNE, START_HEADS
from hf_retarget.progress import is_main_process, status, watch
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

if TYPE_CHECKING:
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget finetune resnet18.a1_in1k --data pets --epochs 5 --out tuned
  hf-retarget finetune old/ --data photos/ --steps 500 --record 50 --out tuned
  hf-retarget finetune new/ --teacher tuned/ --data pets --steps 50 --out b
  hf-retarget finetune ported/ --data cub --epochs 3 --lr 0.003 --out finished
"""

_MOST = 12  # printed scores of the validation curve


_COMMON = "--steps --epochs --lr --batch-size --record --teacher --arch --device --resume --overwrite --push-to-hub"


@click.command(cls=SectionedCommand, common=_COMMON, epilog=_EXAMPLE)
@model_argument("model")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="New folder for the tuned model."
)
@click.option(
    "--head",
    type=click.Choice(START_HEADS),
    default="auto",
    show_default=True,
    help="Initial classifier: the model's own, a random one, or zeros; auto: its own if the classes agree.",
)
@click.option(
    "--record",
    type=click.IntRange(min=1),
    metavar="N",
    help="Save the weights of every N-th step to DIR/trajectory, for ports along it.",
)
@click.option("--teacher", metavar="MODEL", help="Learn the answers of this model; the images need no labels.")
@num_classes_option
@output_options
@push_options
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@recipe_options("data", "finetune", plain="finetune")
@debug_option
def finetune(
    model: str, recipe: Recipe, quiet: bool, as_json: bool, destination: dict[str, Any] | None, **options: Any
) -> None:
    """Fine-tune MODEL on images, and save it to a folder.

    MODEL is a timm name (resnet18.a1_in1k), a Hub id (org/name@revision), a folder such as a port, or a file with
    --arch. The last weights are saved; DIR appears when everything is done.
    """
    place = check_push(destination, options["token"])
    with status("starting"):
        from hf_retarget.porting.finetune import finetune
    with resumable(), watch(quiet) as progress:
        try:
            command = describe_command(sys.argv)
            document = finetune(model, recipe=recipe, command=command, progress=progress, **options).document
        except FinishedError as finished:
            progress.say(str(finished))
            document = read_json(options["out"].expanduser() / FINETUNE, MAX_DOCUMENT_BYTES)
    if not is_main_process():
        return
    if not as_json:
        echo_rows(_describe(document, options["out"]), width=11)
    pushed = push_result(options["out"], place, quiet, as_json)
    if as_json:
        echo_json({"folder": str(options["out"]), **pushed} | document)
        return
    if not quiet and document.get("labelled", True):  # without labels, evaluate cannot score
        echo(f"Next: hf-retarget evaluate {describe_inputs(options['out'], recipe)}", err=True)


def _describe(document: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    model, data, figures = (document[part] for part in ("model", "data", "figures"))
    test, curve = figures["test"], figures["validation"]["curve"]
    images = ", ".join(f"{count:,} {split}" for split, count in data["images"].items())
    losses = figures["losses"]
    rows = [
        ("model", f"{model['architecture']}, {data['classes']} classes, head: {document['head']['kind']}"),
        ("data", f"{data['name']} ({images})"),
        ("steps", f"{len(losses):,} in {figures['seconds']:.0f} s; loss {losses[0]:.3f} → {losses[-1]:.3f}"),
    ]
    if curve:
        last, count = len(curve) - 1, min(len(curve), _MOST)
        shown = [
            curve[round(place * last / max(count - 1, 1))] for place in range(count)
        ]  # with the first and the last
        rows.append(("validation", ", ".join(f"{value:.1%} (step {step:,})" for step, value in shown)))
    top5 = f", top-5 {test['top5']:.1%}" if test["top5"] is not None else ""
    top1 = "top-1" if document.get("labelled", True) else "agreement with the teacher"
    rows.append(("test", f"{top1} {test['top1']:.1%}{top5}, loss {test['loss']:.3f} ({test['images']:,} images)"))
    return [*rows, ("saved", str(folder))]
