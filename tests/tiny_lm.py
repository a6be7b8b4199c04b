"""Tiny language models of one lineage: an old base, its fine-tuning, and a successor of the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config

WORDS = [*"abcdefghijklmnopqrstuvwxyz ", *map(str, range(10)), "<unk>"]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "vocab_size": len(WORDS),
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gpt2": GPT2Config}


def make_lm(seed: int = 0, kind: str = "llama", **options: Any) -> PreTrainedModel:
    """A tiny language model with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](**{**SIZES, **options}))


def shake(model: PreTrainedModel, scale: float, seed: int, rows: int | None = None) -> PreTrainedModel:
    """A copy that is a little different, with this many tokens."""
    other = type(model)(model.config.__class__.from_dict(model.config.to_dict()))
    other.load_state_dict(model.state_dict())
    if rows is not None:
        other.resize_token_embeddings(rows, mean_resizing=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn_like(parameter) * parameter.std().clamp(min=1e-2))
    return other


def save_lm(model: PreTrainedModel, folder: Path, words: list[str] | None = WORDS, **options: Any) -> Path:
    """Save a model with a tokenizer of these words."""
    model.save_pretrained(folder, **options)
    if words is not None:
        made = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def save_trio(place: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Path]:
    """The same of another kind; `max_shard_size` makes shards."""
    saving = {name: options.pop(name) for name in ("max_shard_size",) if name in options}
    old = make_lm(0, kind, **options)
    sides = {"src_base": old, "src_ft": shake(old, 0.05, 1), "new_base": shake(old, 0.02, 2)}
    return {name: save_lm(each.to(dtype), place / name, **saving) for name, each in sides.items()}
