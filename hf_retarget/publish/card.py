"""The model card: metadata for the Hub, and a text rendered from `templates/`."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hf_retarget.document import PortDocument
from hf_retarget.names import SIDES
from hf_retarget.publish.contents import shorten_all, shorten_command
from hf_retarget.recipe import Recipe
from hf_retarget.untrusted import plain
from hf_retarget.words import number, percent

Document = Mapping[str, Any]
Rows = Sequence[tuple[str, Mapping[str, Any]]]

_LICENCES = """
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
LICENCES = frozenset(_LICENCES.split())
"""Licence names that the Hub accepts, except `unknown`."""

_TASK = "image-classification"
_TEXT = "text-generation"
_LOCAL = "./"  # the examples run in the folder of the card
_EXAMPLES = {
    "timm": f"""
import timm
from PIL import Image

model = timm.create_model("local-dir:{_LOCAL}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = transform(Image.open("image.jpg").convert("MODE"))  # SIZE
print(model(image.unsqueeze(0)).softmax(-1))
""",
    "transformers": f"""
from transformers import pipeline

classify = pipeline("{_TASK}", model="{_LOCAL}")  # SIZE
print(classify("image.jpg"))
""",
    _TEXT: f"""
from transformers import pipeline

write = pipeline("{_TEXT}", model="{_LOCAL}")
""",
}
"""Example code by library or task; `address_card` fills in the repository, and `_show_use` the image format."""
_MOST_LABELS = 100


def write_port_card(document: PortDocument, rows: Rows, *, library: str = "timm", curve: str | None = None) -> str:
    """Write the card of a port from its document and the rows of its table of test scores.

    `library` loads the model; `curve` is the path of the accuracy chart within the folder.
    """
    models = {name: asdict(side) for name, side in document.models.items()}
    target, data, recipe = models["target"], asdict(document.data), document.recipe
    adapter, score = document.adapter, {}
    if document.contenders and document.labelled:  # agreement is not accuracy
        score = asdict(adapter.test if adapter and adapter.test else document.result.test)
    # Without the old base, so that a search for its fine-tunings does not find a finished port.
    bases = [*_list_origins(target), None if adapter else models["tuned"]["hub_id"]]
    kind = "peft" if adapter else library
    return _render(
        rows,
        metadata=_describe(target, data, recipe, bases, score, kind),
        example=_write_example(document, {_TEXT: _TEXT, _TASK: library}.get(_choose_task(target, data) or "", "")),
        curve=curve,
        base=target,
        models=models,
        sides={words: models[name] for name, words in SIDES.items() if name in models},
        data=data,
        recipe=recipe,
        verdict=document.verdict,
        facts=_list_facts(document),
        text=document.text,
        losses=[(SIDES.get(side, side), loss) for side, loss in document.text.losses.items()] if document.text else [],
        measure="top-1" if document.labelled else "agreement with the tuned model",
        also=f"top-1, {document.also.name}" if document.also else "",
        command=document.command,
    )


def write_tuned_card(document: Document, *, library: str = "timm", curve: str | None = None) -> str:
    """Write the card of a fine-tuning from its finetune.json."""
    model, data, recipe = document["model"], document["data"], document["options"]["recipe"]
    score, labelled = document["figures"]["test"], document.get("labelled", True)
    return _render(
        [("fine-tuned", score)],
        metadata=_describe(model, data, recipe, _list_origins(model), score if labelled else {}, library),
        example=_EXAMPLES.get(library, ""),
        curve=curve,
        base=model,
        models={},
        sides={"base": model},
        data=data,
        recipe=recipe,
        verdict="",
        facts=(),
        text=None,
        measure="top-1" if labelled else "agreement with the teacher",
        also="",
        command=document["command"],
    )


def _list_facts(document: PortDocument) -> list[str]:
    """Further facts as sentences."""
    facts = []
    if document.relation:
        facts.append(f"The bases: {document.relation.sentence}.")
    if document.contenders and document.result.flips:
        lost, won = document.result.flips
        facts.append(f"On {lost:,} test images, only the tuned model is right; on {won:,}, only the port.")
    if document.adapter:
        facts.append(document.adapter.sentence)
    if not document.labelled:
        facts.append("The images had no labels: scores are agreement with the tuned model, not accuracy.")
    return facts


def _write_example(document: PortDocument, library: str) -> str:
    """Example code for loading the result; an adapter needs its base, with the same number of classes."""
    base, classes = document.models["target"], document.models["tuned"].classes
    if document.adapter is None or library not in _EXAMPLES:
        return _EXAMPLES.get(library, "")
    name, revision = json.dumps(base.hub_id or base.name), json.dumps(base.revision) if base.hub_id else None
    pinned = f", revision={revision}" if revision else ""
    if library == "timm":
        place = f"hf-hub:{base.hub_id}@{base.revision}" if base.hub_id else f"local-dir:{base.name}"
        load = f"base = timm.create_model({json.dumps(place)}, pretrained=True, num_classes={classes})"
    else:
        load = (
            f"base = transformers.AutoModelForImageClassification.from_pretrained(\n    {name}{pinned}, "
            f"num_labels={classes}, ignore_mismatched_sizes=True\n)"
        )
    use = _EXAMPLES["timm"].partition("transform = ")[2].replace("(model)", "(base)")
    use = f"transform = {use}"
    if library == "transformers":
        use = (
            f"processor = transformers.AutoImageProcessor.from_pretrained({name}{pinned})\n"
            'image = processor(Image.open("image.jpg").convert("MODE"), return_tensors="pt")  # SIZE\n'
            "print(model(**image).logits.softmax(-1))\n"
        )
    return (
        f"import {library}\nfrom peft import PeftModel\nfrom PIL import Image\n\n{load}\n"
        f'model = PeftModel.from_pretrained(base, "{_LOCAL}").eval()\n{use}'
    )


def address_card(card: str, repository: str, revision: str | None = None) -> str:
    """Insert the name of the repository into the example of a card.

    Example:
        >>> address_card('timm.create_model("local-dir:./")', "ada/birds", "v2")
        'timm.create_model("hf-hub:ada/birds@v2")'
    """
    branch = revision if revision and revision != "main" else None
    timm = f'"hf-hub:{repository}@{branch}"' if branch else f'"hf-hub:{repository}"'
    transformers = f'"{repository}", revision="{branch}"' if branch else f'"{repository}"'
    return card.replace(f'"local-dir:{_LOCAL}"', timm).replace(f'"{_LOCAL}"', transformers)


def describe_licence(name: str | None, link: str | None = None) -> dict[str, str]:
    """Card metadata for a licence; empty if it is unknown, since licences are never guessed.

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


def escape(text: object) -> str:
    """Escape text for one line of Markdown, including HTML and tables.

    Example:
        >>> print(escape("a|b <script> *Käfer* 🐞"))
        a\\|b &lt;script&gt; \\*Käfer\\* 🐞
    """
    words = plain(" ".join(str(text).split()))
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(words, quote=False))


def fence(text: str, language: str = "") -> str:
    """A fenced code block that the text cannot break out of.

    Example:
        >>> fence("a ``` b")
        '````\\na ``` b\\n````\\n'
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{plain(text).rstrip(chr(10))}\n{marks}\n"


def _render(rows: Rows, *, data: Document, recipe: Document, command: str, example: str, **values: Any) -> str:
    short = shorten_all(json.loads(json.dumps(recipe)))  # YAML would tag tuples
    return _templates.get_template("card.md.jinja").render(
        **values,
        rows=rows,
        data={"made": "", **data},
        recipe=yaml.safe_dump(_list_changes(short), sort_keys=False, allow_unicode=True, width=100),
        command=shorten_command(command),
        images=[f"{count:,} {split}" for split, count in data["images"].items()],
        labels=data.get("labels") or (),
        top5=any(score.get("top5") is not None for _, score in rows),
        example=_show_use(example, data),
        most=_MOST_LABELS,
    )


def _show_use(example: str, data: Document) -> str:
    """Fill in the image format of an example."""
    size = [int(each) for each in (data.get("preprocess") or {}).get("input_size") or ()]
    words = f"{'×'.join(map(str, size))}, normalised" if size else "preprocessed"
    words += " as config.json says"
    return example.strip().replace("MODE", "L" if size[:1] == [1] else "RGB").replace("SIZE", words)


def _list_changes(recipe: Document) -> dict[str, Any]:
    """The fields of a recipe that differ from the defaults or have none."""
    defaults = json.loads(json.dumps(Recipe().to_dict())) | {"name": "custom"}
    kept = {}
    for name, value in recipe.items():
        known = defaults.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            value = {key: each for key, each in value.items() if key not in known or each != known[key]}
        if value not in ({}, None, "") and value != defaults.get(name):
            kept[name] = value
    return kept


def _title(side: Document) -> str:
    """The reference of a model; of a local path only the last part, since cards are public."""
    reference = str(side["reference"])
    return reference if side["revision"] else PurePath(reference).name or reference


def _list_origins(side: Document) -> list[str]:
    """The Hub ids of a model: its own, or the base models on its card."""
    return [side["hub_id"]] if side.get("hub_id") else list(side.get("base_models") or ())


def _describe(
    base: Document, data: Document, recipe: Document, bases: Sequence[str | None], score: Document, library: str
) -> str:
    """The YAML metadata of a card."""
    # A Hub dataset is given by its id, any other by a name that cannot be mistaken for one.
    kind = data["name"] if data["revision"] else "".join(c if c.isalnum() else "-" for c in data["name"].lower())
    results = [
        EvalResult(
            task_type=_TASK,
            dataset_type=kind or "images",
            dataset_name=data["name"] or "images",
            dataset_config=(recipe.get("data") or {}).get("config"),
            dataset_split="test",
            dataset_revision=data["revision"],
            metric_type="accuracy",
            metric_name=f"top-{most} accuracy",
            metric_value=round(value, 4),
        )
        for most in (1, 5)
        if (value := score.get(f"top{most}")) is not None
    ]
    known = list(dict.fromkeys(each for each in bases if each))
    relation = "adapter" if library == "peft" else "finetune"
    entries: dict[str, Any] = {
        **describe_licence(base.get("license"), base.get("license_link")),
        **({"base_model": known, "base_model_relation": relation} if known else {}),
        **({"datasets": [data["name"]]} if data["revision"] else {}),
    }
    task = _choose_task(base, data)
    metadata = ModelCardData(
        library_name=library,
        pipeline_tag=task,
        tags=list(dict.fromkeys([library, *([task] if task else []), "hf-retarget"])),
        model_name=f"{base['architecture']} on {data['name']}" if data["images"] else base["architecture"],
        eval_results=results,
        **entries,
    )
    return str(metadata.to_yaml())


def _choose_task(base: Document, data: Document) -> str | None:
    """The Hub's name of the model's task, if known."""
    if base["architecture"].endswith(("ForCausalLM", "LMHeadModel")):
        return _TEXT
    return _TASK if data["images"] or data["classes"] else None


_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
    autoescape=True,  # `finalize` escapes everything that is not `Markup`
    finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(value)),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Templates that escape every value, unlike `ModelCard.from_template`."""
_templates.filters |= {
    "percent": percent,
    "number": number,
    "title": _title,
    "listed": lambda names: Markup(", ".join(map(escape, names))),
    "markdown": Markup,
    "fenced": lambda text, language="": Markup(fence(text, language)),
}
