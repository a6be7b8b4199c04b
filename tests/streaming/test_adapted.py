"""Ports without images whose tuned model is an adapter: the result adds the model that PEFT loads."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_lm import WORDS, make_lm, save_lm, shake
from transformers import AutoModelForCausalLM

import hf_retarget as rt

OPTIONS = {
    "plain": {"r": 4, "lora_alpha": 6},
    "patterns": {"r": 4, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "rank-stabilised": {"r": 3, "use_rslora": True},
    "a head": {"r": 2, "modules_to_save": ["lm_head"]},
    "of a head": {"r": 2, "target_modules": ["q_proj", "lm_head"]},
}


def tune(base, folder, noise=0.1, **options):
    """A random adapter, saved by PEFT, and the model that PEFT loads."""
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "down_proj"], **options})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter) if parameter.requires_grad else 0
    model.save_pretrained(folder)
    return model.merge_and_unload()


@pytest.fixture(params=[False, True], ids=["", "tied"])
def bases(request, tmp_path):
    old = make_lm(tie_word_embeddings=request.param)
    return save_lm(old, tmp_path / "old"), save_lm(shake(old, 0.02, 2), tmp_path / "new")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_equal_those_of_the_sum_in_memory(bases, options, tmp_path):
    tuned = tune(bases[0], tmp_path / "tuned", **options)
    rt.port(bases[0], tmp_path / "tuned", bases[1], "none", out=tmp_path / "out")
    old, new = (AutoModelForCausalLM.from_pretrained(each) for each in bases)
    added = {name: each - old.state_dict()[name] for name, each in tuned.state_dict().items()}
    assert sum(bool(each.any()) for each in added.values()) > 1
    if "lm_head" in str(options) and new.config.tie_word_embeddings:
        if "modules_to_save" not in options:  # PEFT merges it into both, but adds it to the head alone without merging
            added["model.embed_tokens.weight"] = torch.zeros(())
        new.lm_head.weight = torch.nn.Parameter(new.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, each in new.state_dict().items():
            each += added[name]
        tokens = torch.arange(20)[None]
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        torch.testing.assert_close(found, new(tokens).logits, rtol=1e-4, atol=1e-6)


def test_blocks_that_end_within_a_row(bases, tmp_path, monkeypatch):
    tune(bases[0], tmp_path / "tuned")
    rt.port(*(bases[0], tmp_path / "tuned", bases[1]), "none", out=tmp_path / "whole")
    monkeypatch.setattr("hf_retarget.streaming.sums.BLOCK", 7)
    rt.port(*(bases[0], tmp_path / "tuned", bases[1]), "none", out=tmp_path / "blocks")
    whole, blocks = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "blocks"))
    for name, each in whole.items():
        torch.testing.assert_close(blocks[name], each, rtol=0, atol=1e-7)


def test_more_tokens_and_a_tokenizer_of_its_own(tmp_path):
    old, mine = make_lm(), [*WORDS, "<mine>"]
    base, new = save_lm(old, tmp_path / "old"), save_lm(shake(old, 0.02, 2), tmp_path / "new")
    longer = save_lm(shake(old, 0.0, 1, len(mine)), tmp_path / "longer")
    tuned = tune(longer, tmp_path / "tuned", modules_to_save=["embed_tokens", "lm_head"])
    save_lm(tuned, tmp_path / "merged", mine)
    (tmp_path / "tuned" / "tokenizer.json").write_bytes((tmp_path / "merged" / "tokenizer.json").read_bytes())
    path = tmp_path / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    for name in ("tuned", "merged"):
        rt.port(base, tmp_path / name, new, "none", out=tmp_path / f"{name}-out")
    one, two = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("tuned", "merged"))
    for name, each in two.items():
        torch.testing.assert_close(one[name], each, rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "tuned-out" / "config.json").read_text())["vocab_size"] == len(mine)
    assert "<mine>" in (tmp_path / "tuned-out" / "tokenizer.json").read_text()


def test_texts_are_scored_with_the_model_that_peft_makes(bases, tmp_path):
    (tmp_path / "texts.txt").write_text("abcde\nbcdea\ncccab\n")
    tuned = tune(bases[0], tmp_path / "tuned", noise=0.5)
    done = rt.port(bases[0], tmp_path / "tuned", bases[1], "none", out=tmp_path / "out", text=tmp_path / "texts.txt")
    losses = []
    for line in (tmp_path / "texts.txt").read_text().split():
        tokens = torch.tensor([[WORDS.index(each) for each in line]])
        losses.append(float(tuned(tokens, labels=tokens).loss))
    assert done.document.text.losses["tuned"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert set(done.document.models["tuned"].hashes) == {"adapter_config.json", "adapter_model.safetensors"}
    assert rt.check_port(tmp_path / "out", {"tuned": tmp_path / "tuned"}).whole
    path = tmp_path / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1}))
    (problem,) = rt.check_port(tmp_path / "out", {"tuned": tmp_path / "tuned"}).problems
    assert "adapter_config.json of" in problem
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "entries", "words"),
    [
        (
            {"use_dora": True},
            {},
            "is not a plain LoRA adapter, the only kind supported without images: merge it with PEFT",
        ),
        ({"target_modules": ["embed_tokens"]}, {}, "is not a plain LoRA adapter"),
        ({}, {"fan_in_fan_out": True}, "is not a plain LoRA adapter"),
        ({}, {"peft_type": "LOHA"}, "is not a plain LoRA adapter"),
        ({}, {"peft_type": "MAGIC"}, "'MAGIC', which cannot be merged"),
        ({}, {"target_modules": "(a+)+b"}, "it must be a list of module names"),
        ({}, {"rank_pattern": {"q_proj": [True]}}, "the factors of 'model.layers.0.self_attn.q_proj' in .* do not fit"),
        ({}, {"r": 0}, "the factors of"),
        ({}, {"r": 5}, "the factors of 'model.layers.0.mlp.down_proj' in .* do not fit"),
        ({}, {"base_model_name_or_path": None}, ""),
    ],
)
def test_invalid_input_is_refused(options, entries, words, tmp_path):
    old = make_lm()
    base, new = save_lm(old, tmp_path / "old"), save_lm(shake(old, 0.02, 2), tmp_path / "new")
    tune(base, tmp_path / "tuned", **options)
    path = tmp_path / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    if not words:
        done = rt.port(base, tmp_path / "tuned", new, "none", out=tmp_path / "out")
        assert any("does not name its base" in note for note in done.document.notes)
        return
    with pytest.raises(rt.ModelError, match=words) as caught:
        rt.port(base, tmp_path / "tuned", new, "none", out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "tuned"}


def test_transposed_matrices_are_refused_regardless_of_the_adapter(tmp_path):
    base = save_lm(make_lm(kind="gpt2"), tmp_path / "old")
    tune(base, tmp_path / "tuned", target_modules=["attn.c_proj"])  # a square one, whose shape does not tell
    path = tmp_path / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": False}))
    with pytest.raises(rt.ModelError, match="is not a plain LoRA adapter"):
        rt.port(base, tmp_path / "tuned", base, "none", out=tmp_path / "out")


def test_an_adapter_of_another_model(tmp_path):
    old = make_lm()
    base, new = save_lm(old, tmp_path / "old"), save_lm(shake(old, 0.02, 2), tmp_path / "new")
    wide = save_lm(make_lm(hidden_size=32), tmp_path / "wide")
    tune(wide, tmp_path / "tuned")
    with pytest.raises(rt.ModelError, match=r"do not fit 'model.layers.0.mlp.down_proj.weight' of .*is that the base"):
        rt.port(base, tmp_path / "tuned", new, "none", out=tmp_path / "out")
    path = tmp_path / "tuned" / "adapter_model.safetensors"
    save_file({key.replace("layers.1", "layers.9"): each for key, each in load_file(path).items()}, path)
    with pytest.raises(rt.ModelError, match=r"changes 'model.layers.9.mlp.down_proj.weight', which"):
        rt.port(wide, tmp_path / "tuned", wide, "none", out=tmp_path / "out")
    for sides in ((tmp_path / "tuned", base, new), (base, base, tmp_path / "tuned")):
        with pytest.raises(rt.ModelError, match=r"is an adapter, not a full model; only the tuned model \(--src-ft\)"):
            rt.port(*sides, "none", out=tmp_path / "out")
