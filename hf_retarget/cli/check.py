"""``hf-retarget check``: whether a port is possible and what it costs, or whether a finished one is intact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.advice import HEAD, PORTED, RETRAIN, RIGHT
from hf_retarget.cli.options import debug_option, model_options, optional_bases, require, run_options
from hf_retarget.cli.recipe_options import SectionedCommand, recipe_options
from hf_retarget.cli.show import describe_time, echo_json, echo_rows
from hf_retarget.contenders import AUTO
from hf_retarget.names import SIDES
from hf_retarget.progress import status, watch
from hf_retarget.words import size

if TYPE_CHECKING:
    from hf_retarget.porting.check import InputCheck, Side
    from hf_retarget.porting.cost import Cost
    from hf_retarget.provenance import PortCheck
    from hf_retarget.recipe import Recipe

_EXAMPLE = """\b
Examples:
  hf-retarget check --src-base timm/a --src-ft me/a-birds --new-base timm/b
  hf-retarget check --src-base old/ --src-ft tuned/ --new-base new/ --json
  hf-retarget check ported/
"""

_MOST = 5  # differences that are printed

_SIDES = {"source": "src_base", "tuned": "src_ft", "target": "new_base"}

_ADVICE = {
    PORTED: "port; it will probably need no gradients",
    HEAD: "fit a head on the new base (--method head)",
    RETRAIN: "fine-tune the new base, if you have labels and time for 60 minibatches; a port is faster",
}

Row = tuple[str, str]


@click.command(cls=SectionedCommand, epilog=_EXAMPLE)
@click.argument("ported", required=False, metavar="[PORTED]", type=click.Path(path_type=Path))
@optional_bases
@model_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@recipe_options("data", "port", required=False)
@debug_option
@click.pass_context
def check(
    ctx: click.Context, /, ported: Path | None, recipe: Recipe, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Check whether a fine-tuning can be ported, and the cost.

    Only configurations, headers and a sample of the weights are read, at most 4 MB of a model. Exits with 0 if a port
    is possible, else with 1. A MODEL is a timm name, a Hub id (org/name@revision), a folder, or a file with --arch.

    With PORTED, the folder of a finished port, recompute the hashes of its files and of the models it was made from,
    and report mismatches. Each MODEL then gives the current location of one of them.
    """
    models = {side: options[name] for side, name in _SIDES.items()}
    if ported is None:
        require(src_base=models["source"], src_ft=models["tuned"], new_base=models["target"])
    with status("starting"):
        from hf_retarget.porting.check import check
        from hf_retarget.provenance import check_port
    found: InputCheck | PortCheck
    with watch(quiet) as progress:
        if ported is not None:
            given = {side: each for side, each in models.items() if each}
            found = check_port(ported, given, token=options["token"])
            rows = _describe_port(found)
        else:
            found = check(recipe=recipe, progress=progress, **options)
            rows = _describe(found, matches=recipe.port.method != AUTO)
    if as_json:
        echo_json(found.to_json())
    else:
        echo_rows(rows, width=11)
    if found.problems:
        ctx.exit(1)


def _describe_port(found: PortCheck) -> list[Row]:
    rows = [("files", f"{name}: {state}") for name, state in found.files.items()]
    for side, pin in found.pins.items():
        pinned = ", ".join(f"{name} {digest[:12]}" for name, digest in pin.hashes.items()) or "no hash"
        seen = f"not compared: {pin.unseen}" if pin.unseen else f"compared: {', '.join(pin.compared) or 'none'}"
        rows.append((SIDES.get(side, side), f"{pin.reference}, commit {pin.revision or '–'}, {pinned}; {seen}"))
    rows += [("note", note) for note in found.notes]
    rows += [("problem", problem) for problem in found.problems]
    return [*rows, ("result", "everything that was compared matches" if found.whole else "not intact")]


def _describe(found: InputCheck, *, matches: bool) -> list[Row]:
    rows = [(SIDES[name], _side(side)) for name, side in found.sides.items()]
    rows.append(("download", size(found.download) if found.download else "nothing: all weights are local"))
    if found.head:
        policy = found.head.policy or "own or zero"
        rows.append(("head", f"{', '.join(found.head.tensors)}; {policy} ({found.head.why})"))
        rows.append(("labels", _labels(found)))
    if found.relation:
        rows.append(("bases", f"{found.relation.sentence}; from a sample of their weights"))
    if found.advice:
        right = f"right in {RIGHT:.0%} of the cases in docs/pays.md"
        rows.append(("advice", f"{_ADVICE[found.advice]} (from the weights alone: {right}; a port measures it)"))
    if found.data:
        images = ", ".join(f"{'?' if n is None else format(n, ',')} {split}" for split, n in found.data.images.items())
        rows.append(("data", f"{found.data.name}{f' ({images})' if images else ''}"))
    if found.graph:
        rows.append(("graph", _graph(found)))
    if found.cost:
        rows += _cost(found.cost, matches, counted=bool(found.data and found.data.divided))
    rows += [("differs", words) for words in _differences(found)]
    rows += [("note", note) for note in found.notes]
    rows += [("warning", each.found) for each in found.gates if each.found and each.found not in found.problems]
    rows += [("problem", problem) for problem in found.problems]
    done = "compatible: nothing rules out a port" if found.compatible else "not compatible"
    return [*rows, ("result", done)]


def _side(side: Side) -> str:
    return f"{side.reference}: {side.architecture}, {side.parameters:,} numbers in {side.dtype}, {side.classes} classes"


def _labels(found: InputCheck) -> str:
    tuned, agree = found.sides["tuned"].labels, found.head.labels_agree if found.head else None
    if tuned is None:
        return "the tuned model does not name its classes; their numbers are used"
    bases = {True: ", the same in all three models", False: ", different from a base's", None: ""}[agree]
    data = ""
    if found.data and found.data.labels:
        data = ", found in the data" if found.compatible else ""
    return f"{len(tuned)} names{bases}{data}"


def _graph(found: InputCheck) -> str:
    graph = found.graph
    if graph is None:
        return ""
    held = f", {len(graph.held)} groups kept in place by tables" if graph.held else ""
    unknown = "; all operators known"
    if graph.unknown_operators:
        unknown = f"; {len(graph.unknown_operators)} unknown operators: {graph.unknown_operators[0]}"
    share = f"{graph.share:.1%} of the parameters on a free axis"
    return f"{graph.groups} groups of neurons to match, {share}{held}{unknown}"


def _cost(cost: Cost, matches: bool, counted: bool) -> list[Row]:
    control = f", and {cost.control:,} for the control" if cost.control else ""
    control += "" if matches else "; far fewer if no matching is needed"
    memory = f"about {cost.memory / 1e9:.1f} GB"
    time = "unknown without running the model; use port --dry-run"
    if cost.seconds is None:
        memory += ", plus the activations of a minibatch"
    else:
        time = f"{describe_time(cost.seconds, cost.seconds_unmatched)} (from a few random images)"
        time += "" if counted else "; a lower bound, since no data was given"
    gradients = f"{cost.gradients:,} minibatches of {cost.batch_size}{control}"
    return [("gradients", gradients), ("memory", memory), ("time", time)]


def _differences(found: InputCheck) -> list[str]:
    def shape(value: tuple[int, ...] | None) -> str:
        return "absent" if value is None else str(list(value))

    lines = [
        f"{each.name}: {shape(each.source)} in the old base, {shape(each.tuned)} tuned, {shape(each.target)} in the new"
        f" base{' (head)' if each.head else ''}"
        for each in sorted(found.differences, key=lambda each: each.head)
    ]
    more = len(lines) - _MOST
    return lines[:_MOST] + ([f"… and {more:,} more; --json lists them"] if more > 0 else [])
