"""The card: metadata accepted by the Hub, and untrusted names kept as text."""

from __future__ import annotations

import html
import re
from dataclasses import asdict
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from loopback_hub import Hub
from loopback_hub.cards import LICENCES as KNOWN
from loopback_hub.cards import problems_of
from markdown_it import MarkdownIt

from hf_retarget.document import FORMAT, parse_document
from hf_retarget.publish.card import (
    LICENCES,
    address_card,
    describe_licence,
    escape,
    fence,
    write_port_card,
    write_tuned_card,
)
from hf_retarget.report.report import describe_result

NASTY = [
    "Äpfel & Öl",
    "🐞 Käfer",
    'say "hi"',
    "a: b",
    "x|y",
    "<script>alert(1)</script>",
    "`code` ``` ````",
    "*bold* _it_ [a](b) ~~c~~",
    "two\nlines",
    "---",
    "# title",
    "$x$ \\ back",
    "' quote",
]


def side(reference: str, hub_id: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "reference": reference,
        "architecture": "test_resnet",
        "classes": 3,
        "revision": "c0ffee" if hub_id else None,
        "hub_id": hub_id,
        **more,
    }


def score(top1: float, **more: Any) -> dict[str, Any]:
    return {"top1": top1, "top5": None, "loss": 1.234, "images": 600, **more}


def contender(name: str, top1: float, role: str = "beside", **more: Any) -> dict[str, Any]:
    test = score(top1, **more.pop("test", {}))
    return {"name": name, "role": role, "gradients": 0, "validation": top1, "test": test, **more}


def content(**changes: Any) -> dict[str, Any]:
    """The parts of port.json that a card reads."""
    data = {
        "name": "ada/insects",
        "revision": "beef",
        "fingerprint": "f" * 64,
        "classes": 3,
        "labels": ["ant", "bee", "Käfer"],
        "images": {"train": 5400, "validation": 600, "test": 600},
    }
    steps = [{"step": step, "far": step / 10, "top1": 0.5, "loss": 1.0} for step in range(1, 11)]
    return {
        "format": FORMAT,
        "version": "0.1.0",
        "verdict": "Undecided: 50.0% of 600 test images.",
        "winner": "fgmt",
        "contenders": [
            contender("fgmt", 0.5, "port", gradients=10, best_step=7, steps=steps),
            contender("tuned", 0.7),
            contender("naive", 0.2),
            contender("plain", 0.51, gradients=60),
        ],
        "steps_planned": 10,
        "models": {
            "source": side("timm/old", "timm/old"),
            "tuned": side("/home/ada/secret/tuned"),
            "target": side("new.tag", "timm/new.tag", license="apache-2.0"),
        },
        "data": {**data, **changes.pop("data", {})},
        "recipe": {"name": "insects", "data": {"config": "small", "classes": ["ant"]}, "port": {"steps": 10}},
        "head": {},
        "graph": {},
        "permutation": {"moved": 0.9},
        "command": "hf-retarget port --data ada/insects",
        **changes,
    }


def compose(made: dict[str, Any], **options: Any) -> str:
    """The card written by a port."""
    document = parse_document(made)
    rows = [(describe_result(each, document), asdict(each.test)) for each in document.table]
    return write_port_card(document, rows, **options)


def write(**changes: Any) -> str:
    return compose(content(**changes))


def shown(card: str) -> str:
    """The visible text: rendered, without tags, with unescaped characters."""
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.split("---\n", 2)[2])
    return html.unescape(re.sub(r"</?[a-z][^>]*>", "\x00", page))


def test_metadata_is_valid_and_complete():
    text = write()
    assert problems_of(text) == ([], [])
    card = ModelCard(text)
    data = card.data.to_dict()
    assert data["library_name"] == "timm"
    assert data["pipeline_tag"] == "image-classification"
    assert data["tags"] == ["timm", "image-classification", "hf-retarget"]
    assert data["base_model"] == ["timm/new.tag"], "no local folder, and not the old base, whose weights are gone"
    assert data["base_model_relation"] == "finetune"
    assert data["datasets"] == ["ada/insects"]
    assert data["license"] == "apache-2.0"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", 0.5, "test")
    assert (result.dataset_type, result.dataset_revision) == ("ada/insects", "beef")
    assert ModelCard(str(card)).data.to_dict() == data, "read and written again it is the same"


def test_lineage_names_the_fine_tuning_and_goes_through_a_local_folder():
    made = content()
    made["models"]["tuned"] = side("ada/tuned", "ada/tuned", base_models=["timm/old"])
    made["models"]["target"] = side("/x/new", base_models=["timm/new"])
    data = ModelCard(compose(made)).data.to_dict()
    assert data["base_model"] == ["timm/new", "ada/tuned"]


def test_a_card_reveals_no_local_paths():
    made = content(command="hf-retarget port --data '/home/ada/my secret/photos' --out=/home/ada/secret/out --steps 3")
    made["recipe"]["data"]["reference"] = "/home/ada/secret/photos"
    text = compose(made)
    assert "secret" not in text
    assert "hf-retarget port --data photos --out=out --steps 3" in text
    assert "reference: photos" in text


def test_the_hub_accepts_the_card(connected: Hub):
    ModelCard(write(data={"name": "Käfer: <b>|", "revision": None})).validate()
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: my-own\n---\n").validate()


def test_the_body_describes_the_model_and_its_origin():
    text = write()
    for words in (
        "port by fgmt (best step 7 of 10) | 50.0% | 1.234 |",
        "plain fine-tuning, same price (60 minibatches) | 51.0%",
        "Undecided: 50.0% of 600 test images.",
        "| new base | **new.tag** | c0ffee |",
        "| tuned model | **tuned** | local |",
        "| data | ada/insects | beef |",
        "5,400 train",
        "ant, bee, Käfer",
        "hf-retarget port --data ada/insects",
        'timm.create_model("local-dir:./", pretrained=True).eval()',
    ):
        assert words in text, words
    assert "secret" not in text
    assert "curve" not in text
    made = content()
    assert "](figures/curve.png)" in compose(made, curve="figures/curve.png")
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL).group(1))
    assert recipe == {"name": "insects", "data": {"config": "small", "classes": ["ant"]}}, "steps are the default"
    assert text.index("## Usage") < text.index("on the test images") < text.index("<details>")


def test_the_example_uses_the_input_of_the_model():
    seen = {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]}
    text = write(data={"preprocess": seen, "made": "resized to 32×32, mean 0.5"})
    assert 'convert("L"))  # 1×32×32, normalised as config.json says' in text
    assert "images are resized to 32×32, mean 0.5." in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    compile(code, "card", "exec")


def test_scores_are_those_of_the_saved_model():
    entered = [contender("fgmt", 0.5, "port"), contender("finetuned", 0.8, "after", test={"top5": 0.95})]
    results = ModelCard(write(contenders=entered)).data.eval_results
    assert [(each.metric_name, each.metric_value) for each in results] == [
        ("top-1 accuracy", 0.8),
        ("top-5 accuracy", 0.95),
    ]


@pytest.mark.parametrize("name", NASTY)
def test_names_are_escaped_and_kept(name: str):
    text = write(data={"name": name, "labels": ["ant", "bee", name], "revision": None}, command=f"hf-retarget '{name}'")
    assert problems_of(text) == ([], [])
    card = ModelCard(text)
    assert card.data.eval_results[0].dataset_name == name
    assert "datasets" not in card.data.to_dict()
    seen, line = shown(text), " ".join(name.split())
    assert f"bee, {line}." in seen, "among the labels"
    assert f"\x00{line}\x00" in seen.replace("\n", ""), "in the table"
    assert f"'{name}'" in seen, "in the command"
    assert "<script" not in text.replace(f"'{name}'", "").split("---\n", 2)[2]
    assert seen.count("\x00Recipe\x00") == 1


def test_a_fine_tuning_has_a_card_too():
    made = {
        "model": side("resnet18.a1_in1k", "timm/resnet18.a1_in1k", license="dinov3-license"),
        "data": content()["data"],
        "figures": {"test": score(0.9, top5=0.99)},
        "options": {"recipe": {"name": "insects"}},
        "command": "hf-retarget finetune resnet18.a1_in1k",
    }
    text = write_tuned_card(made)
    assert problems_of(text) == ([], [])
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["license"], data["license_name"]) == (
        ["timm/resnet18.a1_in1k"],
        "other",
        "dinov3-license",
    )
    assert "| fine-tuned | 90.0% | 99.0% | 1.234 |" in text
    assert "# test\\_resnet, fine-tuned" in text
    assert "```\nhf-retarget finetune resnet18.a1_in1k\n```" in text


def test_no_base_model_is_claimed_without_one_on_the_hub():
    made = content(data={"name": "photos", "revision": None})
    made["models"] |= {name: side(f"/x/{name}") for name in ("source", "tuned", "target")}
    data = ModelCard(compose(made)).data.to_dict()
    assert not {"base_model", "base_model_relation", "datasets", "license"} & set(data)


def test_the_example_names_the_repository():
    text = write()
    assert '"hf-hub:ada/birds"' in address_card(text, "ada/birds", "main")
    assert '"hf-hub:ada/birds@v2"' in address_card(text, "ada/birds", "v2")
    made = content()
    other = compose(made, library="transformers")
    assert 'pipeline("image-classification", model="ada/birds")' in address_card(other, "ada/birds")
    assert 'model="ada/birds", revision="v2")' in address_card(other, "ada/birds", "v2")


def test_licences():
    assert LICENCES | {"unknown"} == KNOWN
    assert describe_licence(None) == describe_licence("unknown") == {}
    assert describe_licence("my own", "LICENSE") == {
        "license": "other",
        "license_name": "my-own",
        "license_link": "LICENSE",
    }


def test_text_is_escaped_in_markdown():
    assert escape("a\n b") == "a b"
    assert fence("x", "yaml") == "```yaml\nx\n```\n"
