"""``hf-retarget demo``: derive, verify and draw two small models, offline, in a few seconds."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hf_retarget.cli.inspect import derive
from hf_retarget.cli.options import debug_option
from hf_retarget.files import atomic_path

_MODELS = {
    "test_vit": "a vision transformer: one residual stream, attention heads, an MLP in every block",
    "test_resnet": "a residual network: one stream for each stage, convolutions inside the blocks",
}


@click.command(epilog="Example: hf-retarget demo --out /tmp/demo")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Where to write the pages.",
)
@debug_option
@click.pass_context
def demo(ctx: click.Context, out: Path) -> None:
    """Derive, verify and draw the permutation graphs of two small models. Needs no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from hf_retarget.inspect import draw_page, summarise

    passed = True
    for model, words in _MODELS.items():
        graph, check = derive(model, run_check=True, options={})
        summary = summarise(graph, model)
        path = out / f"{model}.html"
        with atomic_path(path) as temporary:
            temporary.write_text(draw_page(graph, model, check=check), encoding="utf-8")
        click.echo(f"{model}, {words}")
        click.echo(
            f"  derived   {len(summary.groups)} groups; {summary.share_one:.2%} of its parameters lie on a free axis"
        )
        if check is not None:
            click.echo(f"  verified  {check.verdict}")
            passed = passed and check.passed
        click.echo(f"  drawn     {path}")
    click.echo(f"\nOpen {(out / 'test_vit.html').resolve()} in a browser.")
    click.echo("Next: hf-retarget inspect resnet50 --html resnet50.html")
    if not passed:
        ctx.exit(1)
