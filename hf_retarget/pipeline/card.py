"""What a card says of a result: the rows of its table, and which library loads the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_retarget.models import Checkpoint
from hf_retarget.models.build import is_timm
from hf_retarget.publish.card import write_port_card, write_tuned_card
from hf_retarget.publish.paths import shorten_path
from hf_retarget.recipe import Recipe

CURVE = "figures/curve.png"
"""Where the picture for the card is, if there is one in the folder."""

ROWS = {
    "tuned": "tuned source",
    "base": "new base as it is",
    "naive": "naive port",
    "masked": "mask alone, no matching",
    "oracle": "port with the oracle's permutation",
    "control": "plain fine-tuning, same price",
    "tuned_target": "real fine-tuning of the new base",
    "port": "port",
    "finetuned": "port, fine-tuned on",
}
"""What the scores are called, in the order of a table."""


def describe_rows(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the table of test scores: what it is, and its figures.

    Example:
        >>> describe_rows({"test": {"port": {"top1": 0.5}}, "best_step": 7, "steps_planned": 10})
        [('port (best step 7 of 10)', {'top1': 0.5})]
    """
    best = {"port": f" (best step {document['best_step']} of {document['steps_planned']})"}
    for name in ("naive", "masked", "oracle"):
        if document.get(f"{name}_best_step"):
            best[name] = f" (best step {document[f'{name}_best_step']})"
    if document.get("gradients"):
        best["control"] = f" ({document['gradients']['control']:,} minibatches)"
    return [
        (words + best.get(name, ""), document["test"][name]) for name, words in ROWS.items() if name in document["test"]
    ]


def card_of_port(document: dict[str, Any], target: Checkpoint, folder: Path) -> str:
    """README.md for a folder that holds all other files of a port."""
    return write_port_card(document, describe_rows(document), library=_library(target), curve=_curve(folder))


def card_of_tuning(document: dict[str, Any], model: Checkpoint, folder: Path) -> str:
    """README.md for a folder that holds all other files of a fine-tuning."""
    return write_tuned_card(document, library=_library(model), curve=_curve(folder))


def _library(checkpoint: Checkpoint) -> str:
    if checkpoint.library != "timm":
        return checkpoint.library
    return "timm" if is_timm(checkpoint.architecture) else "pytorch"


def _curve(folder: Path) -> str | None:
    return CURVE if (folder / CURVE).is_file() else None


def publish_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe into a folder that goes to others: of a path to the data, the last part only."""
    recipe.override(**{"data.reference": shorten_path(recipe.data.reference)}).save(path)
