"""The model card: what its head tells the Hub, and what its text tells people."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hf_retarget.publish.paths import shorten_all, shorten_command

_NAMES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unlicense
wtfpl zlib
"""
LICENCES = frozenset(_NAMES.split())


def describe_licence(name: str | None, link: str | None = None) -> dict[str, str]:
    """The entries of a card for a licence; none if it is not known: a licence is never made up.

    Example:
        >>> describe_licence("MIT"), describe_licence("dinov3-license"), describe_licence("unknown")
        ({'license': 'mit'}, {'license': 'other', 'license_name': 'dinov3-license'}, {})
    """
    known = (name or "").strip().lower()
    if known in ("", "unknown", "none"):
        return {}
    if known in LICENCES:
        return {"license": known}
    return {"license": "other", "license_name": known.replace(" ", "-"), **({"license_link": link} if link else {})}


def plain(text: object) -> str:
    """Text that neither Markdown nor HTML nor a table takes for anything but text, on one line.

    Example:
        >>> print(plain("a|b <script> *Käfer* 🐞"))
        a\\|b &lt;script&gt; \\*Käfer\\* 🐞
    """
    words = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(words, quote=False))


def fenced(text: str, language: str = "") -> list[str]:
    """Lines of a block of code that the text cannot leave.

    Example:
        >>> fenced("a ``` b")
        ['````', 'a ``` b', '````', '']
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table; the cells are Markdown already.

    Example:
        >>> table(("a", "b"), [("1", "2")])
        ['| a | b |', '|---|---|', '| 1 | 2 |', '']
    """
    names = list(head)
    return [_row(names), "|" + "---|" * len(names), *(_row(row) for row in rows), ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


Document = Mapping[str, Any]
Rows = Sequence[tuple[str, Mapping[str, Any]]]

_LOCAL = "FOLDER"
_SIDES = {"target": "new base", "tuned": "fine-tuning", "source": "old base", "tuned_target": "its own fine-tuning"}
_MOST_LABELS = 100
_TASK = "image-classification"


def write_port_card(document: Document, rows: Rows, *, library: str = "timm", curve: str | None = None) -> str:
    """The card of a port, from port.json and the rows of its table of test scores.

    `library` is what loads the model; `curve` is the path of the picture of the accuracies, within the folder.
    """
    inputs = document["inputs"]
    sides = {words: inputs[name] for name, words in _SIDES.items() if name in inputs}
    ours = document["test"]["finetuned" if "finetuned" in document["test"] else "port"]
    # Not the old base: nothing of it is left, and who looks for its fine-tunings to port must not find a port again.
    bases = [*_lineage(inputs["target"]), inputs["tuned"].get("hub_id")]
    front = _front(inputs["target"], inputs["data"], document["recipe"], bases, ours, library)
    body = [
        f"# {plain(inputs['target']['architecture'])}, retargeted",
        "",
        f"The fine-tuning {_name(inputs['tuned'])} of {_name(inputs['source'])}, ported to the new base "
        f"{_name(inputs['target'])} by hf-retarget, without repeating it.",
        "",
        *_scores(rows),
        f"{document['verdict']} (± is one standard error.)",
        "",
        *_curve(curve),
        *_use(library),
        *_origin(sides, inputs["data"]),
        *_recipe(document["recipe"]),
        *_command(document["command"]),
        "`port.json` has every figure, option, version and input hash; `recipe.yaml` repeats the port.",
        "",
    ]
    return front + "\n".join(body)


def write_tuned_card(document: Document, *, library: str = "timm", curve: str | None = None) -> str:
    """The card of a fine-tuning, from finetune.json."""
    model, data, test = document["model"], document["data"], document["figures"]["test"]
    recipe = document["options"]["recipe"]
    body = [
        f"# {plain(model['architecture'])}, fine-tuned",
        "",
        f"{_name(model)}, fine-tuned on {plain(data['name'])} by hf-retarget.",
        "",
        *_scores([("fine-tuned", test)]),
        *_curve(curve),
        *_use(library),
        *_origin({"base": model}, data),
        *_recipe(recipe),
        *_command(document["command"]),
        "`finetune.json` has every figure, option and version; `recipe.yaml` repeats the fine-tuning.",
        "",
    ]
    return _front(model, data, recipe, _lineage(model), test, library) + "\n".join(body)


def address_card(card: str, repository: str, revision: str | None = None) -> str:
    """A card whose example names the repository it is pushed to.

    Example:
        >>> address_card('timm.create_model("local-dir:FOLDER")', "ada/birds", "v2")
        'timm.create_model("hf-hub:ada/birds@v2")'
    """
    branch = revision if revision and revision != "main" else None
    timm = f'"hf-hub:{repository}@{branch}"' if branch else f'"hf-hub:{repository}"'
    transformers = f'"{repository}", revision="{branch}"' if branch else f'"{repository}"'
    return card.replace(f'"local-dir:{_LOCAL}"', timm).replace(f'"{_LOCAL}"', transformers)


def _front(
    base: Document, data: Document, recipe: Document, bases: Sequence[str | None], ours: Document, library: str
) -> str:
    from huggingface_hub import ModelCardData

    known = list(dict.fromkeys(each for each in bases if each))
    entries: dict[str, Any] = {
        **describe_licence(base.get("license"), base.get("license_link")),
        **({"base_model": known, "base_model_relation": "finetune"} if known else {}),
        **({"datasets": [data["name"]]} if data["revision"] else {}),
    }
    facts = ModelCardData(
        library_name=library,
        pipeline_tag=_TASK,
        tags=list(dict.fromkeys([library, _TASK, "hf-retarget"])),
        model_name=f"{base['architecture']} on {data['name']}",
        eval_results=_results(data, recipe, ours),
        **entries,
    )
    return f"---\n{facts.to_yaml()}\n---\n\n"


def _results(data: Document, recipe: Document, ours: Document) -> list[Any]:
    from huggingface_hub import EvalResult

    # A dataset of the Hub by its id; any other by a name that cannot be taken for one.
    kind = data["name"] if data["revision"] else "".join(c if c.isalnum() else "-" for c in data["name"].lower())
    measured = {"top-1 accuracy": ("accuracy", ours["top1"]), "top-5 accuracy": ("accuracy", ours["top5"])}
    return [
        EvalResult(
            task_type=_TASK,
            dataset_type=kind or "images",
            dataset_name=data["name"] or "images",
            dataset_config=(recipe.get("data") or {}).get("config"),
            dataset_split="test",
            dataset_revision=data["revision"],
            metric_type=metric,
            metric_name=name,
            metric_value=round(value, 4),
        )
        for name, (metric, value) in measured.items()
        if value is not None
    ]


def _lineage(side: Document) -> list[str]:
    """What the Hub knows of a model's origin: itself, or what the card in its folder names."""
    return [side["hub_id"]] if side.get("hub_id") else list(side.get("base_models") or ())


def _name(side: Document) -> str:
    # A card may be read by anybody: of a local path it tells the last part only.
    reference = str(side["reference"])
    return f"**{plain(reference if side['revision'] else PurePath(reference).name or reference)}**"


def _scores(rows: Rows) -> list[str]:
    five = any(each.get("top5") is not None for _, each in rows)
    head = ("on the test images", "top-1", *(("top-5",) if five else ()), "loss")
    lines = [
        (plain(words), _percent(each["top1"]), *((_percent(each["top5"]),) if five else ()), _number(each["loss"]))
        for words, each in rows
    ]
    return table(head, lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _curve(path: str | None) -> list[str]:
    return [f"![Accuracy step by step]({path})", ""] if path else []


def _use(library: str) -> list[str]:
    if library == "timm":
        lines = ["import timm", "", f'model = timm.create_model("local-dir:{_LOCAL}", pretrained=True)']
    elif library == "transformers":
        lines = ["from transformers import pipeline", "", f'classify = pipeline("{_TASK}", model="{_LOCAL}")']
    else:
        return []
    return ["## Use it", "", *fenced("\n".join(lines), "python")]


def _origin(sides: Mapping[str, Document], data: Document) -> list[str]:
    rows = [(words, _name(side), plain(side["revision"] or "local")) for words, side in sides.items()]
    images = ", ".join(f"{count:,} {split}" for split, count in data["images"].items())
    lines = table(("", "what", "revision"), [*rows, ("data", plain(data["name"]), plain(data["revision"] or "local"))])
    classes = f"{data['classes']} classes"
    if labels := data.get("labels"):
        shown = ", ".join(plain(label) for label in labels[:_MOST_LABELS])
        classes += f": {shown}" + (f" and {len(labels) - _MOST_LABELS:,} more" if len(labels) > _MOST_LABELS else "")
    return ["## Where it comes from", "", *lines, f"Images: {images}. {classes}.", ""]


def _recipe(recipe: Document) -> list[str]:
    import yaml

    values = shorten_all(json.loads(json.dumps(recipe)))  # tuples would be tagged
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    return ["## Recipe", "", *fenced(text, "yaml")]


def _command(command: str) -> list[str]:
    return fenced(shorten_command(command)) if command else []
