"""Scores ports of language models by the loss of all four models on texts of the fine-tuning's domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_retarget.document import Lead, TextFacts
from hf_retarget.errors import DataError, ModelError, NotFiniteError
from hf_retarget.models.transformers_models import load_language_model, read_language_config
from hf_retarget.models.weights import FLOATS
from hf_retarget.names import TOKENIZER
from hf_retarget.streaming.repository import Repository
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, parse_json, read_bytes
from hf_retarget.words import plural

if TYPE_CHECKING:
    from hf_retarget.run import Run

LONGEST = 512
"""Maximum number of tokens read from a text."""
MOST = 1000
"""Maximum number of texts read from a file."""
MUCH, LITTLE = 0.5, 0.2
"""Share of the gain from which a port counts as worth it, and below which as not worth it."""


def read_texts(path: str | Path) -> list[str]:
    """Read the texts of a file: its lines, or the `text` entries of a .jsonl file."""
    try:
        content = read_bytes(Path(path).expanduser(), MAX_DOCUMENT_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the texts in '{path}' cannot be read: {error}; give a .txt or .jsonl file in UTF-8"
        ) from error
    lines = content.replace("\r\n", "\n").split("\n")  # `splitlines` would also split at other characters
    if str(path).endswith((".jsonl", ".json")):
        for number, line in enumerate(lines):
            try:
                lines[number] = _read_entry(line) if line.strip() else ""
            except (ValueError, KeyError, TypeError) as error:
                where = f"line {number + 1} of '{path}'"
                raise DataError(f"{where} is not a JSON object with a string as 'text'; correct it") from error
    texts = [line for line in lines if line.strip()][:MOST]
    if len(texts) < 2:
        raise DataError(f"there are fewer than two texts in '{path}'; give a few hundred, one per line")
    return texts


def _read_entry(line: str) -> str:
    text = parse_json(line)["text"]
    if not isinstance(text, str):
        raise TypeError
    return text


def encode_texts(path: str | Path, tokenizer: Repository, sides: Iterable[Repository]) -> list[list[int]]:
    """Encode the texts of a file, truncated to what all models can read; DataError if a model lacks a token."""
    from tokenizers import Tokenizer

    texts, most, longest = read_texts(path), math.inf, LONGEST
    for side in sides:
        config = read_language_config(side.config, side.reference).get_text_config()
        longest = min(longest, getattr(config, "max_position_embeddings", None) or LONGEST)
        most = min(most, side.vocabulary or 0)
    if tokenizer.tokens is None:
        raise ModelError(
            f"--text needs a tokenizer, and '{tokenizer.reference}' has no {TOKENIZER}; save its tokenizer there "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(…)), or leave out --text"
        )
    try:
        made = Tokenizer.from_str(tokenizer.companions[TOKENIZER].read_text(encoding="utf-8"))
        made.no_truncation()
        made.no_padding()
        encoded = made.encode_batch(texts)
    except BaseException as error:  # the library raises plain exceptions, and panics that are none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{TOKENIZER} in '{tokenizer.reference}' cannot be used: {error}") from error
    pieces = [each.ids[:longest] for each in encoded]
    for number, piece in enumerate(pieces, 1):
        if beyond := next((each for each in piece if each >= most), None):
            raise DataError(
                f"text {number} in '{path}' has the token {made.id_to_token(beyond)!r}, which some models lack, so "
                "their losses cannot be compared; leave out such tokens"
            )
    pieces = [piece for piece in pieces if len(piece) > 1]
    if len(pieces) < 2:
        raise DataError(f"fewer than two texts in '{path}' have more than one token; give a few hundred, one per line")
    return pieces


def sum_losses(side: Repository, pieces: Sequence[Sequence[int]], run: Run, who: str) -> list[float]:
    """The loss of a language model on each text, summed over its tokens."""
    device = run.accelerator.device
    with run.stage("loading", f"loading the {who}"):
        model = load_language_model(
            side.config,
            side.files,
            side.reference,
            FLOATS[side.kind],
            sum(each.numbers for each in side.tensors.values()),
        )
        model.to(device)
    losses = []
    with run.stage("scoring", f"reading texts with the {who}"), torch.inference_mode():
        for piece in run.progress.track(pieces, f"reading texts with the {who}"):
            tokens = torch.tensor([piece], device=device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            losses.append(float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")))
            if not math.isfinite(losses[-1]):
                raise NotFiniteError(
                    f"the loss of the {who} on text {len(losses)} is {losses[-1]}, in {FLOATS[side.kind]}; "
                    "leave out --text, with --resume if the port has begun, or use weights of another --dtype"
                )
    return losses


def measure_texts(name: str, pieces: Sequence[Sequence[int]], losses: Mapping[str, Sequence[float]]) -> TextFacts:
    """Compute the share of the fine-tuning's gain that was kept, from the losses of all four models on each text."""
    counts = [len(piece) - 1 for piece in pieces]
    gain = _jackknife(counts, losses, lambda each: each["source"] - each["tuned"])
    kept, why = None, ""
    if gain.is_clear and gain.value > 0:
        kept = _jackknife(
            counts, losses, lambda e: (e["target"] - e["port"]) / ((e["source"] - e["tuned"]) or math.nan)
        )
    else:
        why = (
            f"the tuned model is not shown to be better on these texts than the old base (its loss per token is lower "
            f"by {gain.value:.4f} ± {gain.error:.4f}), so no share can be given; use more texts of the kind it was "
            "tuned for"
        )
    means = {side: sum(each) / sum(counts) for side, each in losses.items()}
    return TextFacts(name, len(pieces), sum(counts), means, gain, kept, why)


def _jackknife(
    counts: Sequence[int], losses: Mapping[str, Sequence[float]], figure: Callable[[dict[str, float]], float]
) -> Lead:
    """A statistic of the losses per token, with its jackknife standard error over texts."""
    total, number = sum(counts), len(counts)
    sums = {side: math.fsum(each) for side, each in losses.items()}
    without = [
        figure({side: (sums[side] - each[left]) / (total - counts[left]) for side, each in losses.items()})
        for left in range(number)
    ]
    middle = math.fsum(without) / number
    error = math.sqrt((number - 1) / number * math.fsum((each - middle) ** 2 for each in without))
    return Lead(figure({side: each / total for side, each in sums.items()}), error)


def judge_texts(facts: TextFacts) -> str:
    """The verdict in one line."""
    old, tuned, new, port = (f"{facts.losses[side]:.3f}" for side in ("source", "tuned", "target", "port"))
    start = (
        f"loss per token on {plural(facts.texts, 'text')}: {old} → {tuned} on the old base, {new} → {port} on the new"
    )
    if facts.kept is None:
        return f"Undecided: {start}; {facts.why}."
    share = f"{facts.kept.value:.1%} (± {facts.kept.error:.1%}) of the fine-tuning's gain was kept"
    if facts.kept.value < LITTLE or not facts.kept.is_clear:
        doubt = "" if facts.kept.is_clear else ", not shown to be more than nothing"
        return f"Not worth it: {share}{doubt}; {start}; fine-tune the new base instead."
    return f"{'Worth it' if facts.kept.value >= MUCH else 'Kept in part'}: {share}; {start}."
