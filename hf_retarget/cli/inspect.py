"""``hf-retarget inspect``: derive and show the permutation graph of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_retarget.cli.options import debug_option, model_argument
from hf_retarget.cli.show import check_target, echo_json, write_file
from hf_retarget.progress import status

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_retarget.graph import PermutationGraph
    from hf_retarget.graph.verify import Verification

_EXAMPLE = """\b
Examples:
  hf-retarget inspect resnet18
  hf-retarget inspect vit_base_patch16_224 --html vit.html
  hf-retarget inspect ported/ --verify
  hf-retarget inspect timm/resnet18.a1_in1k@main
  hf-retarget inspect swin_tiny_patch4_window7_224 --verify --json
  hf-retarget inspect mypackage.mymodule:make_model --save graph.json
"""

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=_EXAMPLE)
@model_argument("model")
@click.option(
    "--verify", "verified", is_flag=True, help="Verify the graph: permute random weights and compare outputs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.option("--svg", type=_FILE, help="Write the picture.", metavar="FILE")
@click.option("--html", type=_FILE, help="Write a page with picture and tables.", metavar="FILE")
@click.option("--save", type=_FILE, help="Write the permutation graph as JSON.", metavar="FILE")
@click.option("--all", "everything", is_flag=True, help="Show every block, even if many are alike.")
@click.option("--img-size", type=click.IntRange(min=1), help="Input size, for timm models that accept one.")
@click.option("--in-chans", type=click.IntRange(min=1), help="Input channels, for timm models.")
@click.option("--num-classes", type=click.IntRange(min=0), help="Number of classes, for timm models.")
@debug_option
@click.pass_context
def inspect(  # more than seven parameters: each is an option of this command only
    ctx: click.Context,
    /,
    model: str,
    verified: bool,
    as_json: bool,
    svg: Path | None,
    html: Path | None,
    save: Path | None,
    everything: bool,
    **options: int | None,
) -> None:
    """Show which neurons of MODEL may be permuted together.

    Such permutations do not change its function. MODEL is a timm name, a Hub id (org/name@revision), a folder, or
    package.module:factory. It is built without weights: from the Hub, only its configuration and the headers of its
    safetensors are downloaded.
    """
    for path, suffix in ((svg, ".svg"), (html, ".html"), (save, ".json")):
        check_target(path, suffix)
    from hf_retarget.inspection import draw_page, draw_picture, print_summary, summarise

    graph, check = derive(model, verified, {name: value for name, value in options.items() if value is not None})
    summary = summarise(graph, model)
    if as_json:
        document = summary.to_json() | {"check": check.to_json() if check else None}
        echo_json(document)
    else:
        print_summary(summary, sys.stdout, everything, check)
    if svg:
        write_file(svg, draw_picture(graph, model, everything))
    if html:
        write_file(html, draw_page(graph, model, everything, check))
    if save:
        graph.save(save)
    if check is not None and not check.passed:
        ctx.exit(1)


def derive(model: str, verified: bool, options: dict[str, Any]) -> tuple[PermutationGraph, Verification | None]:
    """The permutation graph of a model, and its verification if requested."""
    with status(f"tracing {model}"):
        import hf_retarget as rt
        from hf_retarget.models import empty_model

        built, example = _load_stored(model, options) if _is_stored(model) else (empty_model(model, **options), None)
        graph = rt.trace(built, example)
    if not verified:
        return graph, None
    with status(f"verifying {model}"):
        return graph, rt.verify(built, graph, example)


def _is_stored(model: str) -> bool:
    return Path(model).exists() or "/" in model or model.startswith(("local-dir:", "hf-hub:", "hf_hub:"))


def _load_stored(model: str, options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """Build a stored model, and an input for it, as its files describe them."""
    import torch

    from hf_retarget.data import choose_preprocess
    from hf_retarget.models import peek_checkpoint

    if options:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise click.UsageError(f"{given}: '{model}' is defined by its files; give the name of an architecture instead.")
    if Path(model).is_file():
        raise click.UsageError(f"'{model}' is a weights file; give the name of its architecture (resnet18) instead.")
    checkpoint = peek_checkpoint(model, optional=True).checkpoint
    size = choose_preprocess(checkpoint).input_size
    return checkpoint.skeleton(), torch.zeros(2, *size)
