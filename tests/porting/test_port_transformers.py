"""Fine-tuned transformers models are ported like those of timm, and the result is a transformers model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import hf_retarget as rt
from hf_retarget.models import load_checkpoint

VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
PICO = {
    "ViT": VIT | {"image_size": 16, "patch_size": 8},
    "ResNet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"},
}
PROCESSOR = {"size": {"height": 16, "width": 16}, "image_mean": [0.4] * 3, "image_std": [0.3] * 3, "resample": 2}
PROCESSOR |= {"image_processor_type": "ViTImageProcessor", "do_resize": True, "do_normalize": True}
SHORT = {"data.validation": 0.2, "port.steps": 2, "port.batch_size": 16, "port.grad_batches": 1, "port.bn_batches": 1}


def make(name: str, seed: int, classes: int, **labels: object):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**PICO[name], num_labels=classes, **labels)
    return getattr(transformers, f"{name}ForImageClassification")(config)


@pytest.fixture(params=PICO)
def trio(request, tmp_path):
    """Old, tuned and new, as transformers saves them, with a processor each."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    labels = {"id2label": {0: "red", 1: "blue", 2: "green"}, "label2id": {"red": 0, "blue": 1, "green": 2}}
    old, tuned = make(request.param, 0, 5), make(request.param, 2, 3, **labels)
    kept = {k: v + 0.02 * torch.randn_like(v) for k, v in old.state_dict().items() if v.is_floating_point()}
    head = {name for name in kept if name.startswith("classifier")}
    tuned.load_state_dict({k: v for k, v in kept.items() if k not in head}, strict=False)
    for name, model in {"old": old, "tuned": tuned, "new": make(request.param, 1, 7)}.items():
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path


def test_a_port_is_saved_like_transformers_does(trio, colours):
    sides = [trio / name for name in ("old", "tuned", "new")]
    result = rt.port(*sides, colours, overrides=SHORT | {"port.method": "fgmt"}, out=trio / "ported")
    theirs, report = transformers.AutoModelForImageClassification.from_pretrained(
        trio / "ported", output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.config.id2label == {0: "red", 1: "blue", 2: "green"}, "in the order of the fine-tuning"
    images = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(images).logits, result.model(images), rtol=1e-6, atol=1e-7)
    assert json.loads((trio / "ported" / "preprocessor_config.json").read_text()) == PROCESSOR
    assert result.document.models["target"].library == "transformers"
    assert result.document.graph["check"]["passed"] is True
    assert result.document.port.gradients == 4
    assert sorted(path.name for path in (trio / "ported").iterdir() if path.name.startswith(".")) == []


def test_models_from_python(trio, colours):
    load = transformers.AutoModelForImageClassification.from_pretrained
    sides = [load(trio / name) for name in ("old", "tuned", "new")]
    quick = SHORT | {"data.image_size": 16, "port.method": "naive", "port.control": "none", "port.verify": False}
    result = rt.port(*sides, colours, overrides=quick)
    assert result.inputs.target.library == "transformers"
    again = load_checkpoint(result.save(trio / "again"))
    assert (again.library, again.labels) == ("transformers", ("red", "blue", "green"))


@pytest.mark.parametrize("trio", ["ViT"], indirect=True)
def test_a_pushed_port_is_loaded_by_a_transformers_pipeline(trio, colours, connected, tmp_path):
    quick = SHORT | {"port.method": "naive", "port.control": "none", "port.verify": False}
    result = rt.port(*(trio / name for name in ("old", "tuned", "new")), colours, overrides=quick, device="cpu")
    pushed = result.push_to_hub("birds", revision="v2", private=True)
    assert "preprocessor_config.json" in pushed.files
    card = connected.repository("ada/birds").read("README.md", "v2").decode()
    assert "library_name: transformers" in card
    (example,) = (line for line in card.splitlines() if line.startswith("classify = "))
    code = f"""
    from PIL import Image
    from transformers import pipeline
    {example}
    answer(sorted(each["label"] for each in classify(Image.new("RGB", (20, 20)))))
    """
    found = connected.client(token="hf_ada_read", home=tmp_path / "home").ask(code)
    assert found == ["blue", "green", "red"], "the example in the card works"
