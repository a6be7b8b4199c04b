"""The model card of a ported model: README.md, with the front matter that the Hub reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_retarget.models import Checkpoint
from hf_retarget.models.build import is_timm
from hf_retarget.models.hub import split_revision

ROWS = {
    "tuned": "tuned source",
    "base": "new base as it is",
    "naive": "naive port",
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
    for name in ("naive", "oracle"):
        if document.get(f"{name}_best_step"):
            best[name] = f" (best step {document[f'{name}_best_step']})"
    if document.get("gradients"):
        best["control"] = f" ({document['gradients']['control']:,} minibatches)"
    return [
        (words + best.get(name, ""), document["test"][name]) for name, words in ROWS.items() if name in document["test"]
    ]


def _name(side: dict[str, Any]) -> str:
    # A card may be read by anybody: of a local path it tells the last part only.
    reference = str(side["reference"])
    return reference if side["revision"] else Path(reference).name


def hub_id(checkpoint: Checkpoint) -> str | None:
    """What a checkpoint is called on the Hub; None if it did not come from there.

    Example:
        >>> hub_id(load_checkpoint("resnet18.a1_in1k"))      # doctest: +SKIP
        'timm/resnet18.a1_in1k'
    """
    if checkpoint.revision is None:
        return None
    name = split_revision(checkpoint.reference)[0]
    return name if "/" in name else f"timm/{name}"


def write_card(document: dict[str, Any], source: str | None, tuned: Checkpoint, target: Checkpoint) -> str:
    """The text of README.md.

    Example:
        >>> write_card(document, source, tuned, target)      # doctest: +SKIP
    """
    import yaml

    timm = is_timm(target.architecture)
    bases = list(dict.fromkeys(each for each in (hub_id(target), hub_id(tuned), source) if each))
    front: dict[str, Any] = {
        "library_name": "timm" if timm else "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", *(["timm"] if timm else []), "hf-retarget"],
    }
    if license_name := target.config.get("license"):
        front["license"] = license_name
    if bases:
        front |= {"base_model": bases, "base_model_relation": "finetune" if len(bases) == 1 else "merge"}
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{_body(document, timm)}"


def _body(document: dict[str, Any], timm: bool) -> str:
    inputs, data = document["inputs"], document["inputs"]["data"]
    table = ["| on the test images | top-1 | loss |", "|---|---|---|"]
    for words, figures in describe_rows(document):
        loss = "–" if figures["loss"] is None else f"{figures['loss']:.3f}"
        table.append(f"| {words} | {figures['top1']:.1%} | {loss} |")
    lines = [
        f"# {inputs['target']['architecture']}, retargeted",
        "",
        f"The fine-tuning `{_name(inputs['tuned'])}` of `{_name(inputs['source'])}`, "
        f"ported to the new base `{_name(inputs['target'])}` by hf-retarget, without repeating it.",
        "",
        f"Data: {data['name']}, {data['classes']} classes, {data['images']['test']:,} test images.",
        "",
        *table,
        "",
        f"{document['verdict']} (± is one standard error.)",
        "",
    ]
    if timm:
        lines += ["```python", 'model = timm.create_model("local-dir:FOLDER", pretrained=True)', "```", ""]
    if document["command"]:
        lines += ["```", document["command"], "```", ""]
    lines += ["`port.json` has every figure, option, version and input hash; `recipe.yaml` repeats the port.", ""]
    return "\n".join(lines)
