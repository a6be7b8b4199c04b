"""The page of where a port pays, and its pictures, from the records that runs have left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hf_retarget.contenders import find_contender
from quality.pairs import DRIFTS, PAIRS
from quality.rule import judge_rules, list_cases

RESULTS = Path(__file__).resolve().parents[1] / "results" / "pays"

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
kinds of clothes, MobileNetV2 on its own answers to noisy photos; *siblings* are two such trainings of one base.
*plain-N*: the new base fine-tuned with N minibatches, from a zero head, at the best of two to four rates. *plus-25*:
auto, and 25 minibatches of fine-tuning at the best of three rates. None of the other columns takes a gradient unless
*matched* says so.
"""

_DRIFT = """
## How far may a base move?

One training of the old base, onwards at a constant rate, whose snapshots after 25 to 3,000 minibatches are the new
bases; *noisy*: half of the images are. The right end of each picture is a base that was trained independently. *naive +
head* is the naive port with its head refitted in closed form.
"""

_APART = """
## Independent bases

Bases that were trained apart; *head* is the new base with a closed-form head. *teacher-plus-50*: no labels, matching
and 50 minibatches of fine-tuning after the tuned model; *distil-50*: such minibatches from a zero head. *few*: 111
training images in all, with labels and teacher as validation chooses, with labels only, and with the teacher only.
"""

_ROBUST = """
## A weakness mended, and one acquired

*resnet20-robust*: the new base has learnt to withstand noise. *resnet20-weaker*: the reverse, an old base that
withstands it and a new one that does not. Accuracy on clean / noisy test images (noise of 36 levels of 256). *tuned,
head fitted on noisy images* and *tuned, 50 noisy steps* are what can be done without a new base. Heads are fitted on
noisy images with `--also-data-fit`; winners are still chosen on clean ones.
"""

_PRICE = """
## Accuracy over price

What each contender costs, in gradients of a minibatch, and what it is worth on test images: the port, its parts, and
plain fine-tuning of the new base with 10 to 200 minibatches, at the best of two to four rates.

![accuracy over price, six pairs of bases](images/price-pays.png)

## Flips, and what they cost

Test images that the tuned model has right and the other one wrong, and the reverse (*−/+*), and the price in gradients
of a minibatch, a forward pass being a third of one. *head* is the new base with a closed-form head, *plain-60* the new
base, fine-tuned with 60 minibatches.
"""

_LABELS = """
## How many labels?

So many training images of each class (*all*: every one), a tenth of them to choose by; what gradients, heads and
fine-tuning aimed at: *labels*, the *teacher* (the tuned model's answers), or *auto*, which lets validation images
choose. *turned*: which flower, and which way up: twenty classes, on which a closed-form head is far from enough.
"""

_PAY = """
## Will it pay?

Before any image is read, `check` knows the relation of the bases, their distance, and whether the network has
BatchNorm. How far do these tell which is best on test images: a port without gradients, a closed-form head, or 60
minibatches of plain fine-tuning with all labels? Each family of rules was fitted on all networks but one and tried on
that one. *lost*: points behind the best action; *right*: share of cases in which that was at most one point. The
advice of `check` was made with all of these cases in view. Independent MobileNetV2 bases, on which a head is enough for
flowers, are not among them: there it would say *retrain*.
"""

_SEEN = """
## Has the tuned model seen the images to choose by?

Its owner has usually trained on all images, so that whatever carries the fine-tuning looks better on them than it is.
The old base was fine-tuned at one rate *without* the validation images and *with* them. *chosen* is what validation
images chose, *lost* how far its test accuracy is behind the best of the contenders on test images.
"""

Record = dict[str, Any]


class Records:
    """What was recorded, by pair and situation."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.runs: dict[tuple[str, str], list[Record]] = {}
        for each in records:
            self.runs.setdefault((each["pair"], each["situation"]), []).append(each)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self.runs

    def all(self, pair: str, situation: str = "labels") -> list[Record]:
        """The runs of all seeds."""
        return self.runs.get((pair, situation), [])

    def mean(self, pair: str, what: str, situation: str = "labels", field: str = "test") -> float | None:
        """Of a situation, or of a contender of a situation."""
        if what in ("tuned", "drift") and field == "test" and situation == "labels":
            return _mean(each[what] for each in self.all(pair))
        if (pair, what) in self.runs and situation == "labels":
            return _mean(each.get(field) for each in self.all(pair, what))
        if what == "result":
            return _mean(each[field] for each in self.all(pair, situation))
        return _mean(each["contenders"].get(what, {}).get(field) for each in self.all(pair, situation))

    def related(self) -> list[str]:
        """Pairs of one lineage, from near to far."""
        names = [name for name, pair in PAIRS.items() if not isinstance(pair.new, str) or pair.sibling]
        return sorted((name for name in names if (name, "labels") in self), key=lambda name: self.mean(name, "drift"))

    def apart(self) -> list[str]:
        """Pairs of independent bases."""
        names = [name for name, pair in PAIRS.items() if isinstance(pair.new, str) and not pair.sibling]
        return [name for name in names if (name, "labels") in self]


def read_records() -> Records:
    """All that were committed."""
    return Records(json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json")))


def write_tables() -> str:
    """The page, from the records."""
    found = read_records()
    page = _TOP + _LINEAGE
    near = [name for name in found.related() if not name.startswith("drift")]
    page += _compare(found, near, ("naive", "head", "plain-20", "plain-60", "plus-25", "teacher"))
    if drifts := [name for name in DRIFTS if list_drift(found, name)]:
        page += _DRIFT
        for network in dict.fromkeys(_network(name) for name in drifts):
            page += f"\n![accuracy over drift, {network}](images/drift-{network}.png)\n"
        rows = [name for name in found.related() if name.startswith("drift")]
        page += _compare(found, rows, ("naive", "naive-head", "head", "plain-20", "plain-60"))
    page += _APART
    columns = ("naive", "head", "fgmt", "fgmt-sign", "teacher-plus-50", "distil-50", "plain-100")
    page += _compare(found, found.apart(), (*columns, "few", "few-labels", "few-teacher"))
    page += _write_robust(found) + _write_labels(found) + _write_flips(found) + _write_rules(found)
    seen = [name for name in PAIRS if (name, "seen") in found and (name, "unseen") in found]
    halves = [f"{each}, {how}" for how in ("without", "with") for each in ("tuned", "auto", "chosen", "lost")]
    rows = [
        [name, str(len(found.all(name, "seen"))), *_lost(found.all(name, "unseen")), *_lost(found.all(name, "seen"))]
        for name in seen
    ]
    return page + (_SEEN + _table(["pair", "n", *halves], rows) if rows else "")


def _compare(found: Records, names: Sequence[str], columns: Sequence[str]) -> str:
    rows = []
    for name in names:
        runs = found.all(name)
        kept = mean(each["test"] / each["tuned"] for each in runs)
        winners = ", ".join(sorted({each["winner"] for each in runs}))
        matched = {each["matched"] for each in runs}
        first = [name, f"{found.mean(name, 'drift'):.2f}", str(len(runs)), _percent(found.mean(name, "tuned"))]
        first += [f"**{_percent(found.mean(name, 'result'))}**", f"{kept:.0%}", winners]
        first.append("some" if len(matched) > 1 else "yes" if matched.pop() else "no")
        rows.append([*first, *(_percent(found.mean(name, column)) for column in columns)])
    return _table(["pair", "d/τ", "n", "tuned", "**auto**", "of tuned", "winner", "matched", *columns], rows)


def _write_robust(found: Records) -> str:
    columns = {
        "tuned": ("robust", "tuned"),
        "port": ("robust", "result"),
        "naive port, head fitted on noisy images": ("robust-fit", "naive-head"),
        "port + 25 steps": ("robust-plus-25", "finetuned"),
        "new base, head": ("robust", "head"),
        "plain, same price": ("robust", "plain"),
        "tuned, head fitted on noisy images": ("robust-fit", "tuned-head"),
    }
    rows = []
    for name in (name for name in PAIRS if (name, "robust") in found):
        seeds = len(found.all(name, "robust"))
        cells = []
        for situation, who in columns.values():
            runs = found.all(name, situation)
            entered = [each["contenders"].get(each["winner"] if who == "result" else who) for each in runs]
            cells.append(_write_both([each for each in entered if each], seeds))
        rows.append([name, str(seeds), *cells, _write_both(found.all(name, "rival-50"), seeds)])
    return _ROBUST + _table(["pair", "n", *columns, "tuned, 50 noisy steps"], rows) if rows else ""


def _write_both(scores: Sequence[Record], seeds: int) -> str:
    """Accuracy on clean and noisy images, and the number of seeds if it is not that of the row."""
    text = " / ".join(_percent(_mean(each[field] for each in scores)) for field in ("test", "also"))
    return "–" if not scores else text if len(scores) == seeds else f"{text} ({len(scores)} of {seeds})"


_AIMS = ("labels", "teacher", "both")


def _write_labels(found: Records) -> str:
    rows = []
    for name in (name for name in PAIRS if (name, "20-auto") in found):
        for count in ("all", "20", "5", "1"):
            auto = "labels" if count == "all" else f"{count}-auto"
            if (name, auto) not in found:
                continue
            aims = ("all-labels", "teacher", "all-both") if count == "all" else [f"{count}-{aim}" for aim in _AIMS]
            runs = {each: found.all(name, each) for each in (*aims, auto)}
            seeds = set.intersection(*({run["seed"] for run in some} for some in runs.values() if some))
            alike = Records(run for some in runs.values() for run in some if run["seed"] in seeds)
            figures = [_mean(run["tuned"] for run in alike.all(name, auto)), alike.mean(name, "head", auto)]
            figures += [alike.mean(name, "result", each) for each in runs]
            rows.append([name, count, str(len(seeds)), *map(_percent, figures)])
    titles = ["pair", "images of a class", "n", "tuned", "new base, head", *_AIMS, "auto"]
    return _LABELS + _table(titles, rows) if rows else ""


def _write_rules(found: Records) -> str:
    cases = list_cases(found.runs)
    rows = [[name, f"{lost:.1f}", f"{right:.0%}"] for name, (lost, right) in judge_rules(cases).items()]
    networks = Counter(case.network for case in cases)
    words = ", ".join(f"{network} {count}" for network, count in sorted(networks.items()))
    return _PAY + f"\n{len(cases)} cases: {words}.\n" + _table(["rule knows", "lost", "right"], rows)


_FLIPPED = {"labels": "auto", "head": "head", "plain-60": "plain-60"}


def _write_flips(found: Records) -> str:
    names = (*found.related(), *found.apart())
    shown = {key: word for key, word in _FLIPPED.items() if any((name, key) in found for name in names)}
    rows = []
    for name in names:
        cells = []
        for situation in shown:
            runs = [each for each in found.all(name, situation) if "flips" in each]
            lost, gained = (_mean(each["flips"][side] for each in runs) for side in (0, 1))
            cells += (
                [f"{lost:.0f} / {gained:.0f}", f"{mean(each['price'] for each in runs):.0f}"] if runs else ["–", "–"]
            )
        if "–" not in (cells[0], cells[-1]):
            rows.append([name, *cells])
    titles = [f"{who}, {what}" for who in shown.values() for what in ("−/+", "price")]
    return _PRICE + _table(["pair", *titles], rows) if rows else ""


def _lost(runs: list[Record]) -> list[str]:
    """What was chosen, and how far it is behind the best of the contenders on test images."""
    behind = mean(max(one["test"] for one in each["contenders"].values()) - each["test"] for each in runs)
    winners = ", ".join(sorted({each["winner"] for each in runs}))
    figures = [_percent(mean(each[key] for each in runs)) for key in ("tuned", "test")]
    return [*figures, winners, f"{100 * behind:.1f}"]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return mean(known) if known else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- pictures


def _paint(name: str, shade: int = 0) -> str:
    return find_contender(name).colours[shade]


LINES = {
    "tuned": ("tuned model (old base)", _paint("tuned"), ":"),
    "result": ("port (auto)", "#111827", "-"),
    "naive-head": ("naive + head", _paint("naive-head"), "--"),
    "naive": ("naive", _paint("naive"), "--"),
    "head": ("new base, closed-form head", _paint("head"), "-"),
    "plain-60": ("plain, 60 minibatches", _paint("plain"), "-"),
    "plain-20": ("plain, 20 minibatches", _paint("plain"), "-."),
}
"""Label, colour and style of each line; colours are those of reports."""


def _network(name: str) -> str:
    return name.removeprefix("drift-").removesuffix("-noisy")


def list_drift(found: Records, name: str) -> list[str]:
    """The pairs of a training that were measured."""
    return [key for key in DRIFTS[name].pairs(name) if (key, "labels") in found]


def draw_drifts(folder: Path) -> None:
    """One picture for each network: accuracy over d/τ, the independent pair at the right end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = read_records()
    for network in dict.fromkeys(map(_network, DRIFTS)):
        drifts = {name: drift for name, drift in DRIFTS.items() if _network(name) == network}
        pairs = [key for name in drifts for key in list_drift(found, name)]
        pairs += [key for key in (f"{network}-near", f"{network}-far", f"{network}-clean", f"{network}-robust")
                  if (key, "labels") in found]  # fmt: skip
        if not any(key.startswith("drift") for key in pairs):
            continue
        pairs.sort(key=lambda key: found.mean(key, "drift"))
        right = next(iter(drifts.values())).independent
        figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
        end = 2.2 * found.mean(pairs[-1], "drift")
        for what, (label, colour, style) in LINES.items():
            points = [(found.mean(key, "drift"), found.mean(key, what)) for key in pairs]
            points = [(x, 100 * y) for x, y in points if y is not None]
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o", markersize=3.5)
            if (last := found.mean(right, what)) is not None:
                axes.plot([points[-1][0], end], [points[-1][1], 100 * last], ":", color=colour, alpha=0.6)
                axes.plot([end], [100 * last], "s", color=colour, markersize=4.5)
        axes.axvline(0.7, color="#94a3b8", linewidth=0.8)
        axes.set_xscale("log")
        start = found.mean(pairs[0], "drift")
        ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if start / 1.3 < tick < end / 1.3]
        axes.set_xticks([*ticks, end], [*map(str, ticks), "independent"])
        axes.minorticks_off()
        axes.set(xlabel="distance of the bases, in lengths of the fine-tuning (d/τ)", ylabel="test accuracy, %")
        axes.grid(alpha=0.25)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(folder / f"drift-{network}.png", dpi=110, metadata={"Software": None})
        plt.close(figure)


PRICED = {
    "drift-vit-100": "ViT, one lineage",
    "drift-resnet20-100": "ResNet-20, one lineage",
    "drift-vit-noisy-1000": "ViT, drifted, robust to noise",
    "drift-resnet20-noisy-1000": "ResNet-20, drifted, robust to noise",
    "vit": "ViT, independent",
    "resnet20": "ResNet-20, independent",
}
"""The pairs of the picture, each with its title."""
_PLAIN = (10, 20, 60, 100, 200)
_MARKERS = {"naive-line": "v", "naive-head": "^", "head": "d", "matched": "s", "matched-head": "P"}


def draw_prices(path: Path) -> None:
    """Accuracy over price: a panel for each pair, a point for each contender, plain fine-tuning as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = read_records()
    figure, panels = plt.subplots(3, 2, figsize=(9, 9.2), layout="constrained", sharex=True)
    for axes, (name, title) in zip(panels.flat, PRICED.items(), strict=True):
        axes.axhline(
            100 * found.mean(name, "tuned"), color=LINES["tuned"][1], linestyle=":", label="tuned model (old base)"
        )
        runs = found.all(name)
        whole = [each for each in _PLAIN if len(found.all(name, f"plain-{each}")) == len(runs)]
        line = [(each, 100 * found.mean(name, f"plain-{each}")) for each in whole]
        axes.plot(*zip(*line, strict=True), "-o", color=LINES["plain-60"][1], markersize=4, label="plain fine-tuning")
        for who, marker in _MARKERS.items():
            some = [each["contenders"][who] for each in runs if who in each["contenders"]]
            if some and all("price" in each for each in some):
                row = find_contender(who)
                axes.plot(
                    mean(each["price"] for each in some), 100 * mean(each["test"] for each in some), marker,
                    color=row.colours[0], markersize=7, linestyle="none", label=row.label,
                )  # fmt: skip
        port = (mean(each["price"] for each in runs), 100 * found.mean(name, "result"))
        axes.plot(*port, "*", color=LINES["result"][1], markersize=11, linestyle="none", label="port, all of it")
        axes.set(title=f"{title} (d/τ {found.mean(name, 'drift'):.1f})", xscale="log")
        ticks = (5, 10, 20, 50, 100, 200)
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy, %")
    for axes in panels[-1]:
        axes.set_xlabel("price, in gradients of a minibatch")
    labelled = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
