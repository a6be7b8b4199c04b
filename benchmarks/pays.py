"""Where a port pays: bases of one lineage, drifted and independent ones, with labels, without, and with few images.

    python benchmarks/pays.py --list                     # the pairs of bases, by situation
    python benchmarks/pays.py resnet20-clean --seed 0    # one pair; what is recorded is not run again
    python benchmarks/pays.py --all                      # all pairs, three seeds of the fine-tuning
    python benchmarks/pays.py --cost vit conv8           # the time of auto beside that of fgmt-sign
    python benchmarks/pays.py --write docs/pays.md       # the tables, from benchmarks/results

Each finished run leaves one small record in benchmarks/results/pays, so that tables can be made without running
anything. Bases and fine-tunings are kept in runs/quality. Images and weights are looked for in ../shared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from quality.images import Pictures
from quality.pairs import PAIRS, Noisy, make_bases, tune
from quality.pays_page import RESULTS, draw_drifts, draw_prices, write_tables

import hf_retarget as rt
from hf_retarget.data import load_data
from hf_retarget.evaluation.scorer import Score, Scorer, Teacher
from hf_retarget.run import Run, list_versions
from hf_retarget.training import train_model

SITUATIONS: dict[str, dict[str, Any]] = {
    "labels": {},
    "teacher": {"port.targets": "teacher"},
    "fgmt": {"port.method": "fgmt"},
    "fgmt-sign": {"port.method": "fgmt-sign"},
    "naive": {"port.method": "naive", "port.steps": 1},
    "plus-25": {"finetune.steps": 25},
    "teacher-plus-50": {"port.targets": "teacher", "finetune.steps": 50},
    "unseen": {"tuned": "without"},
    "seen": {"tuned": "with"},
    "head": {"port.method": "head"},
    "robust": {"noisy": True, "port.control": "full"},
    "robust-fit": {"noisy": True, "port.control": "full", "also_data_fit": True},
    "robust-plus-25": {"noisy": True, "finetune.steps": 25},
    "few": {"data.limit": 111},
    "few-labels": {"data.limit": 111, "port.targets": "labels"},
    "few-teacher": {"data.limit": 111, "port.targets": "teacher"},
    "all-labels": {"port.targets": "labels"},
    "all-both": {"port.targets": "both"},
}
SITUATIONS |= {
    f"{count}-{targets}": {"each": count, "port.targets": targets}
    for count in (20, 5, 1)
    for targets in ("labels", "teacher", "both", "auto")
}
"""What is asked of the port, besides `--control none`. Of 111 training images, eleven are to validate on. `tuned` says
whether the old base was fine-tuned at one rate without or with the images to validate on; `noisy` has everything scored
on noisy test images, too; `each` leaves so many training images of each class."""
LEVELS = 36
"""Standard deviation of the noise of those, in levels of 256: as much as the robust bases were trained with."""


def measure(name: str, seed: int, situation: str) -> dict[str, Any]:
    """Port in one situation, and put the figures of all contenders together."""
    bench, old, new = make_bases(name)
    tuned = tune(name, bench, old, seed, SITUATIONS[situation].get("tuned", ""))
    changes = {"port.seed": seed, "port.verify": False, "port.control": "none", **SITUATIONS[situation]}
    changes.pop("tuned", None)
    more: dict[str, Any] = {"also_data_fit": True} if changes.pop("also_data_fit", False) else {}
    if changes.pop("noisy", False):
        more["also_data"] = {side: add_noise(each) for side, each in bench.pictures.items()}
    images: Mapping[str, Any] = bench.pictures
    limit, each = changes.pop("data.limit", None), changes.pop("each", None)
    if limit or each:
        images = {**images, "train": _take(images["train"], bench.task.classes, limit, each, seed)}
        changes["data.validation"] = max(bench.recipe.data.validation, 2.1 / len(images["train"]))  # two at least
    if "finetune.steps" in changes:
        rates, how = sorted(bench.task.rates or bench.task.tuning.lrs), bench.task.tuning
        changes = {**replace(how, batch=bench.task.batch).overrides(rates[len(rates) // 2], seed), **changes}
    recipe = bench.recipe.override(**changes)
    began = time.perf_counter()
    result = rt.port(old, tuned, new, images, recipe=recipe, **more)
    seconds = time.perf_counter() - began
    document = result.document
    scorer = Scorer(bench.network(bench.classes), bench.data, bench.classes, recipe.port, Run())
    scorer.load(tuned.state_dict())
    before = scorer.score(bench.data.test)
    scorer.load(result.model.state_dict())
    after = scorer.score(bench.data.test)
    return {
        "pair": name,
        "seed": seed,
        "situation": situation,
        "word": document.relation.word,
        "cosine": round(document.relation.cosine, 4),
        "drift": document.relation.drift,
        "tuned": before.top1,
        "winner": document.winner,
        "test": document.result.test.top1,
        "flips": count_flips(before, after),
        "gradients": document.port.gradients,
        "price": round(document.port.price, 1),
        "seconds": round(seconds, 1),
        "matched": any(each.gradients for each in document.contenders),
        "targets": document.targets,
        "notes": [each for each in document.notes if "steps were ahead" in each],
        "contenders": {
            each.name: {
                "validation": each.validation,
                "test": each.test.top1,
                "also": each.also.top1 if each.also else None,
                "flips": each.flips,
                "price": round(each.price, 1),
                "detail": each.detail,
            }
            for each in document.contenders
        },
    }


def count_flips(before: Score, after: Score) -> tuple[int, int]:
    """Test images that only the tuned model has right, and that only the other one has right."""
    pairs = list(zip(before.right, after.right, strict=True))
    return sum(one and not other for one, other in pairs), sum(other and not one for one, other in pairs)


def add_noise(pictures: Pictures) -> Pictures:
    """The same pictures, noisy."""
    noise = np.random.default_rng(0).normal(0, LEVELS, pictures.arrays.shape)
    arrays = np.clip(pictures.arrays + noise, 0, 255).astype(np.uint8)
    return Pictures(arrays, pictures.targets, pictures.classes)


def _take(pictures: Pictures, classes: tuple[str, ...], count: int | None, each: int | None, seed: int) -> Pictures:
    """A few pictures of the classes of the task: `count` in all, or of `each`."""
    wanted = {pictures.classes.index(name) for name in classes or pictures.classes}
    there = [number for number, label in enumerate(pictures.targets) if label in wanted]
    order = torch.randperm(len(there), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [there[number] for number in order]
    if each is not None:
        drawn = [one for label in wanted for one in [one for one in drawn if pictures.targets[one] == label][:each]]
    chosen = sorted(drawn[:count])
    return Pictures(pictures.arrays[chosen], [pictures.targets[one] for one in chosen], pictures.classes)


def train_plainly(name: str, seed: int, situation: str) -> dict[str, Any]:
    """The new base, fine-tuned from a zero head at the best of four rates, BatchNorm re-estimated.

    `plain-N`: N minibatches with labels; `distil-N`: with the answers of the tuned model, which choose the rate, too.
    `rival-N`: the tuned model itself, trained on with N minibatches of which half are noisy.
    """
    kind, _, steps = situation.partition("-")
    bench, old, new = make_bases(name)
    tuned = tune(name, bench, old, seed)
    start = bench.start(tuned, "keep", seed) if kind == "rival" else bench.start(new, "zero", seed)
    scorer = Scorer(start.model, start.data, bench.classes, bench.recipe.port, Run())
    train, validation = start.data.train, start.data.validation
    if kind == "distil":
        teacher = Teacher(scorer, tuned.state_dict())
        train, validation = teacher.teach(train, "teacher"), teacher.label(validation)
    first, best, weights = scorer.weights(), (-1.0, 0.0), {}
    rates = bench.task.rates or bench.task.tuning.lrs
    for lr in rates:
        scorer.load(first)
        options = replace(bench.recipe.override(**bench.task.tuning.overrides(lr, seed)).finetune, steps=int(steps),
                          batch_size=bench.task.batch)  # fmt: skip
        train_model(start.model, Noisy(train) if kind == "rival" else train, options)
        scorer.reset_batchnorm()
        if (found := (scorer.score(validation).top1, lr)) > best:
            best, weights = found, scorer.weights()
    scorer.load(weights)
    after = scorer.score(start.data.test)
    noisy = load_data({side: add_noise(each) for side, each in bench.pictures.items()}, bench.recipe.data,
                      start.data.test.preprocess)  # fmt: skip
    also = scorer.score(noisy.test).top1 if PAIRS[name].task.startswith("resnet20") else None
    scorer.load(bench.start(tuned, "keep", seed).model.state_dict())
    flips = count_flips(scorer.score(start.data.test), after)
    facts = {"pair": name, "seed": seed, "situation": situation}
    return facts | {"test": after.top1, "also": also, "flips": flips, "price": int(steps), "lr": best[1]}


def compare_time(name: str) -> str:
    """How long `auto` takes beside `fgmt-sign`, both without controls, in one run."""
    bench, old, new = make_bases(name)
    tuned, seconds = tune(name, bench, old, 0), {}
    for method in ("fgmt-sign", "auto"):
        recipe, began = bench.recipe.override(**{"port.method": method, "port.verify": False}), time.perf_counter()
        rt.port(old, tuned, new, bench.pictures, recipe=recipe)
        seconds[method] = time.perf_counter() - began
    ratio = seconds["auto"] / seconds["fgmt-sign"]
    return f"{name}: auto {seconds['auto']:.1f} s, fgmt-sign {seconds['fgmt-sign']:.1f} s: {ratio:.2f} times"


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("pairs", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All pairs.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--situation", "situations", multiple=True, help="Only these: labels, teacher, fgmt …, plain-20 …")
@click.option("--list", "listing", is_flag=True, help="Say what there is, and do nothing.")
@click.option("--cost", is_flag=True, help="Compare the time of auto with that of fgmt-sign instead.")
@click.option("--write", "page", type=Path, help="Write the tables to this page.")
def main(
    pairs: tuple[str, ...],
    everything: bool,
    seeds: tuple[int, ...],
    situations: tuple[str, ...],
    listing: bool,
    cost: bool,
    page: Path | None,
) -> None:
    """Do what was asked for."""
    if listing:
        for name, pair in PAIRS.items():
            print(f"{name:18} {pair.task:24} {pair.old} → {pair.new}")
        return
    if unknown := [name for name in pairs if name not in PAIRS]:
        raise click.BadParameter(f"there is no pair '{unknown[0]}'; choose among {', '.join(PAIRS)}")
    if cost:
        for name in pairs:
            print(compare_time(name), flush=True)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in pairs or (PAIRS if everything else ()):
        for seed in seeds:
            for situation in situations or ("labels", "naive", "plain-20", "plain-60"):
                path = RESULTS / f"{name}.{situation}.{seed}.json"
                if path.exists():
                    continue
                if situation.startswith(("plain-", "distil-", "rival-")):
                    found = train_plainly(name, seed, situation)
                else:
                    found = measure(name, seed, situation)
                path.write_text(json.dumps({**found, "versions": list_versions()}, indent=1) + "\n", "utf-8")
                print(f"{name}, {situation}, seed {seed}: {found['test']:.3f} {found.get('winner', '')}", flush=True)
    if page is not None:
        page.write_text(write_tables(), "utf-8")
        draw_drifts(page.parent / "images")
        draw_prices(page.parent / "images" / "price-pays.png")


if __name__ == "__main__":
    main()
