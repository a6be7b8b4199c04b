"""The card: metadata that the Hub accepts, and names of others that stay what they are."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from loopback_hub import Hub
from loopback_hub.cards import LICENCES as KNOWN
from loopback_hub.cards import problems_of
from markdown_it import MarkdownIt

from hf_retarget.pipeline.card import describe_rows
from hf_retarget.publish.card import (
    LICENCES,
    address_card,
    describe_licence,
    fenced,
    plain,
    write_port_card,
    write_tuned_card,
)

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
        "revision": "c0ffee" if hub_id else None,
        "hub_id": hub_id,
        **more,
    }


def score(top1: float, **more: Any) -> dict[str, Any]:
    return {"top1": top1, "top5": None, "loss": 1.234, "images": 600, **more}


def document(**changes: Any) -> dict[str, Any]:
    """port.json, as far as a card reads it."""
    data = {
        "name": "ada/insects",
        "revision": "beef",
        "classes": 3,
        "labels": ["ant", "bee", "Käfer"],
        "images": {"train": 5400, "validation": 600, "test": 600},
    }
    return {
        "verdict": "Undecided: 50.0% of 600 test images.",
        "best_step": 7,
        "steps_planned": 10,
        "test": {"tuned": score(0.7), "naive": score(0.2), "port": score(0.5), "control": score(0.51)},
        "gradients": {"port": 10, "control": 60},
        "inputs": {
            "source": side("timm/old", "timm/old"),
            "tuned": side("/home/ada/secret/tuned"),
            "target": side("new.tag", "timm/new.tag", license="apache-2.0"),
            "data": {**data, **changes.pop("data", {})},
        },
        "recipe": {"name": "insects", "data": {"config": "small", "classes": ["ant"]}, "port": {"steps": 10}},
        "command": "hf-retarget port --data ada/insects",
        **changes,
    }


def write(**changes: Any) -> str:
    made = document(**changes)
    return write_port_card(made, describe_rows(made))


def shown(card: str) -> str:
    """What a reader sees: rendered, tags removed, characters back."""
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
    assert data["base_model"] == ["timm/new.tag"], "no local folder, and not the old base, of which nothing is left"
    assert data["base_model_relation"] == "finetune"
    assert data["datasets"] == ["ada/insects"]
    assert data["license"] == "apache-2.0"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", 0.5, "test")
    assert (result.dataset_type, result.dataset_revision) == ("ada/insects", "beef")
    assert ModelCard(str(card)).data.to_dict() == data, "read and written again it is the same"


def test_lineage_names_the_fine_tuning_and_goes_through_a_local_folder():
    made = document()
    made["inputs"]["tuned"] = side("ada/tuned", "ada/tuned", base_models=["timm/old"])
    made["inputs"]["target"] = side("/x/new", base_models=["timm/new"])
    data = ModelCard(write_port_card(made, describe_rows(made))).data.to_dict()
    assert data["base_model"] == ["timm/new", "ada/tuned"]


def test_a_card_tells_no_paths_of_the_machine():
    made = document(command="hf-retarget port --data '/home/ada/my secret/photos' --out=/home/ada/secret/out --steps 3")
    made["recipe"]["data"]["reference"] = "/home/ada/secret/photos"
    text = write_port_card(made, describe_rows(made))
    assert "secret" not in text
    assert "hf-retarget port --data photos --out=out --steps 3" in text
    assert "reference: photos" in text


def test_the_hub_accepts_it(connected: Hub):
    ModelCard(write(data={"name": "Käfer: <b>|", "revision": None})).validate()
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: my-own\n---\n").validate()


def test_the_body_says_what_it_is_and_where_it_comes_from():
    text = write()
    for words in (
        "port (best step 7 of 10) | 50.0% | 1.234 |",
        "plain fine-tuning, same price (60 minibatches) | 51.0%",
        "Undecided: 50.0% of 600 test images.",
        "| new base | **new.tag** | c0ffee |",
        "| fine-tuning | **tuned** | local |",
        "| data | ada/insects | beef |",
        "5,400 train",
        "ant, bee, Käfer",
        "hf-retarget port --data ada/insects",
        'timm.create_model("local-dir:FOLDER", pretrained=True)',
    ):
        assert words in text, words
    assert "secret" not in text
    assert "curve" not in text
    made = document()
    assert "](figures/curve.png)" in write_port_card(made, describe_rows(made), curve="figures/curve.png")
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL).group(1))
    assert recipe == json.loads(json.dumps(made["recipe"]))


def test_the_better_figure_is_that_of_the_model_in_the_folder():
    tests = {"port": score(0.5), "finetuned": score(0.8, top5=0.95)}
    results = ModelCard(write(test=tests)).data.eval_results
    assert [(each.metric_name, each.metric_value) for each in results] == [
        ("top-1 accuracy", 0.8),
        ("top-5 accuracy", 0.95),
    ]


@pytest.mark.parametrize("name", NASTY)
def test_any_name_survives_and_does_no_harm(name: str):
    text = write(data={"name": name, "labels": ["ant", name], "revision": None}, command=f"hf-retarget '{name}'")
    assert problems_of(text) == ([], [])
    card = ModelCard(text)
    assert card.data.eval_results[0].dataset_name == name
    assert "datasets" not in card.data.to_dict()
    seen, line = shown(text), " ".join(name.split())
    assert f"ant, {line}." in seen, "among the labels"
    assert f"\x00{line}\x00" in seen.replace("\n", ""), "in the table"
    assert f"'{name}'" in seen, "in the command"
    assert "<script" not in text.replace(f"'{name}'", "").split("---\n", 2)[2]
    assert seen.count("\x00Recipe\x00") == 1


def test_a_fine_tuning_has_a_card_too():
    made = {
        "model": side("resnet18.a1_in1k", "timm/resnet18.a1_in1k", license="dinov3-license"),
        "data": document()["inputs"]["data"],
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


def test_without_a_base_on_the_hub_nothing_is_claimed():
    made = document(data={"name": "photos", "revision": None})
    made["inputs"] |= {name: side(f"/x/{name}") for name in ("source", "tuned", "target")}
    data = ModelCard(write_port_card(made, describe_rows(made))).data.to_dict()
    assert not {"base_model", "base_model_relation", "datasets", "license"} & set(data)


def test_the_example_names_the_repository():
    text = write()
    assert '"hf-hub:ada/birds"' in address_card(text, "ada/birds", "main")
    assert '"hf-hub:ada/birds@v2"' in address_card(text, "ada/birds", "v2")
    made = document()
    other = write_port_card(made, describe_rows(made), library="transformers")
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


def test_text_in_markdown():
    assert plain("a\n b") == "a b"
    assert fenced("x", "yaml") == ["```yaml", "x", "```", ""]
