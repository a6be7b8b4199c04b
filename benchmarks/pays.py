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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import click

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from quality.bench import Bench, weights_of
from quality.images import Pictures, load_images
from quality.store import Kept
from quality.tasks import TASKS
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.data import Split, choose_preprocess, load_data
from hf_retarget.evaluation.scorer import Scorer
from hf_retarget.evaluation.teacher import Teacher
from hf_retarget.files import save_tensors
from hf_retarget.models import load_checkpoint
from hf_retarget.recipe.options import DataOptions, TrainOptions
from hf_retarget.run import Run, list_versions
from hf_retarget.training.loop import train_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pays"
OUT = ROOT / "runs" / "quality"

LINEAGE, DRIFTED, INDEPENDENT = "same lineage", "drifted", "independent"
NOISE = 0.6  # standard deviation, of normalised pixels


@dataclass(frozen=True)
class Onward:
    """How an old base is trained on to become a new one."""

    steps: int
    lr: float
    noisy: bool = False
    optimizer: str = "sgd"
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    """An old and a new base, with the task that the old one is fine-tuned on."""

    task: str
    old: str
    new: str | Onward
    """The name of a base of the task, or how the old one becomes it."""
    sibling: Onward | None = None
    """How the old base itself was made of the task's base, if it is a sibling of the new one."""


_ROBUST, _CLEAN = Onward(400, 0.05, noisy=True), Onward(150, 0.05)
PAIRS = {
    "resnet20-near": Pair("resnet20-flowers", "akamaster", Onward(100, 0.01)),
    "resnet20-clean": Pair("resnet20-flowers", "akamaster", _CLEAN),
    "resnet20-robust": Pair("resnet20-flowers", "akamaster", _ROBUST),
    "vit-near": Pair("vit-6to4", "seed-0", Onward(100, 1e-4, optimizer="adamw")),
    "vit-far": Pair("vit-6to4", "seed-0", Onward(300, 3e-4, noisy=True, optimizer="adamw")),
    "vit-siblings": Pair(
        "vit-6to4", "seed-0", Onward(200, 3e-4, optimizer="adamw", seed=1), Onward(200, 3e-4, optimizer="adamw", seed=2)
    ),
    "mobilenet-near": Pair("mobilenet-flowers", "torchvision", Onward(10, 0.0003, noisy=True)),
    "mobilenet-far": Pair("mobilenet-flowers", "torchvision", Onward(40, 0.003, noisy=True)),
    "resnet20": Pair("resnet20-flowers", "akamaster", "bognev"),
    "resnet20-back": Pair("resnet20-flowers-back", "bognev", "akamaster"),
    "vit": Pair("vit-6to4", "seed-0", "seed-1"),
    "conv8": Pair("cifar-6to4", "seed-0", "seed-1"),
    "mobilenet": Pair("mobilenet-flowers", "google", "torchvision"),
    "mobilenet-back": Pair("mobilenet-flowers-back", "torchvision", "google"),
    "mnist": Pair("mnist-mlp", "seed-0", "seed-1"),
}
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
    "few": {"data.limit": 111},
    "few-labels": {"data.limit": 111, "port.targets": "labels"},
    "few-teacher": {"data.limit": 111, "port.targets": "teacher"},
}
"""What is asked of the port, besides `--control none`. Of 111 training images, eleven are to validate on. `tuned` says
whether the old base was fine-tuned at one rate without or with the images to validate on."""


class Noisy:
    """A split in which noise is added to half of the images."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches that depend on nothing but the seed and their number."""
        first = options.get("skip", 0)
        for number, (inputs, targets) in enumerate(self.split.batches(batch_size, **options), first):
            noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(number))
            noise[::2] = 0
            yield inputs + NOISE * noise, targets


def make_bases(name: str) -> tuple[Bench, nn.Module, nn.Module]:
    """The task's bench, the old and the new base of a pair."""
    pair = PAIRS[name]
    bench = Bench(TASKS[pair.task], OUT)
    if isinstance(pair.new, str):
        return bench, bench.base(pair.old), bench.base(pair.new)
    old = bench.base(pair.old) if pair.sibling is None else train_on(bench, pair.old, pair.sibling)
    return bench, old, train_on(bench, pair.old, pair.new)


def train_on(bench: Bench, base: str, how: Onward) -> nn.Module:
    """A base, trained on with its own task: classes of the same images, or, for MobileNetV2, its own answers."""
    model = bench.base(base)
    kept = Kept(bench.common / "onward" / "-".join(map(str, (base, how.steps, how.lr, how.noisy, how.seed))))
    if kept.read(vars(how)) is None:
        images, classes = (bench.pictures, bench.task.before_classes)
        if bench.task.name.startswith("resnet20"):
            images, classes = load_images("cifar10", 32, OUT / "images"), ()
        preprocess = choose_preprocess(load_checkpoint(model), None)
        train = load_data(images, DataOptions(classes=classes), preprocess).train
        if bench.task.name.startswith("mobilenet"):
            train = replace(train, targets=_answer(model, train))
        options = TrainOptions(steps=how.steps, lr=how.lr, optimizer=how.optimizer, seed=how.seed + 77, batch_size=64)
        folder = kept.begin()
        train_model(model, Noisy(train) if how.noisy else train, options)
        save_tensors(folder / "model.safetensors", {n: t.detach().clone() for n, t in model.state_dict().items()}, {})
        kept.finish(vars(how), {})
    model.load_state_dict(load_file(kept.folder / "model.safetensors"))
    return model.eval()


def _answer(model: nn.Module, split: Split) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([(model(inputs) / 2).softmax(1) for inputs, _ in split.batches(256)])


def tune(name: str, bench: Bench, old: nn.Module, seed: int, images: str = "") -> nn.Module:
    """The old base, fine-tuned: at the rate that suits it, on the training images without those to validate on.

    With `images` (`with` or `without` those), and for siblings, at one rate.
    """
    pair = PAIRS[name]
    if pair.sibling is None and not images:
        return bench.network(bench.classes, weights_of(bench.tuned(pair.old, seed)))
    label = f"tuned-{images}" if images else "tuned-sibling"
    how, kept = bench.task.tuning, Kept(bench.common / label / f"{name}-{seed}")
    if kept.read({"seed": seed}) is None:
        start = bench.start(old, bench.task.start_head, seed)
        folder = kept.begin()
        options = bench.recipe.override(**how.overrides(max(how.lrs), seed)).finetune
        train = start.data.train
        train_model(start.model, train.join(start.data.validation, "all") if images == "with" else train, options)
        tensors = {n: t.detach().clone() for n, t in start.model.state_dict().items()}
        save_tensors(folder / "model.safetensors", tensors, {})
        kept.finish({"seed": seed}, {})
    return bench.network(bench.classes, load_file(kept.folder / "model.safetensors"))


def measure(name: str, seed: int, situation: str) -> dict[str, Any]:
    """Port in one situation, and put the figures of all contenders together."""
    bench, old, new = make_bases(name)
    tuned = tune(name, bench, old, seed, SITUATIONS[situation].get("tuned", ""))
    changes = {"port.seed": seed, "port.check": False, "port.control": "none", **SITUATIONS[situation]}
    changes.pop("tuned", None)
    images: Mapping[str, Any] = bench.pictures
    if limit := changes.pop("data.limit", None):
        images = {**images, "train": _take(images["train"], bench.task.classes, limit, seed)}
    if "finetune.steps" in changes:
        rates, how = sorted(bench.task.rates or bench.task.tuning.lrs), bench.task.tuning
        changes = {**replace(how, batch=bench.task.batch).overrides(rates[len(rates) // 2], seed), **changes}
    recipe = bench.recipe.override(**changes)
    began = time.perf_counter()
    result = rt.port(old, tuned, new, images, recipe=recipe)
    seconds = time.perf_counter() - began
    document = result.document
    scorer = Scorer(bench.network(bench.classes), bench.data, bench.classes, recipe.port, Run())
    scorer.load(tuned.state_dict())
    return {
        "pair": name,
        "seed": seed,
        "situation": situation,
        "word": document.relation.word,
        "cosine": round(document.relation.cosine, 4),
        "drift": document.relation.drift,
        "tuned": scorer.score(bench.data.test).top1,
        "winner": document.winner,
        "test": document.result.test.top1,
        "gradients": document.port.gradients,
        "seconds": round(seconds, 1),
        "matched": any(each.gradients for each in document.contenders),
        "targets": document.targets,
        "notes": [each for each in document.notes if "steps were ahead" in each],
        "contenders": {
            each.name: {"validation": each.validation, "test": each.test.top1, "detail": each.detail}
            for each in document.contenders
        },
    }


def _take(pictures: Pictures, classes: tuple[str, ...], count: int, seed: int) -> Pictures:
    """A few pictures of the classes of the task."""
    wanted = {pictures.classes.index(each) for each in classes or pictures.classes}
    there = [number for number, label in enumerate(pictures.targets) if label in wanted]
    order = torch.randperm(len(there), generator=torch.Generator().manual_seed(seed))[:count]
    chosen = sorted(there[int(each)] for each in order)
    return Pictures(pictures.arrays[chosen], [pictures.targets[each] for each in chosen], pictures.classes)


def train_plainly(name: str, seed: int, situation: str) -> dict[str, Any]:
    """The new base, fine-tuned from a zero head at the best of four rates, BatchNorm re-estimated.

    `plain-N`: N minibatches with labels; `distil-N`: with the answers of the tuned model, which choose the rate, too.
    """
    kind, _, steps = situation.partition("-")
    bench, old, new = make_bases(name)
    start = bench.start(new, "zero", seed)
    scorer = Scorer(start.model, start.data, bench.classes, bench.recipe.port, Run())
    train, validation = start.data.train, start.data.validation
    if kind == "distil":
        teacher = Teacher(scorer, tune(name, bench, old, seed).state_dict())
        train, validation = teacher.teach(train, "teacher"), teacher.label(validation)
    first, best = scorer.weights(), (-1.0, 0.0, 0.0)
    rates = bench.task.rates or bench.task.tuning.lrs
    for lr in rates:
        scorer.load(first)
        options = replace(bench.recipe.override(**bench.task.tuning.overrides(lr, seed)).finetune, steps=int(steps),
                          batch_size=bench.task.batch)  # fmt: skip
        train_model(start.model, train, options)
        scorer.reset_batchnorm()
        found = scorer.score(validation).top1, lr, scorer.score(start.data.test).top1
        best = max(best, found)
    return {"pair": name, "seed": seed, "situation": situation, "test": best[2], "lr": best[1]}


def compare_time(name: str) -> str:
    """How long `auto` takes beside `fgmt-sign`, both without controls, in one run."""
    bench, old, new = make_bases(name)
    tuned, seconds = tune(name, bench, old, 0), {}
    for method in ("fgmt-sign", "auto"):
        recipe, began = bench.recipe.override(**{"port.method": method, "port.check": False}), time.perf_counter()
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
                if situation.startswith(("plain-", "distil-")):
                    found = train_plainly(name, seed, situation)
                else:
                    found = measure(name, seed, situation)
                path.write_text(json.dumps({**found, "versions": list_versions()}, indent=1) + "\n", "utf-8")
                print(f"{name}, {situation}, seed {seed}: {found['test']:.3f} {found.get('winner', '')}", flush=True)
    if page is not None:
        page.write_text(write_tables(), "utf-8")


_TOP = """# Where a port pays

Top-1 accuracy in per cent on test images; every choice (factor, step, head, contender, learning rate) was made on
validation images that the tuned model has not seen. Written by `python benchmarks/pays.py --write docs/pays.md` from
the records in `benchmarks/results/pays`; `python benchmarks/pays.py PAIR` makes one. Means over the seeds of the
fine-tuning that were run, whose number is in the column *n*. *d/τ* is the distance of the bases in lengths of the
fine-tuning. *auto* is `hf-retarget port` as it comes, with labels; *teacher*: the same without using a label.
"""

_LINEAGE = """
## Bases of one lineage

The new base is the old one, trained on: ResNet-20 on CIFAR-10 (*robust*: half of the images noisy), a small ViT on six
kinds of clothes, MobileNetV2 on its own answers to noisy photos. *plain-N*: the new base fine-tuned with N minibatches,
from a zero head, at the best of two to four rates. *plus-25*: auto, and 25 minibatches of fine-tuning at
the best of three rates. None of the other columns takes a gradient unless *matched* says so.
"""

_APART = """
## Independent bases

Bases that were trained apart; *head* is the new base with a closed-form head. *teacher-plus-50*: no labels, matching
and 50 minibatches of fine-tuning after the tuned model; *distil-50*: such minibatches from a zero head. *few*: 111
training images in all, with labels and teacher as validation chooses, with labels only, and with the teacher only.
"""


_SEEN = """
## Has the tuned model seen the images to choose by?

Its owner has usually trained on all images, so that whatever carries the fine-tuning looks better on them than it is.
The old base was fine-tuned at one rate *without* the validation images and *with* them. *chosen* is what validation
images chose, *lost* how far its test accuracy is behind the best of the contenders on test images.
"""


def write_tables() -> str:
    """The page, from the records."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in records:
        found.setdefault((each["pair"], each["situation"]), []).append(each)
    related = [name for name, pair in PAIRS.items() if not isinstance(pair.new, str) and (name, "labels") in found]
    apart = [name for name, pair in PAIRS.items() if isinstance(pair.new, str) and (name, "labels") in found]
    page = _TOP + _LINEAGE + "\n"
    columns = ("naive", "head", "plain-20", "plain-60", "plus-25", "teacher")
    page += _row("pair", "d/τ", "n", "tuned", "**auto**", "of tuned", "winner", "matched", *columns) + _rule(
        8 + len(columns)
    )
    for name in sorted(related, key=lambda name: _mean(found[name, "labels"], "drift")):
        runs = found[name, "labels"]
        page += _row(*_first(name, runs), *_others(name, found, columns))
    page += _APART + "\n"
    columns = (
        "naive",
        "head",
        "fgmt",
        "fgmt-sign",
        "teacher-plus-50",
        "distil-50",
        "plain-100",
        "few",
        "few-labels",
        "few-teacher",
    )
    page += _row("pair", "d/τ", "n", "tuned", "**auto**", "of tuned", "winner", "matched", *columns) + _rule(
        8 + len(columns)
    )
    for name in apart:
        page += _row(*_first(name, found[name, "labels"]), *_others(name, found, columns))
    seen = [name for name in PAIRS if (name, "seen") in found and (name, "unseen") in found]
    if seen:
        page += _SEEN + "\n"
        halves = ("tuned", "auto", "chosen", "lost")
        page += _row("pair", "n", *(f"{each}, {how}" for how in ("without", "with") for each in halves)) + _rule(10)
    for name in seen:
        page += _row(name, str(len(found[name, "seen"])), *_lost(found[name, "unseen"]), *_lost(found[name, "seen"]))
    return page


def _lost(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """What was chosen, and how far it is behind the best of the contenders on test images."""
    behind = mean(max(one["test"] for one in each["contenders"].values()) - each["test"] for each in runs)
    winners = ", ".join(sorted({each["winner"] for each in runs}))
    return _percent(runs, "tuned"), _percent(runs, "test"), winners, f"{100 * behind:.1f}"


def _first(name: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    kept = mean(each["test"] / each["tuned"] for each in runs)
    winners = ", ".join(sorted({each["winner"] for each in runs}))
    matched = (
        "yes" if all(each["matched"] for each in runs) else "some" if any(each["matched"] for each in runs) else "no"
    )
    figures = (f"{_mean(runs, 'drift'):.2f}", str(len(runs)), _percent(runs, "tuned"), f"**{_percent(runs, 'test')}**")
    return (name, *figures, f"{kept:.0%}", winners, matched)


def _others(name: str, found: Mapping[tuple[str, str], list[dict[str, Any]]], columns: tuple[str, ...]) -> list[str]:
    cells = []
    for column in columns:
        runs = found.get((name, column), [])
        if column == "head":
            made = [
                each["contenders"]["head"]["test"] for each in found[name, "labels"] if "head" in each["contenders"]
            ]
            cells.append(f"{100 * mean(made):.1f}" if made else "–")
        else:
            cells.append(_percent(runs, "test") if runs else "–")
    return cells


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return mean(each[key] for each in runs)


def _percent(runs: list[dict[str, Any]], key: str) -> str:
    return f"{100 * _mean(runs, key):.1f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _rule(count: int) -> str:
    return f"|{'---|' * count}\n"


if __name__ == "__main__":
    main()
