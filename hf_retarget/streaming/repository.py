"""One side of a streamed port: a folder with safetensors weights, on this machine or on the Hub, read in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.hub import clean_token, is_cached
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.models.config import read_config
from hf_retarget.models.hub import HubModel, find_bases, find_licence, read_card
from hf_retarget.models.reference import check_pins, is_on_hub
from hf_retarget.models.weights import FLOATS, read_header, weight_files
from hf_retarget.names import CARD, COMPANIONS, MODEL_CONFIG, PORT, TOKENIZER
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes, read_json


@dataclass(frozen=True)
class Stored:
    """A tensor in its file."""

    path: Path
    kind: str
    """The type of its numbers, as safetensors calls it: F32, BF16, I64 …"""
    shape: tuple[int, ...]
    begin: int
    """Where its bytes begin in the file."""
    size: int
    """How many bytes there are."""

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Some of its numbers, in the type they are stored in; the bytes of a type that is not among `FLOATS`."""
        kind = FLOATS.get(self.kind, torch.uint8)
        count = self.size // kind.itemsize - start if count is None else count
        buffer = bytearray(count * kind.itemsize)
        with self.path.open("rb", buffering=0) as file:  # a mapped file would count as memory of the process
            file.seek(self.begin + start * kind.itemsize)
            if file.readinto(buffer) != len(buffer):
                raise ModelError(f"'{self.path}' is cut off; copy or download it again")
        return torch.frombuffer(buffer, dtype=kind) if buffer else torch.empty(0, dtype=kind)


@dataclass(frozen=True, eq=False)
class Repository:
    """A folder of weights with its configuration and what else belongs to a model."""

    reference: str
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]
    card: Mapping[str, Any]
    """The metadata of its README.md."""
    hub: HubModel | None = None

    @cached_property
    def kind(self) -> str:
        """The type of most of its numbers."""
        numbers: Counter[str] = Counter()
        for each in self.tensors.values():
            if each.kind in FLOATS:
                numbers[each.kind] += each.numbers
        return numbers.most_common(1)[0][0] if numbers else "F32"

    @property
    def vocabulary(self) -> int | None:
        """How many rows a table of tokens has, according to the configuration."""
        inner = self.config.get("text_config")
        found = self.config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
        return found if isinstance(found, int) else None

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The matrices with a row for each token: embeddings, and an output layer that is not tied to them."""
        found = (name for name, each in self.tensors.items() if len(each.shape) == 2)
        return tuple(name for name in found if self.tensors[name].shape[0] == self.vocabulary)

    @property
    def architecture(self) -> str:
        """What its configuration calls it."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else self.config.get("architecture")
        return str(first or self.config.get("model_type") or "unknown architecture")

    @property
    def library(self) -> str:
        """The library that loads it."""
        return "timm" if isinstance(self.config.get("architecture"), str) else "transformers"

    @property
    def classes(self) -> int:
        """How many classes it has, if it is a classifier."""
        count, labels = self.config.get("num_classes", self.config.get("num_labels")), self.config.get("id2label")
        return count if isinstance(count, int) else len(labels) if isinstance(labels, dict) else 0

    @property
    def licence(self) -> dict[str, str]:
        """What its card says about the licence."""
        return find_licence(self.card)

    @property
    def bases(self) -> tuple[str, ...]:
        """What its card says about its bases."""
        return find_bases(self.card)

    @property
    def companions(self) -> dict[str, Path]:
        """Tokenizer, generation configuration and the like; a link out of the folder is not followed."""
        found = {name: self.folder / name for name in COMPANIONS if (self.folder / name).is_file()}
        for name, path in found.items() if self.hub is None else ():
            inside = self.folder.parent.parent if is_cached(path) else self.folder  # the cache links to its blobs
            if not path.resolve().is_relative_to(inside.resolve()):
                raise ModelError(f"'{name}' in '{self.reference}' is a link to elsewhere; put the file itself there")
        return found

    @cached_property
    def tokenizer(self) -> dict[str, Any] | None:
        """Its tokenizer.json, as plain values."""
        if TOKENIZER not in self.companions:
            return None
        try:
            found = read_json(self.companions[TOKENIZER], MAX_DOCUMENT_BYTES)
        except (OSError, ValueError) as error:
            raise ModelError(f"{TOKENIZER} in '{self.reference}' cannot be read: {error}") from error
        return found if isinstance(found, dict) else None

    def tokens(self, *, added: bool) -> dict[int, str]:
        """The token of each row, as far as tokenizer.json tells; with those that were `added` to the trained ones."""
        content = self.tokenizer or {}
        model, extra = content.get("model"), content.get("added_tokens")
        words = model.get("vocab") if isinstance(model, dict) else None
        found: dict[int, str] = {}
        if isinstance(words, dict):
            found = {row: word for word, row in words.items() if isinstance(row, int)}
        elif isinstance(words, list):  # with their scores
            found = {row: str(each[0]) for row, each in enumerate(words) if isinstance(each, list) and each}
        named = [each for each in extra if isinstance(each, dict)] if isinstance(extra, list) else []
        special = {row: str(each.get("content")) for each in named if isinstance(row := each.get("id"), int)}
        if added:
            return found | special
        return {row: word for row, word in found.items() if row not in special}


def open_repository(
    reference: str | Path | nn.Module, loading: Mapping[str, Any], place: Path, *, peek: bool = False
) -> Repository:
    """Find the files of a model; `place` is an empty folder for what has to be written first.

    With `peek`, only configuration, headers and tokenizer of a model on the Hub are fetched. A model from Python, a
    file with `arch` or a pickle is saved as a folder, which then is read like any other.
    """
    text = str(reference)
    folder = Path(text.removeprefix("local-dir:")).expanduser()
    if not isinstance(reference, nn.Module) and not loading["arch"]:
        if folder.is_dir():
            files = weight_files(folder, text, allow_pickle=loading["allow_pickle"])
            if all(path.suffix == ".safetensors" for path in files):
                return _read(text, folder, files, None)
        elif not folder.exists() and is_on_hub(text):
            hub = HubModel(text, clean_token(loading["token"]), place if peek else None)
            for name in (MODEL_CONFIG, CARD, PORT, *COMPANIONS):
                hub.fetch(name)
            hub.fetch_weights(loading["allow_pickle"])
            files = weight_files(hub.folder, text, allow_pickle=loading["allow_pickle"])
            if all(path.suffix == ".safetensors" for path in files):
                return _read(text, hub.folder, files, hub)
    checkpoint = load_checkpoint(reference, **loading)
    save_model(place, checkpoint.weights, checkpoint, labels=checkpoint.labels)
    name = checkpoint.reference if isinstance(reference, nn.Module) else text
    return _read(name, place, weight_files(place, name), None)


def _read(reference: str, folder: Path, files: list[Path], hub: HubModel | None) -> Repository:
    check_pins(folder, reference, hub)
    tensors = {}
    for path in files:
        header, begin = read_header(path)
        for name, each in header.items():
            start, end = each["data_offsets"]
            tensors[name] = Stored(path, each["dtype"], tuple(each["shape"]), begin + start, end - start)
    if not (folder / MODEL_CONFIG).is_file():
        raise ModelError(f"'{reference}' has no {MODEL_CONFIG}; save the model with the library that made it")
    config = read_config(folder / MODEL_CONFIG)
    card = read_card(folder / CARD) if (folder / CARD).is_file() else {}
    return Repository(reference, folder, tuple(files), tensors, config, card, hub)


def copy_companion(path: Path, target: Path) -> None:
    """Copy a small file of untrusted origin."""
    try:
        target.write_bytes(read_bytes(path, MAX_DOCUMENT_BYTES))
    except ValueError as error:
        raise ModelError(f"'{path}' cannot be copied: {error}") from error
