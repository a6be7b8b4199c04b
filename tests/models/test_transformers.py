"""Image classifiers of transformers: the same logits, a verified graph, and a folder that transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

import hf_retarget as rt
from hf_retarget.errors import ModelError
from hf_retarget.models import compare_checkpoints, head_names, load_checkpoint, save_model

VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VIT |= {"image_size": 32, "patch_size": 8}
PICO = {
    "ViT": VIT,
    "DeiT": VIT,
    "Beit": VIT | {"use_relative_position_bias": True, "layer_scale_init_value": 0.1},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 32},
    "ResNet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"},
    "Swin": {
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "image_size": 32,
        "patch_size": 2,
    },
    "MobileNetV2": {"depth_multiplier": 0.25, "image_size": 32},
}
LABELS = ("Äpfel", "Birnen", "🍒", "d")
NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


@pytest.fixture(autouse=True)
def _quietly():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make(name: str, seed: int = 0, labels: tuple[str, ...] = LABELS, **options):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**PICO[name], num_labels=len(labels), **options)
    config.id2label, config.label2id = dict(enumerate(labels)), {label: n for n, label in enumerate(labels)}
    return getattr(transformers, f"{name}ForImageClassification")(config).eval()


def saved(folder, name: str = "ViT", processor=PROCESSOR, **options):
    make(name, **options).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize("name", PICO)
def test_logits_are_the_same_and_transformers_loads_the_result(tmp_path, name):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = load_checkpoint(tmp_path / "theirs")
    assert (checkpoint.architecture, checkpoint.library) == (f"{name}ForImageClassification", "transformers")
    assert (checkpoint.num_classes, checkpoint.labels) == (4, LABELS)
    ours, x = checkpoint.build(), torch.rand(2, 3, 32, 32)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x).logits)
    tuned = checkpoint.build(3, seed=1)
    folder = save_model(tmp_path / "ours", tuned.state_dict(), checkpoint, num_classes=3, labels=("a", "ß", "c"))
    again, report = transformers.AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert report == NOTHING
    assert again.config.id2label == {0: "a", 1: "ß", 2: "c"}
    assert again.config.label2id["ß"] == 1
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x).logits, tuned(x), rtol=1e-5, atol=0)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in tuned.state_dict().items())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert {path.name for path in (tmp_path / "theirs").iterdir()} <= {path.name for path in folder.iterdir()}
    assert set(head_names(load_checkpoint(folder))) == {
        each for each in ours.state_dict() if each.startswith("classif")
    }


@pytest.mark.parametrize("name", ["ViT", "ConvNext", "ResNet", "Swin"])
def test_the_graph_is_verified(tmp_path, name, verify):
    make(name).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    graph = verify(checkpoint.build(), torch.zeros(2, 3, 32, 32), controls=4)
    assert graph.share(1) > 0.99
    assert rt.trace(checkpoint.skeleton(), torch.zeros(2, 3, 32, 32)).fingerprint == graph.fingerprint


def test_saved_bytes_are_reproducible(tmp_path):
    like = load_checkpoint(saved(tmp_path / "base"))
    for name in ("one", "two"):
        save_model(tmp_path / name, like.weights, like, labels=like.labels)
    names = ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    stored = json.loads((tmp_path / "base" / "config.json").read_text())
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == stored, "as transformers saves it"


def test_half_precision_is_kept(tmp_path):
    make("ViT").half().save_pretrained(tmp_path / "base")
    like = load_checkpoint(tmp_path / "base")
    assert like.dtype == torch.float16
    folder = save_model(tmp_path / "again", like.build().state_dict(), like)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "base" / "model.safetensors").read_bytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (PROCESSOR, {"input_size": (3, 32, 32), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"}),
        ({"size": 32, "resample": 3}, {"input_size": (3, 32, 32), "crop_mode": "squash", "interpolation": "bicubic"}),
        (
            {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
            {"input_size": (3, 32, 32), "crop_pct": 0.5, "crop_mode": "center"},
        ),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875},
            {"input_size": (3, 224, 224), "crop_pct": 0.875, "crop_mode": "center"},
        ),
        (
            {"size": {"shortest_edge": 384}, "crop_pct": 0.875},
            {"input_size": (3, 384, 384), "crop_pct": 1.0, "crop_mode": "squash"},
        ),
        ({"size": 32, "do_normalize": False}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        (None, {"input_size": (3, 32, 32)}),
    ],
)
def test_images_are_prepared_like_the_processor_does(tmp_path, processor, expected):
    found = load_checkpoint(saved(tmp_path, processor=processor)).config
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    "change", [{}, {"input_size": (3, 48, 48)}, {"input_size": (3, 48, 48), "crop_pct": 0.75, "crop_mode": "center"}]
)
def test_the_saved_processor_prepares_the_same_images(tmp_path, change):
    import numpy as np
    from PIL import Image

    from hf_retarget.data import Preprocess

    like = load_checkpoint(saved(tmp_path / "base"))
    folder = save_model(tmp_path / "again", like.weights, like, config=change)
    stored = json.loads((folder / "preprocessor_config.json").read_text())
    if not change:
        assert stored == PROCESSOR
    again = load_checkpoint(folder).config
    assert {name: again[name] for name in change} == change
    pixels = np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).resize((200, 200), Image.Resampling.BICUBIC)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")["pixel_values"][0]
    preprocess = Preprocess.of(again)
    ours = preprocess.normalise(preprocess.shape()(picture))
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().mean()) < 0.02, "but for rounding, the same image"


def test_a_base_without_a_classifier(tmp_path):
    tuned = load_checkpoint(saved(tmp_path / "tuned"))
    config = transformers.ViTConfig(**VIT)
    transformers.ViTModel(config).save_pretrained(tmp_path / "base")  # with a pooler, which no classifier has
    base = load_checkpoint(tmp_path / "base")
    assert (base.architecture, base.num_classes, base.labels) == ("ViTForImageClassification", 0, None)
    assert compare_checkpoints(base, tuned, base).head == ("classifier.weight", "classifier.bias")


def test_models_from_python_and_mismatches(tmp_path):
    model = make("ViT")
    checkpoint = load_checkpoint(model)
    assert (checkpoint.library, checkpoint.labels, checkpoint.module) == ("transformers", LABELS, None)
    stored = load_checkpoint(saved(tmp_path / "same", hidden_dropout_prob=0.1))
    assert compare_checkpoints(stored, checkpoint, stored).labels_agree is True
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(checkpoint.build()).build()(x), model(x).logits)
    other = load_checkpoint(saved(tmp_path / "other", layer_norm_eps=1e-6))
    with pytest.raises(ModelError, match="'layer_norm_eps' is 1e-12 in one and 1e-06 in the other"):
        compare_checkpoints(stored, stored, other)
    model.classifier = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    assert load_checkpoint(model).library == "timm", "transformers could not build it again"


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_unreadable_models_are_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ModelError, match="leave out --arch"):
        load_checkpoint(tmp_path, arch="resnet18")
    rewrite(tmp_path, hidden_size=24)
    with pytest.raises(ModelError, match="does not fit"):
        load_checkpoint(tmp_path)
    rewrite(tmp_path, hidden_size="wide")
    with pytest.raises(ModelError, match=r"config\.json in .* is not a valid configuration of 'vit'|cannot be built"):
        load_checkpoint(tmp_path)
    rewrite(tmp_path, model_type="bert", architectures=["BertModel"])
    with pytest.raises(ModelError, match="type 'bert', not one of transformers' image classifiers"):
        load_checkpoint(tmp_path)
    trap = tmp_path / "modeling_own.py"
    trap.write_text("raise SystemExit('this must not run')")
    rewrite(tmp_path, model_type="own", auto_map={"AutoModelForImageClassification": "modeling_own.Own"})
    with pytest.raises(ModelError, match="code of its own, which is not run"):
        load_checkpoint(tmp_path)


def test_without_transformers_the_error_names_the_extra(tmp_path):
    saved(tmp_path / "model")
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from hf_retarget.cli import main; main()", "evaluate", str(tmp_path / "model")]
    command += ["--data", "fashion-mnist"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "pip install 'hf-retarget[transformers]'" in done.stderr
    assert "Traceback" not in done.stderr
