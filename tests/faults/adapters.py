"""Adapters and language models, texts and tokenizers that are not what they should be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from faults.bench import DATA, SHORT, SIDES, Bench, Row, rewrite
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DEEP = "[" * 100_000


@cache
def _adapter(bench: Bench) -> Path:
    """A LoRA of a small ViT on its base, saved by PEFT."""
    from dataclasses import replace

    import peft
    import timm

    from hf_retarget.models import load_checkpoint, save_model

    for number, name in enumerate(("vit", "vit-new")):
        torch.manual_seed(number)
        net = timm.create_model("test_vit", num_classes=10, in_chans=1, img_size=32)
        like = load_checkpoint(net)
        like = replace(like, architecture="test_vit", options={"in_chans": 1, "img_size": 32})
        save_model(bench.root / "honest" / name, net.state_dict(), like)
    given = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4)
    folder = bench.root / "honest" / "adapter"
    peft.get_peft_model(load_checkpoint(bench.root / "honest" / "vit").build(10), given).save_pretrained(folder)
    return folder


Change = Callable[[Path], object]


def _set(**entries: Any) -> Change:
    return lambda folder: rewrite(folder / CONFIG, lambda config: config.update(entries))


def _text(text: str) -> Change:
    return lambda folder: (folder / CONFIG).write_text(text)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    def make(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return make


def _first(value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return _tensors(lambda tensors: tensors.update({next(iter(tensors)): value(tensors[next(iter(tensors))])}))


ADAPTERS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("config empty", _text(""), (CONFIG,)),
    ("config a list", _text("[]"), (CONFIG,)),
    ("config nested", _text(_DEEP), (CONFIG, "nested")),
    ("config with a key twice", _text('{"peft_type": "LORA", "peft_type": "LORA"}'), (CONFIG, "twice")),
    ("kind unknown", _set(peft_type="NOSUCH"), ("NOSUCH",)),
    ("kind a list", _set(peft_type=[]), (CONFIG,)),
    ("kind of prompts", _set(peft_type="PROMPT_TUNING"), ("PROMPT_TUNING",)),
    ("targets a pattern", _set(target_modules=".*"), ("target_modules",)),
    ("targets a number", _set(target_modules=3), ("target_modules",)),
    ("targets empty", _set(target_modules=[]), ("adapter",)),
    ("targets that are not there", _set(target_modules=["nosuch"]), ("nosuch",)),
    ("rank zero", _set(r=0), ("r",)),
    ("rank negative", _set(r=-4), ("r",)),
    ("rank a text", _set(r="4"), ("r",)),
    ("rank beyond reason", _set(r=10**9), ("r",)),
    ("rank other than the tensors'", _set(r=8), ("adapter",)),
    ("alpha a text", _set(lora_alpha="x"), ("lora_alpha",)),
    ("bias unknown", _set(bias="some"), ("bias",)),
    ("a rank pattern that is a pattern", _set(rank_pattern={".*": 3}), ("rank_pattern",)),
    ("an unknown entry", _set(nosuch=3), ("nosuch",)),
    ("code", _set(auto_mapping={"base_model_class": "x", "parent_library": "os"}), ("auto_mapping",)),
    ("a start that changes the base", _set(init_lora_weights="pissa"), ("init_lora_weights",)),
    ("no weights", lambda folder: (folder / WEIGHTS).unlink(), (WEIGHTS,)),
    ("weights cut", lambda folder: os.truncate(folder / WEIGHTS, 300), (WEIGHTS,)),
    ("weights empty", lambda folder: (folder / WEIGHTS).write_bytes(b""), (WEIGHTS,)),
    ("weights of nothing", _tensors(lambda tensors: tensors.clear()), ("no tensors", WEIGHTS)),
    ("a tensor is missing", _tensors(lambda tensors: tensors.pop(next(iter(tensors)))), ("lora_",)),
    ("a tensor too many", _tensors(lambda tensors: tensors.update(extra=torch.zeros(2))), ("extra",)),
    ("a tensor of another shape", _first(lambda tensor: tensor[:1].clone()), ("lora_",)),
    ("a tensor not finite", _first(lambda tensor: tensor * float("nan")), ("lora_", "NaN or infinite")),
    ("a tensor of whole numbers", _first(lambda tensor: tensor.to(torch.int32)), ("lora_",)),
    ("a pickle", lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), ("adapter",)),
]


def _adapted(change: Change, bench: Bench, folder: Path) -> tuple[object, ...]:
    honest = _adapter(bench)
    change(Path(shutil.copytree(honest, folder / "adapter")))
    base, new = honest.with_name("vit"), honest.with_name("vit-new")
    trio = bench.trio(base=base, tuned="adapter", new=new)
    return ("port", *trio, *DATA[:4], *SHORT, "--method", "naive", "--out", "out")


def _as_base(bench: Bench, folder: Path) -> tuple[object, ...]:
    honest = _adapter(bench)
    return ("evaluate", honest, *DATA)


# ---- language models, as files


@cache
def _languages(bench: Bench) -> dict[str, Path]:
    from tiny_lm import save_trio

    return save_trio(bench.root / "honest" / "languages")


_MODEL, _TOKENS = "model.safetensors", "tokenizer.json"


def _streamed(side: str, change: Change, more: tuple[str, ...], bench: Bench, folder: Path) -> tuple[object, ...]:
    sides: dict[str, Path | str] = dict(_languages(bench))
    change(Path(shutil.copytree(sides[side], folder / side)))
    sides[side] = side
    trio = [each for pair in zip(SIDES, sides.values(), strict=True) for each in pair]
    return ("port", *trio, "--data", "none", "--out", "out", "-q", *more)


def _in(change: Callable[[dict[str, Any]], object]) -> Change:
    def make(folder: Path) -> None:
        tensors = load_file(folder / _MODEL)
        change(tensors)
        save_file(tensors, folder / _MODEL, {"format": "pt"})

    return make


def _entry(name: str, **entries: Any) -> Change:
    return lambda folder: rewrite(folder / name, lambda config: config.update(entries))


_NAME = "model.layers.0.mlp.up_proj.weight"

STREAMED: list[tuple[str, str, Change, tuple[str, ...]]] = [
    ("weights cut", "src_ft", lambda folder: os.truncate(folder / _MODEL, 3000), (_MODEL,)),
    ("weights gone", "new_base", lambda folder: (folder / _MODEL).unlink(), ("safetensors",)),
    ("config gone", "new_base", lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    ("config nested", "new_base", lambda folder: (folder / "config.json").write_text(_DEEP), ("config.json",)),
    ("config a list", "new_base", lambda folder: (folder / "config.json").write_text("[]"), ("config.json",)),
    ("a tensor is missing", "src_ft", _in(lambda tensors: tensors.pop(_NAME)), (_NAME,)),
    ("a tensor is missing in the new base", "new_base", _in(lambda tensors: tensors.pop(_NAME)), (_NAME,)),
    ("a tensor of another shape", "src_ft", _in(lambda tensors: tensors.update({_NAME: torch.zeros(3, 3)})), (_NAME,)),
    ("a tensor of whole numbers", "src_ft", _in(lambda tensors: tensors.update({_NAME: tensors[_NAME].to(torch.int32)})), (_NAME, "I32")),
    ("a tensor of 8 bits", "src_ft", _in(lambda tensors: tensors.update({_NAME: tensors[_NAME].to(torch.float8_e4m3fn)})), (_NAME, "F8_E4M3")),
    ("a tensor not finite", "src_ft", _in(lambda tensors: tensors[_NAME].fill_(float("nan"))), (_NAME, "NaN or infinite")),
    ("a tensor infinite in the new base", "new_base", _in(lambda tensors: tensors[_NAME].fill_(float("inf"))), (_NAME, "NaN or infinite")),
    ("a sum beyond its type", "new_base", _in(lambda tensors: tensors[_NAME].fill_(3.4e38)), ("independent",)),
    ("a statistic of BatchNorm", "new_base", _in(lambda tensors: tensors.update({"bn.running_mean": torch.zeros(2)})), ("running_mean",)),
    ("the whole vocabulary another", "src_ft", _entry("config.json", vocab_size=99), ()),
    ("a tokenizer link", "src_ft", lambda folder: ((folder / _TOKENS).unlink(), (folder / _TOKENS).symlink_to("/etc/hostname")), (_TOKENS, "link")),
    ("generation config a pipe", "new_base", lambda folder: ((folder / "generation_config.json").unlink(missing_ok=True), os.mkfifo(folder / "generation_config.json")), ()),
]  # fmt: skip

_FINE = ("generation config a pipe", "the whole vocabulary another")  # the new base decides

TEXTS: list[tuple[str, str, bytes | None, tuple[str, ...]]] = [
    ("empty", "law.txt", b"", ("law.txt",)),
    ("blank lines", "law.txt", b"\n\n  \n", ("law.txt",)),
    ("not UTF-8", "law.txt", b"\xff\xfe\xfa hello", ("law.txt",)),
    ("another kind", "law.csv", b"a,b", ("law.csv",)),
    ("lines that are no JSON", "law.jsonl", b"hello\n", ("law.jsonl", "line 1")),
    ("lines without a text", "law.jsonl", b'{"body": "x"}\n', ("law.jsonl", "text")),
    ("a text that is a number", "law.jsonl", b'{"text": 3}\n', ("law.jsonl", "text")),
    ("a line that is a list", "law.jsonl", b"[1]\n", ("law.jsonl",)),
    ("lines nested", "law.jsonl", b"[" * 100_000, ("law.jsonl", "line 1")),
    ("not there", "law.txt", None, ("law.txt",)),
]


def _told(name: str, content: bytes | None, bench: Bench, folder: Path) -> tuple[object, ...]:
    if content is not None:
        (folder / name).write_bytes(content)
    trio = [each for pair in zip(SIDES, _languages(bench).values(), strict=True) for each in pair]
    return ("port", *trio, "--data", "none", "--out", "out", "-q", "--text", name)


def _tokens(text: str) -> Change:
    return lambda folder: (folder / _TOKENS).write_text(text)


TOKENIZERS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("gone", lambda folder: (folder / _TOKENS).unlink(), ()),
    ("empty", _tokens(""), ("tokenizer",)),
    ("a list", _tokens("[]"), ()),
    ("nested", _tokens(_DEEP), (_TOKENS, "nested")),
    ("without a model", _tokens('{"version": "1.0"}'), ()),
    ("rows beyond the table", lambda folder: rewrite(folder / _TOKENS, lambda content: content["model"]["vocab"].update({"a": 10**6})), ()),
]  # fmt: skip


def _with_tokenizer(change: Change, bench: Bench, folder: Path) -> tuple[object, ...]:
    (folder / "law.txt").write_text("the law of the land\n" * 20)
    return _streamed("src_ft", change, ("--text", "law.txt"), bench, folder)


def _plain(*more: str) -> Callable[[Bench, Path], tuple[object, ...]]:
    return lambda bench, folder: _streamed("src_ft", lambda _: None, more, bench, folder)


OPTIONS = [
    ("texts and images", _plain("--also-data", "fashion-mnist"), ("also",)),
    ("alpha beyond reason", _plain("--alpha", "1e9"), ("port.alpha", "at most 10")),
    ("an adapter of it", _plain("--save-as", "lora", "--rank", "9"), ("needs images",)),
    ("a permutation", _plain("--method", "fgmt"), ("images",)),
    ("a dtype unknown", _plain("--dtype", "int8"), ("int8",)),
    ("images of a language model", lambda bench, folder: ("port", *[e for p in zip(SIDES, _languages(bench).values(), strict=True) for e in p], *DATA, "--out", "out"), ("llama",)),
    ("BatchNorm without images", lambda bench, folder: ("port", *bench.trio(), "--data", "none", "--out", "out"), ("BatchNorm",)),
]  # fmt: skip

ROWS = [
    *(Row("adapters", name, partial(_adapted, change), says) for name, change, says in ADAPTERS),
    Row("adapters", "as a whole model", _as_base, ("adapter",)),
    *(
        Row("streamed", name, partial(_streamed, side, change, ()), says, *((0, ("out",)) if name in _FINE else ()))
        for name, side, change, says in STREAMED
    ),
    *(Row("streamed", f"option, {name}", make, says, 2 if "dtype" in name or "alpha" in name else 1) for name, make, says in OPTIONS),
    *(Row("texts", name, partial(_told, file, content), says, 2 if content is None else 1) for name, file, content, says in TEXTS),
    *(
        Row("texts", f"tokenizer {name}", partial(_with_tokenizer, change), says, *(() if says else (0, ("out",))))
        for name, change, says in TOKENIZERS  # without one, that of another side is taken
    ),
]  # fmt: skip
