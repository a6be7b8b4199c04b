"""Configurations of models, and of what is done to images, that cannot be."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from faults.bench import DATA, Bench, Row, rewrite

Changes = dict[str, Any]


def _changed(changes: Changes, command: tuple[str, ...], bench: Bench, folder: Path) -> tuple[object, ...]:
    shutil.copytree(bench.model, folder / "model")
    rewrite(folder / "model" / "config.json", lambda config: config.update(changes))
    return (*command, "model", *(DATA if command == ("evaluate",) else ("out",) if command == ("convert",) else ()))


def _images(**entries: Any) -> Changes:
    return {"pretrained_cfg": {"input_size": [1, 28, 28], "mean": [0.5], "std": [0.5], **entries}}


# What is wrong with one entry, and what the message says about it.
TIMM: list[tuple[str, Changes, tuple[str, ...]]] = [
    ("no architecture", {"architecture": None}, ("architecture",)),
    ("architecture a number", {"architecture": 7}, ("architecture",)),
    ("architecture a list", {"architecture": ["resnet18"]}, ("architecture",)),
    ("architecture unknown", {"architecture": "resnet81"}, ("resnet81",)),
    ("architecture long", {"architecture": "r" * 5000}, ("not a timm model",)),
    ("architecture another", {"architecture": "test_vit"}, ("does not fit",)),
    ("architecture a folder", {"architecture": "local-dir:x"}, ("local-dir:x",)),
    ("architecture on the Hub", {"architecture": "hf-hub:x/y"}, ("hf-hub:x/y",)),
    ("architecture code", {"architecture": "os:system"}, ("os:system",)),
    ("classes negative", {"num_classes": -1}, ("num_classes",)),
    ("classes a fraction", {"num_classes": 10.5}, ("num_classes",)),
    ("classes a text", {"num_classes": "ten"}, ("num_classes",)),
    ("classes a switch", {"num_classes": True}, ("num_classes",)),
    ("classes too many", {"num_classes": 10**12}, ("num_classes",)),
    ("classes other than the head", {"num_classes": 11}, ("11",)),
    ("arguments a list", {"model_args": [1]}, ("model_args",)),
    ("arguments a text", {"model_args": "x"}, ("model_args",)),
    ("arguments unknown", {"model_args": {"in_chans": 1, "nosuch": 3}}, ("nosuch",)),
    ("argument mistyped", {"model_args": {"in_chan": 1}}, ("in_chan", "in_chans")),
    ("argument of another kind", {"model_args": {"in_chans": "one"}}, ("cannot be built",)),
    ("argument negative", {"model_args": {"in_chans": -1}}, ("cannot be built", "negative")),
    ("argument zero", {"model_args": {"in_chans": 0}}, ("does not fit", "[16, 0, 3, 3]")),
    ("layers beyond reason", {"model_args": {"in_chans": 1, "layers": [10**6, 1, 1, 1]}}, ("layers",)),
    ("depth beyond reason", {"architecture": "test_vit", "model_args": {"depth": 10**6}}, ("depth",)),
    ("width beyond reason", {"architecture": "test_vit", "model_args": {"embed_dim": 10**9}}, ("embed_dim",)),
    ("width that heads do not divide", {"architecture": "test_vit", "model_args": {"embed_dim": 65}}, ("cannot be built", "divisible")),
    ("argument nested", {"model_args": {"in_chans": 1, "block_args": {"a": {"b": {"c": {"d": {"e": 1}}}}}}}, ("cannot be built",)),
    ("weights elsewhere", {"model_args": {"checkpoint_path": "/etc/hostname"}}, ("checkpoint_path",)),
    ("weights at an address", {"model_args": {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/"}}}, ("pretrained_cfg_overlay",)),
    ("labels of another number", {"label_names": ["a", "b"]}, ("label",)),
    ("images a list", {"pretrained_cfg": [1]}, ("pretrained_cfg",)),
    ("images a text", {"pretrained_cfg": "x"}, ("pretrained_cfg",)),
    ("weights in images", _images(file="/etc/hostname"), ("'file'",)),
    ("pooling a text", _images(pool_size="x"), ("pool_size",)),
    ("classifier a number", _images(classifier=7), ("classifier",)),
    ("classifier nested", _images(classifier=[["fc"]]), ("classifier",)),
    ("classifier that is not there", _images(classifier="nope"), ("nope",)),
    ("licence a list", _images(license=["mit"]), ("license",)),
]  # fmt: skip

# What the model itself decides, whatever these say.
OVERRULED: list[tuple[str, Changes]] = [
    ("channels other than the model's", _images(input_size=[3, 28, 28])),
    ("channels that no image has", _images(input_size=[2, 28, 28])),
    ("std of three channels", _images(std=[0.5, 0.5, 0.5])),
]

# The same for entries about images, which are read when a model meets images.
PICTURES: list[tuple[str, Changes, tuple[str, ...]]] = [
    ("size of two numbers", _images(input_size=[28, 28]), ("input_size",)),
    ("size of four numbers", _images(input_size=[1, 1, 28, 28]), ("input_size",)),
    ("size of nothing", _images(input_size=[1, 0, 28]), ("input_size",)),
    ("size negative", _images(input_size=[1, -28, 28]), ("input_size",)),
    ("size a fraction", _images(input_size=[1, 28.5, 28]), ("input_size",)),
    ("size a number", _images(input_size=28), ("input_size",)),
    ("size beyond reason", _images(input_size=[1, 10**6, 10**6]), ("input_size",)),
    ("mean a text", _images(mean="red"), ("mean",)),
    ("mean of texts", _images(mean=["0.5"]), ("mean",)),
    ("mean empty", _images(mean=[]), ("mean",)),
    ("mean of two channels", _images(mean=[0.5, 0.5]), ("mean",)),
    ("mean of switches", _images(mean=[True]), ("mean",)),
    ("std of zero", _images(std=[0.0]), ("std",)),
    ("std negative", _images(std=[-1.0]), ("std",)),
    ("std of four channels", _images(std=[0.5, 0.5, 0.5, 0.5]), ("std",)),
    ("std an object", _images(std={"r": 1}), ("std",)),
    ("crop a text", _images(crop_pct="all"), ("crop_pct",)),
    ("crop zero", _images(crop_pct=0), ("crop_pct",)),
    ("crop negative", _images(crop_pct=-0.9), ("crop_pct",)),
    ("crop tiny", _images(crop_pct=1e-9), ("crop_pct",)),
    ("crop a list", _images(crop_pct=[0.9]), ("crop_pct",)),
    ("crop mode unknown", _images(crop_mode="evil"), ("crop_mode",)),
    ("crop mode a number", _images(crop_mode=1), ("crop_mode",)),
    ("interpolation unknown", _images(interpolation="xxx"), ("interpolation",)),
    ("interpolation a number", _images(interpolation=3), ("interpolation",)),
    ("fixed size a text", _images(fixed_input_size="yes"), ("fixed_input_size",)),
]

# The whole file is something else.
TEXTS: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("empty", "", ("config.json",)),
    ("a list", "[]", ("config.json", "list")),
    ("nothing", "null", ("config.json",)),
    ("a text", '"resnet18"', ("config.json",)),
    ("an empty object", "{}", ("config.json",)),
    ("cut", '{"architecture": "test_', ("config.json",)),
    ("not UTF-8", b'{"architecture": "\xff"}', ("config.json",)),
    ("UTF-16", '{"architecture": "test_resnet"}'.encode("utf-16"), ("config.json",)),
    ("nested", "[" * 100_000, ("config.json", "nested")),
    ("nested objects", '{"a":' * 100_000 + "1" + "}" * 100_000, ("config.json", "nested")),
    ("not a number", '{"num_classes": NaN}', ("config.json", "NaN")),
    ("infinity", '{"num_classes": 1e999}', ("config.json", "too large")),
    ("a number of 5,000 digits", '{"num_classes": 1' + "0" * 5000 + "}", ("config.json", "beyond")),
    ("half a character", '{"architecture": "\\ud800"}', ("config.json", "surrogates")),
    ("17 MB", '"' + "x" * (17 << 20) + '"', ("config.json", "at most")),
    ("HTML", "<html></html>", ("config.json",)),
]


def _text(text: str | bytes, bench: Bench, folder: Path) -> tuple[object, ...]:
    shutil.copytree(bench.model, folder / "model")
    (folder / "model" / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return ("convert", "model", "out")


# ---- transformers

PREPROCESSOR: list[tuple[str, Any, tuple[str, ...]]] = [
    ("resample a list", {"resample": []}, ("interpolation '[]'",)),
    ("resample unknown", {"resample": 99}, ("interpolation 99",)),
    ("resample a text", {"resample": "x"}, ("interpolation 'x'",)),
    ("crop zero", {"crop_size": 0, "do_center_crop": True}, ("input_size (3, 0, 0)",)),
    ("crop a text", {"crop_size": "x", "do_center_crop": True}, ("'x'",)),
    ("size a text", {"size": "x"}, ("'x'",)),
    ("size zero", {"size": 0}, ("size",)),
    ("size negative", {"size": {"height": -1, "width": -1}}, ("size",)),
    ("size beyond reason", {"size": {"height": 10**9, "width": 10**9}}, ("size",)),
    ("size of half an object", {"size": {"height": 16}}, ("'height': 16",)),
    ("mean a text", {"image_mean": "x"}, ("mean",)),
    ("mean empty", {"image_mean": []}, ("mean",)),
    ("std of zero", {"image_std": [0, 0, 0]}, ("std",)),
    ("std of texts", {"image_std": ["a", "b", "c"]}, ("std",)),
    ("crop_pct a text", {"crop_pct": "x", "size": {"shortest_edge": 16}}, ("crop_pct",)),
]
PREPROCESSOR_TEXTS = [("a list", "[]"), ("nested", "[" * 100_000), ("empty", ""), ("not UTF-8", "\udcff")]

TRANSFORMERS: list[tuple[str, Changes, tuple[str, ...]]] = [
    ("type unknown", {"model_type": "nosuch"}, ("nosuch",)),
    ("type a list", {"model_type": ["vit"]}, ("of type",)),
    ("labels of texts for numbers", {"id2label": {"a": "b"}}, ("not a valid configuration of 'vit'",)),
    ("labels a list", {"id2label": ["a"]}, ("not a valid configuration of 'vit'",)),
    ("layers beyond reason", {"num_hidden_layers": 10**6}, ("num_hidden_layers",)),
    ("layers a text", {"num_hidden_layers": "x"}, ("num_hidden_layers",)),
    ("layers negative", {"num_hidden_layers": -1}, ("does not fit",)),
    ("width that heads do not divide", {"num_attention_heads": 3}, ("does not fit",)),
    ("image size a text", {"image_size": "x"}, ("image_size",)),
    ("image size zero", {"image_size": 0}, ("does not fit",)),
    ("activation unknown", {"hidden_act": "evil"}, ("cannot be built", "evil")),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
]


def make_vit(bench: Bench) -> Path:
    """A small model of transformers, made once."""
    folder = bench.root / "honest" / "transformers"
    if not folder.exists():
        from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=10)
        ViTForImageClassification(config).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def _preprocessor(content: Any, bench: Bench, folder: Path) -> tuple[object, ...]:
    path = Path(shutil.copytree(make_vit(bench), folder / "model")) / "preprocessor_config.json"
    if isinstance(content, dict):
        rewrite(path, lambda config: config.update(content))
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    return ("evaluate", "model", "--data", "fashion-mnist", "--data-limit", "20")


def _transformers(changes: Changes, bench: Bench, folder: Path) -> tuple[object, ...]:
    shutil.copytree(make_vit(bench), folder / "model")
    rewrite(folder / "model" / "config.json", lambda config: config.update(changes))
    return ("inspect", "model")


# ---- --preprocess

PREPROCESS: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("a file that is not there", None, ("how.json",)),
    ("a list", "[]", ("how.json",)),
    ("no JSON", "x", ("how.json",)),
    ("nested", "[" * 100_000, ("how.json", "nested")),
    ("a mistyped entry", '{"input_size": [1, 28, 28], "interpolaton": "box"}', ("interpolaton", "interpolation")),
    ("size of two numbers", '{"input_size": [28, 28]}', ("input_size",)),
    ("std of zero", '{"input_size": [1, 28, 28], "std": [0]}', ("std",)),
    ("mean of two channels", '{"input_size": [1, 28, 28], "mean": [0, 0], "std": [1]}', ("mean",)),
    ("an empty object", "{}", ("how.json",)),
]


def _preprocess(text: str | None, bench: Bench, folder: Path) -> tuple[object, ...]:
    if text is not None:
        (folder / "how.json").write_text(text)
    return ("evaluate", bench.model, *DATA, "--preprocess", "how.json")


ROWS = [
    Row("references", "dots for a module", lambda bench, folder: ("inspect", "..:x"), ("cannot be imported",)),
    *(Row("configurations", name, partial(_changed, changes, ("convert",)), says) for name, changes, says in TIMM),
    *(Row("configurations", name, partial(_changed, changes, ("evaluate",)), says) for name, changes, says in PICTURES),
    *(Row("configurations", name, partial(_changed, changes, ("evaluate",)), code=0) for name, changes in OVERRULED),
    *(Row("configurations", f"file {name}", partial(_text, text), says) for name, text, says in TEXTS),
    *(
        Row("configurations", f"transformers, {name}", partial(_transformers, changes), says)
        for name, changes, says in TRANSFORMERS
    ),
    *(
        Row("configurations", f"preprocessor, {name}", partial(_preprocessor, content), says)
        for name, content, says in PREPROCESSOR
    ),
    *(
        Row("configurations", f"preprocessor file {name}", partial(_preprocessor, content), ("preprocessor_config.json",))
        for name, content in PREPROCESSOR_TEXTS
    ),
    *(Row("configurations", f"preprocess, {name}", partial(_preprocess, text), says) for name, text, says in PREPROCESS),
]  # fmt: skip
