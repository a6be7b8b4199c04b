"""One side of a streamed port: a local folder or Hub repository with safetensors weights, read in blocks.

The tuned model may be a LoRA adapter of the old base, whose factors are multiplied on reading.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_retarget.adapters.reading import PREFIX, check_base, check_config
from hf_retarget.document import ModelFacts
from hf_retarget.errors import ModelError
from hf_retarget.hub import clean_token, is_cached
from hf_retarget.models import Reference, load_checkpoint, save_model
from hf_retarget.models.config import read_config
from hf_retarget.models.hub import HubModel, find_bases, find_licence, holds_adapter, no_adapter_weights, read_card
from hf_retarget.models.reference import StoredAdapter, check_pins, is_on_hub
from hf_retarget.models.relation import sample_weights
from hf_retarget.models.weights import FLOATS, StoredTensor, find_tensors, weight_files
from hf_retarget.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, COMPANIONS, MODEL_CONFIG, PORT, TOKENIZER
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

HEAD_ENTRIES = ("id2label", "label2id", "num_labels", "num_classes", "label_names", "label_descriptions")
"""Configuration entries about the head, which is taken from the tuned model."""


@dataclass(frozen=True, eq=False)
class Repository:
    """A folder of weights with its configuration and companion files."""

    reference: str
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    card: Mapping[str, Any]
    """Metadata of its README.md."""
    hub: HubModel | None = None
    is_adapter: bool = False
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> ModelFacts:
        """Its entry in port.json, without hashes."""
        licence = find_licence(self.card)
        return ModelFacts(
            reference=self.reference,
            architecture=self.architecture,
            classes=self.classes,
            library=self.library,
            revision=self.hub.commit if self.hub else None,
            hub_id=self.hub.repository if self.hub else None,
            base_models=find_bases(self.card),
            license=licence.get("license"),
            license_link=licence.get("license_link"),
            dtype=str(FLOATS[self.kind]).removeprefix("torch."),
        )

    @cached_property
    def kind(self) -> str:
        """The dtype of most of its numbers, as safetensors names it."""
        numbers: Counter[str] = Counter()
        for each in self.tensors.values():
            if each.kind in FLOATS:
                numbers[each.kind] += each.numbers
        return numbers.most_common(1)[0][0] if numbers else "F32"

    @property
    def vocabulary(self) -> int | None:
        """The vocabulary size according to the configuration."""
        inner = self.config.get("text_config")
        found = self.config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
        return found if isinstance(found, int) else None

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """Matrices with a row for each token: embeddings, and an untied output layer."""
        found = (name for name, each in self.tensors.items() if len(each.shape) == 2)
        return tuple(name for name in found if self.tensors[name].shape[0] == self.vocabulary)

    @property
    def architecture(self) -> str:
        """The architecture according to its configuration."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else self.config.get("architecture")
        return str(first or self.config.get("model_type") or "unknown architecture")

    @property
    def library(self) -> str:
        """The library that loads it."""
        return "timm" if isinstance(self.config.get("architecture"), str) else "transformers"

    @property
    def classes(self) -> int:
        """Number of classes of a classifier, else 0."""
        count, labels = self.config.get("num_classes", self.config.get("num_labels")), self.config.get("id2label")
        return count if isinstance(count, int) else len(labels) if isinstance(labels, dict) else 0

    @property
    def companions(self) -> dict[str, Path]:
        """Tokenizer, generation configuration and similar files; links that leave the folder are refused."""
        found = {name: self.folder / name for name in COMPANIONS if (self.folder / name).is_file()}
        for name, path in found.items() if self.hub is None else ():
            inside = self.folder.parent.parent if is_cached(path) else self.folder  # the cache links to its blobs
            if not path.resolve().is_relative_to(inside.resolve()):
                raise ModelError(
                    f"'{name}' in '{self.reference}' is a link out of the folder; put the file itself there"
                )
        return found

    @cached_property
    def tokens(self) -> Mapping[int, str] | None:
        """The token of each row according to tokenizer.json; None without that file."""
        return None if self._words is None else self._words[0] | self._words[1]

    @cached_property
    def trained_tokens(self) -> Mapping[int, str]:
        """Tokens without those added to the vocabulary later, such as special tokens."""
        words, added = self._words or ({}, {})
        return {row: word for row, word in words.items() if row not in added}

    @cached_property
    def _words(self) -> tuple[dict[int, str], dict[int, str]] | None:
        """The original and the added tokens of tokenizer.json, without merges, which take ten times the memory."""
        if TOKENIZER not in self.companions:
            return None
        try:
            content = read_json(self.companions[TOKENIZER], MAX_DOCUMENT_BYTES)
        except (OSError, ValueError) as error:
            raise ModelError(f"{TOKENIZER} in '{self.reference}' cannot be read: {error}") from error
        if not isinstance(content, dict):
            return None
        model, extra = content.get("model"), content.get("added_tokens")
        words = model.get("vocab") if isinstance(model, dict) else None
        found: dict[int, str] = {}
        if isinstance(words, dict):
            found = {row: word for word, row in words.items() if isinstance(row, int)}
        elif isinstance(words, list):  # with their scores
            found = {row: str(each[0]) for row, each in enumerate(words) if isinstance(each, list) and each}
        named = [each for each in extra if isinstance(each, dict)] if isinstance(extra, list) else []
        return found, {row: str(each.get("content")) for each in named if isinstance(row := each.get("id"), int)}


def open_repository(
    reference: Reference,
    loading: Mapping[str, Any],
    place: Path,
    *,
    peek: bool = False,
    companions: Iterable[str] = COMPANIONS,
    base: Repository | None = None,
    force_base: bool = False,
) -> Repository:
    """Find the files of a model; `place` is an empty folder for temporary files.

    With `peek`, only configuration, headers and `companions` are fetched from the Hub. A module, a file with `arch`
    and a pickle are first saved as a folder. An adapter is combined with `base`; with `force_base`, even if it names a
    different one.
    """
    text = str(reference)
    folder = Path(text.removeprefix("local-dir:")).expanduser()
    if not isinstance(reference, nn.Module) and not loading["arch"]:
        hub = None
        if not folder.exists() and is_on_hub(text):
            hub = HubModel(text, clean_token(loading["token"]), place if peek else None)
            for name in (MODEL_CONFIG, CARD, PORT, ADAPTER_CONFIG, *companions):
                hub.fetch(name)
            hub.fetch_weights(loading["allow_pickle"])
            folder = hub.folder
        if folder.is_dir():
            check_pins(folder, text, hub)
            if holds_adapter([path.name for path in folder.iterdir()]):
                return _adapt(text, folder, hub, base, force_base)
            files = weight_files(folder, text, allow_pickle=loading["allow_pickle"])
            if all(path.suffix == ".safetensors" for path in files):
                return _read(text, folder, files, hub)
    if "transformers" in sys.modules and isinstance(reference, sys.modules["transformers"].PreTrainedModel):
        name = type(reference).__name__
        reference.save_pretrained(place)
    else:
        checkpoint = load_checkpoint(reference, **loading)
        save_model(place, checkpoint.weights, checkpoint, labels=checkpoint.labels)
        name = checkpoint.reference if isinstance(reference, nn.Module) else text
    return _read(name, place, weight_files(place, name), None)


def _read(reference: str, folder: Path, files: list[Path], hub: HubModel | None) -> Repository:
    if not (folder / MODEL_CONFIG).is_file():
        raise ModelError(f"'{reference}' has no {MODEL_CONFIG}; save the model with the library that made it")
    config, card = read_config(folder / MODEL_CONFIG), read_card(folder / CARD)
    return Repository(reference, folder, tuple(files), find_tensors(files), config, card, hub)


# ---- adapters

_TURNED = ("gpt2", "openai-gpt")
"""Models with transposed matrices, which PEFT records only for the last matrix."""


@dataclass(frozen=True)
class AdaptedTensor(StoredTensor):
    """A tensor of the old base plus a scaled product of two adapter factors, computed on reading."""

    base: StoredTensor
    down: StoredTensor
    up: StoredTensor
    factor: float

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Read some of its numbers in float32."""
        count = self.numbers - start if count is None else count
        rank, width = self.down.shape[0], self.numbers // self.shape[0]
        first, last = start // width, -(-(start + count) // width)
        up = self.up.read(first * rank, (last - first) * rank).float().view(-1, rank)
        added = (up @ self.down.read().float().view(rank, width)).flatten()
        return self.base.read(start, count).float().add(added[start - first * width :][:count], alpha=self.factor)


def _adapt(reference: str, folder: Path, hub: HubModel | None, base: Repository | None, force_base: bool) -> Repository:
    """Combine the old base with a LoRA adapter, including modules the adapter holds in full."""
    if base is None:
        raise ModelError(f"'{reference}' is an adapter, not a full model; only the tuned model (--src-ft) may be one")
    files = (folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG)
    if not files[0].is_file():
        raise ModelError(no_adapter_weights(reference))
    adapter = StoredAdapter(reference, read_config(files[1]), {}, None, {}, hub)
    options, note = check_config(adapter), check_base(adapter, base.facts, force=force_base)
    layers: dict[str, dict[str, StoredTensor]] = {}
    found = dict(base.tensors)
    for key, tensor in find_tensors(files[:1]).items():
        name, mark, part = key.removeprefix(PREFIX).replace(".base_layer.", ".").partition(".lora_")
        if mark:
            layers.setdefault(name, {})[part] = tensor
        else:
            _find_place(base, name, reference)
            found[name] = tensor
    turned = options.get("fan_in_fan_out") or base.config.get("model_type") in _TURNED
    plain = options["peft_type"] == "LORA" and not options.get("use_dora") and not turned
    if not plain or any(each.keys() != {"A.weight", "B.weight"} for each in layers.values()):
        raise ModelError(
            f"'{reference}' is not a plain LoRA adapter, the only kind supported without images: merge it with PEFT "
            "(merge_and_unload), and give the merged model"
        )
    for layer, parts in layers.items():
        name, down, up = f"{layer}.weight", parts["A.weight"], parts["B.weight"]
        place = found.get(name) or _find_place(base, name, reference)
        rank = _choose(options, "rank_pattern", "r", layer)
        alpha = _choose(options, "alpha_pattern", "lora_alpha", layer)
        expected = [(rank, *place.shape[1:]), (*place.shape[:1], rank, *(1 for _ in place.shape[2:]))]
        floats = all(each.kind in FLOATS for each in (place, down, up))
        known = isinstance(alpha, (int, float)) and rank and floats and len(place.shape) > 1
        if [down.shape, up.shape] != expected or not known:
            raise ModelError(
                f"the factors of '{layer}' in '{reference}' do not fit '{name}' of '{base.reference}' "
                f"({list(place.shape)} in {place.kind}) and {ADAPTER_CONFIG}; is that the base it was trained on?"
            )
        factor = alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)
        found[name] = AdaptedTensor(files[0], place.kind, place.shape, 0, place.size, place, down, up, factor)
    config, notes = _describe_adapted(base, found, folder), (note,) if note else ()
    return Repository(reference, folder, files, found, config, read_card(folder / CARD), hub, True, notes)


def _describe_adapted(base: Repository, tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, Any]:
    """The configuration of a base with an adapter, which may change the head or the vocabulary."""
    config = dict(base.config)
    for name, old in base.tensors.items():
        rows = tensors[name].shape[:1]
        if rows != old.shape[:1] and name in base.tables:
            config["vocab_size"] = rows[0]
        elif rows != old.shape[:1]:
            config = {key: value for key, value in config.items() if key not in HEAD_ENTRIES}
            config["num_classes" if base.library == "timm" else "num_labels"] = rows[0]
    return config | (dict(read_config(folder / MODEL_CONFIG)) if (folder / MODEL_CONFIG).is_file() else {})


def _find_place(base: Repository, name: str, reference: str) -> StoredTensor:
    """The tensor of a base that an adapter changes; for an output layer tied to the embeddings, the embeddings."""
    place = base.tensors.get(name) or (base.tensors[base.tables[0]] if len(base.tables) == 1 else None)
    if place is None or (name not in base.tensors and "head" not in name):
        raise ModelError(f"'{reference}' changes '{name}', which '{base.reference}' does not have; is that its base?")
    return place


def _choose(options: Mapping[str, Any], pattern: str, usual: str, layer: str) -> Any:
    """The rank or alpha of a layer, chosen as in PEFT, which defaults to 8 for both."""
    known = options.get(pattern) or {}
    key = next((each for each in known if re.match(rf"(.*\.)?({each})$", layer)), None)
    return known[key] if key is not None else options.get(usual, 8)


def sample_side(side: Repository, names: Collection[str]) -> Mapping[str, Tensor]:
    """Sample numbers from these tensors; empty for an adapter."""
    return {} if side.is_adapter else sample_weights(side.files, side.hub, names)
