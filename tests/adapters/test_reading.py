"""Reading adapters: they are merged exactly, name their base, and determine only numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_retarget as rt
from hf_retarget.adapters.reading import KINDS, load_tuned
from hf_retarget.errors import AdapterError, ModelError
from hf_retarget.models import load_checkpoint

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)

OPTIONS = {
    "LORA": {"r": 4, "lora_alpha": 6, "rank_pattern": {"^blocks.0.attn.qkv": 2}, "alpha_pattern": {"fc1": 3}},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 100, "tinit": 5, "tfinal": 5},
    "LOHA": {"r": 4, "alpha": 6},
    "LOKR": {"r": 4},
    "IA3": {"feedforward_modules": ["fc1"]},
    "OFT": {"r": 0, "oft_block_size": 4},
    "HRA": {"r": 4},
    "VERA": {"r": 4, "target_modules": ["fc1"]},
}


def same(checkpoint, model) -> None:
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.build()(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


def change(folder: Path, **entries: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_every_kind_has_a_test():
    assert set(OPTIONS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_outputs_equal_those_of_peft(kind, base, adapt, tmp_path):
    model = adapt(tmp_path / "tuned", base, kind, **OPTIONS[kind])
    tuned = load_tuned(tmp_path / "tuned", base)
    same(tuned, model)
    with torch.no_grad():
        assert (base.build(3)(IMAGES) - model(IMAGES)).abs().max() > 1e-2, "the adapter does something"
    assert (tuned.num_classes, tuned.labels, tuned.architecture) == (3, None, "test_vit")
    assert set(tuned.hashes) == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_rslora": True, "r": 3},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": None},
        {"init_lora_weights": "gaussian", "layers_to_transform": [0, 2], "layers_pattern": "blocks"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_variants_of_lora(options, base, adapt, tmp_path):
    classes = 5 if "modules_to_save" in options else 3
    model = adapt(tmp_path / "tuned", base, classes=classes, **options)
    same(load_tuned(tmp_path / "tuned", base), model)


@pytest.mark.parametrize(
    ("name", "targets"), [("test_resnet", ["conv2"]), ("test_efficientnet", ["conv_pw", "conv_stem"])]
)
def test_convolutions_and_norms_with_their_statistics(name, targets, make, adapt, heads, tmp_path):
    base = load_checkpoint(make(tmp_path / "old", name))
    whole = [heads[name], "layer1.0.bn1" if name == "test_resnet" else "blocks.0.0.bn1"]
    model = adapt(tmp_path / "tuned", base, target_modules=targets, modules_to_save=whole)
    tensors = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    (mean,) = (key for key in tensors if key.endswith("running_mean"))
    tensors[mean] += 0.3
    save_file(tensors, tmp_path / "tuned" / "adapter_model.safetensors")
    tuned = load_tuned(tmp_path / "tuned", base)
    place = mean.removeprefix("base_model.model.")
    torch.testing.assert_close(tuned.weights[place], tensors[mean])
    again = peft.PeftModel.from_pretrained(base.build(3), tmp_path / "tuned").eval()
    same(tuned, again)
    with torch.no_grad():
        assert (again(IMAGES) - model(IMAGES)).abs().max() > 1e-4, "the statistics matter"


VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def test_an_adapter_of_a_transformers_model(tmp_path):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.ViTConfig(**VIT, image_size=32, patch_size=8, num_labels=5)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "old")
    load = transformers.AutoModelForImageClassification.from_pretrained
    own = load(tmp_path / "old", num_labels=3, ignore_mismatched_sizes=True)
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"], "use_dora": True}
    model = peft.get_peft_model(own, peft.LoraConfig(r=2, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter) if parameter.requires_grad else 0
    model.save_pretrained(tmp_path / "tuned")
    tuned = load_tuned(tmp_path / "tuned", load_checkpoint(tmp_path / "old"))
    with torch.no_grad():
        expected = model.eval()(IMAGES).logits
        torch.testing.assert_close(tuned.build()(IMAGES), expected, rtol=1e-4, atol=1e-5)
    assert (tuned.library, tuned.num_classes, tuned.notes) == ("transformers", 3, ()), "the base is named by its path"
    # As saved with transformers 4, whose layers had other names.
    weights = tmp_path / "tuned" / "adapter_model.safetensors"
    older = {"layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query"}
    older |= {"attention.v_proj": "attention.attention.value"}
    tensors = load_file(weights)
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, weights)
    change(tmp_path / "tuned", target_modules=["query", "value"])
    again = load_tuned(tmp_path / "tuned", load_checkpoint(tmp_path / "old"))
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in tuned.weights.items())


def test_a_timm_model_that_transformers_wrapped(base, adapt, tmp_path):
    model = adapt(tmp_path / "tuned", base, target_modules=["blocks.0.attn.qkv", "fc1"])
    tensors = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    inner = {key.replace("base_model.model.", "base_model.model.timm_model."): each for key, each in tensors.items()}
    save_file(inner, tmp_path / "tuned" / "adapter_model.safetensors")
    change(tmp_path / "tuned", target_modules=["timm_model.blocks.0.attn.qkv", "fc1"])
    same(load_tuned(tmp_path / "tuned", base), model)


# ---- the base that it names

OTHER = "0123456789" * 4


def test_an_adapter_on_the_hub_is_compared_with_its_base(base, base_folder, adapt, connected, tmp_path):
    """By name and commit; local paths cannot be compared."""

    def upload(name: str, folder: Path) -> str:
        files = {path.name: path for path in folder.iterdir()}
        return connected.repository(name, files).refs["refs/heads/main"]

    commit = upload("org/old", base_folder)
    upload("org/another", base_folder)
    model = adapt(tmp_path / "tuned", base)
    old, another = load_checkpoint("org/old"), load_checkpoint("org/another")

    def name(**entries: object) -> str:
        change(tmp_path / "tuned", **entries)
        return upload("ada/tuned", tmp_path / "tuned")

    head = name(base_model_name_or_path="org/old", revision=commit)
    tuned = load_tuned("ada/tuned", old)
    same(tuned, model)
    assert (tuned.hub_id, tuned.revision, tuned.notes, tuned.base_models) == ("ada/tuned", head, (), ("org/old",))
    with pytest.raises(ModelError, match=r"was trained on 'org/old', and the old base is 'org/another'.*--force-base"):
        load_tuned("ada/tuned", another)
    (note,) = load_tuned("ada/tuned", another, force_base=True).notes
    assert "used anyway" in note
    (note,) = load_tuned("ada/tuned", base).notes
    assert "cannot be compared" in note
    name(revision=OTHER)
    with pytest.raises(ModelError, match=rf"revision '{OTHER}' of 'org/old'.*\(commit {commit}\); name that one"):
        load_tuned("ada/tuned", old)
    name(revision="main")
    assert load_tuned("ada/tuned", old).notes == ()
    name(base_model_name_or_path="/home/me/runs/base")
    assert "cannot be compared" in load_tuned("ada/tuned", old).notes[0]
    name(base_model_name_or_path=None)
    assert "does not name its base" in load_tuned("ada/tuned", old).notes[0]
    with pytest.raises(AdapterError, match="is an adapter, not a whole model; it can be ported"):
        load_checkpoint("ada/tuned")


def test_check_reads_headers_only(base, base_folder, make, adapt, connected, tmp_path):
    adapt(tmp_path / "tuned", base)
    connected.repository("ada/tuned", {path.name: path for path in (tmp_path / "tuned").iterdir()})
    new = make(tmp_path / "new", seed=1)
    found = rt.check(base_folder, "ada/tuned", new)
    assert found.compatible, found.problems
    assert (found.sides["tuned"].classes, found.sides["tuned"].architecture) == (3, "test_vit")
    assert found.sides["tuned"].download == (tmp_path / "tuned" / "adapter_model.safetensors").stat().st_size
    assert found.relation.word == "independent"
    assert any("does not name its base" in note for note in found.notes)
    change(tmp_path / "tuned", peft_type="PROMPT_TUNING")
    with pytest.raises(ModelError, match="PROMPT_TUNING"):
        rt.check(base_folder, tmp_path / "tuned", new)


# ---- what strangers may write

FORBIDDEN = {
    "an unknown kind": ({"peft_type": "MAGIC"}, "has the peft_type 'MAGIC', which cannot be merged"),
    "no kind": ({"peft_type": None}, "has the peft_type None"),
    "a kind that compiles": ({"peft_type": "BOFT"}, "supported: LORA"),
    "a kind that is no text": ({"peft_type": ["LORA"]}, "cannot be merged"),
    "a regular expression": ({"target_modules": "(a+)+b"}, "it must be a list of module names"),
    "one in a list": ({"target_modules": ["(a+)+b"]}, "it must be a list of module names"),
    "one to save": ({"modules_to_save": ["(.*)*x"]}, "modules_to_save"),
    "one for ranks": ({"rank_pattern": {"(.*)*x": 3}}, "rank_pattern"),
    "one for layers": ({"layers_to_transform": [0], "layers_pattern": "(.*)*"}, "layers_pattern"),
    "code": ({"auto_mapping": {"parent_library": "os", "base_model_class": "system"}}, "auto_mapping"),
    "code of Megatron": ({"megatron_config": {"a": 1}}, "has 'megatron_config', which is not a supported entry"),
    "a core of Megatron": ({"megatron_core": "antigravity"}, "megatron_core"),
    "another start": ({"init_lora_weights": "pissa"}, "others change the base"),
    "copied layers": ({"layer_replication": [[0, 4]]}, "layer_replication"),
    "an entry of tomorrow": ({"quantum": 1}, "'quantum'"),
    "a huge rank": ({"r": 2**40}, "must be a number up to"),
    "a large rank": ({"r": 2**20}, "does not fit its weights: it would have more than"),
    "a rank that is no number": ({"r": "8"}, "must be a number"),
    "other modules": ({"target_modules": ["qkv"]}, "tensors are unexpected"),
    "more modules": ({"target_modules": ["qkv", "fc1", "fc2"]}, "tensors are missing"),
    "modules that are not there": ({"target_modules": ["nowhere"]}, "PEFT cannot merge"),
    "another rank": ({"r": 5}, "have other shapes"),
}


@pytest.mark.parametrize(("entries", "message"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_forbidden_adapter_settings_are_refused(entries, message, base, adapt, tmp_path):
    adapt(tmp_path / "tuned", base)
    change(tmp_path / "tuned", **entries)
    with pytest.raises(ModelError) as caught:
        load_tuned(tmp_path / "tuned", base)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in sys.modules


def test_damaged_and_missing_files_are_reported(base, adapt, tmp_path):
    folder = tmp_path / "tuned"
    adapt(folder, base)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, weights)
    with pytest.raises(ModelError, match="NaN"):
        load_tuned(folder, base)
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        load_tuned(folder, base)
    weights.unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; save it again"):
        load_tuned(folder, base, allow_pickle=True)
    (folder / "adapter_config.json").write_text("[1]")
    save_file(tensors, weights)
    with pytest.raises(ModelError, match="instead of an object"):
        load_tuned(folder, base)


def test_without_peft_the_error_names_the_extra(base, adapt, tmp_path, monkeypatch):
    adapt(tmp_path / "tuned", base)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'hf-retarget\[peft\]'"):
        load_tuned(tmp_path / "tuned", base)
