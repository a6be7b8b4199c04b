"""Tiny language models, trained in minutes: how much of a fine-tuning a streamed port keeps.

    OMP_NUM_THREADS=1 python benchmarks/language.py --folder /tmp/language

Llamas of about 100,000 parameters read texts letter by letter. The old base learns sentences of a small grammar; the
new base continues from it, on the same and on a second kind of sentence; an independent base learns both from other
random numbers. The fine-tuning teaches the old base recipes, which no base has seen. It is then ported to the new base
and, against the tool's advice, to the independent one; 300 further recipes measure how much was kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_retarget as rt

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-", "?"]
LENGTH, BATCH = 64, 16
NOUNS = ["dog", "cat", "bird", "tree", "house", "river", "child", "ship", "stone", "cloud", "horse", "garden"]
VERBS = ["sees", "likes", "follows", "paints", "hears", "carries", "finds", "watches"]
KINDS = ["old", "small", "green", "quiet", "quick", "warm", "broken", "bright"]
FOODS = ["flour", "sugar", "butter", "milk", "salt", "rice", "onion", "pepper", "cream", "egg", "lemon", "garlic"]


def tell(draw: random.Random) -> str:
    """A sentence of the old base's grammar."""
    first, second = (f"the {draw.choice(KINDS)} {draw.choice(NOUNS)}" for _ in range(2))
    return f"{first} {draw.choice(VERBS)} {second}. "


def count(draw: random.Random) -> str:
    """A sentence that only the new base learns."""
    first, second = draw.randint(1, 20), draw.randint(1, 20)
    return f"{first} + {second} : {first + second}. "


def cook(draw: random.Random) -> str:
    """A sentence of the fine-tuning."""
    steps = [
        f"{draw.choice(('add', 'mix', 'boil', 'cut'))} {draw.randint(1, 9)} {draw.choice(FOODS)}" for _ in range(3)
    ]
    return f"recipe: {', then '.join(steps)}; serve {draw.choice(('hot', 'cold'))}. "


def write(kinds: list[Callable[[random.Random], str]], seed: int, letters: int) -> str:
    """A long text of such sentences."""
    draw, text = random.Random(seed), ""
    while len(text) < letters:
        text += "".join(draw.choice(kinds)(draw) for _ in range(50))
    return text


def train(model: LlamaForCausalLM, text: str, steps: int, rate: float, seed: int) -> LlamaForCausalLM:
    """A copy of a model, trained on a text."""
    other = LlamaForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    tokens = torch.tensor([LETTERS.index(letter) for letter in text])
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(other.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        other(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return other


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    """A model with a character tokenizer."""
    model.save_pretrained(folder)
    made = Tokenizer(models.WordLevel({letter: row for row, letter in enumerate(LETTERS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.save(str(folder / "tokenizer.json"))
    return folder


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=300, help="Training steps of the old base; the others take a share of them.")
@click.option("--seed", default=0)
def main(folder: Path, steps: int, seed: int) -> None:
    """Train, port, and print what was kept."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    began = time.perf_counter()
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    plain, both, recipes = write([tell], 1, 200_000), write([tell, count], 2, 200_000), write([cook], 3, 200_000)
    torch.manual_seed(seed)
    old = train(LlamaForCausalLM(config), plain, steps, 2e-3, seed)
    tuned = train(old, recipes, steps // 2, 1e-3, seed + 1)
    new = train(old, both, steps // 2, 5e-4, seed + 2)
    torch.manual_seed(seed + 100)
    independent = train(LlamaForCausalLM(config), both, steps + steps // 2, 2e-3, seed + 3)
    models = {"old": old, "tuned": tuned, "new": new, "independent": independent}
    places = {name: save(model, folder / name) for name, model in models.items()}
    draw = random.Random(4)
    (folder / "recipes.txt").write_text("\n".join(cook(draw).strip() for _ in range(300)))
    click.echo(f"trained in {time.perf_counter() - began:.0f} s, {old.num_parameters():,} parameters each\n")
    try:
        rt.port(places["old"], places["tuned"], places["independent"], "none", out=folder / "refused")
    except rt.PortError as error:
        click.echo(f"independent: refused: {error}\n")
    for name in ("new", "independent"):
        done = rt.port(
            places["old"],
            places["tuned"],
            places[name],
            "none",
            out=folder / f"ported-{name}",
            text=folder / "recipes.txt",
            force_relation=name == "independent",
            overwrite=True,
        )
        click.echo(f"{name}: {done.document.relation.sentence if done.document.relation else ''}")
        click.echo(f"{done.verdict}\n")


if __name__ == "__main__":
    main()
