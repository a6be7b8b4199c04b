"""The paper's figures and tables: what each shows, its counterpart here, and the command that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quality.tables import EMPTY, Run, make_table, mean, ratio_of, savings, select, spread

_GPU = "`sh benchmarks/paper.sh imagenet`, on a GPU machine"


MISSING = "not yet"
"""In place of figures that were not measured."""


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper."""

    name: str
    subject: str
    shows: str
    tasks: tuple[str, ...] = ()
    study: str = ""
    """`cosine` or `basins`, if it needs more than ports."""
    methods: tuple[str, ...] = ()
    """The methods; all of the task if empty."""
    instead: str = ""
    """The differences from the paper."""

    @property
    def command(self) -> str:
        """The command that makes it."""
        return f"`python benchmarks/quality.py --figure {self.name}`" if self.tasks else _GPU


_MAIN = ("naive", "oracle", "gmt", "fgmt", "fgmt-sign")
_FEW = tuple(method for method in _MAIN if method != "gmt")
_ACTUAL = ("naive+actual", "oracle+actual", "fgmt+actual")

_ALL = (
    Figure("3a", "assumption (P), 2-MLP", "the wider, the more alike are two trajectories", ("mnist-mlp",), "cosine"),
    Figure(
        "3b",
        "assumption (P), Conv8",
        "holds weakly; depends on architecture and initialisation",
        ("cifar10-conv8", "cifar-6to4"),
        "cosine",
        instead="a quarter of the width; CIFAR-10 6 → 4 for CIFAR-100",
    ),
    Figure(
        "3c",
        "assumption (P), ResNet-18",
        "the same",
        ("resnet20-flowers", "mobilenet-flowers", "vit-6to4"),
        "cosine",
        instead="ResNet-20, MobileNetV2 and a ViT",
    ),
    Figure(
        "4",
        "linear or actual trajectory, Conv8",
        "the linear one is stabler",
        ("cifar10-conv8",),
        methods=("fgmt", "fgmt+actual", "fgmt+cosine"),
        instead="a quarter of the width, 28 steps",
    ),
    Figure(
        "5a",
        "ports along the trajectory, MNIST",
        "FGMT ≈ GMT ≈ oracle",
        ("mnist-mlp",),
        methods=_MAIN,
        instead="18,000 images, one or two seeds",
    ),
    Figure(
        "5b",
        "the same, CIFAR-10",
        "FGMT ≈ GMT ≈ oracle; naive works, too",
        ("cifar10-conv8",),
        methods=_FEW,
        instead="a quarter of the width, 9,000 images, 14 epochs",
    ),
    Figure("5c", "the same, ImageNet", "FGMT ≈ GMT ≈ oracle"),
    Figure(
        "5d",
        "the same, ImageNet → Cars",
        "naive fails; FGMT follows the oracle to mid-way, then falls",
        ("resnet20-flowers", "resnet20-flowers-back"),
        methods=_MAIN,
        instead="ResNet-20, CIFAR-10 → flowers",
    ),
    Figure(
        "5e",
        "the same, ImageNet → CUB",
        "as 5d",
        ("mobilenet-flowers", "mobilenet-flowers-back"),
        methods=_FEW,
        instead="MobileNetV2, ImageNet → flowers",
    ),
    Figure(
        "5f",
        "the same, CIFAR-10 → CIFAR-100",
        "as 5d",
        ("cifar-6to4",),
        methods=_MAIN,
        instead="CIFAR-10 6 → 4, a quarter of the width",
    ),
    Figure(
        "6a",
        "training after the port, CIFAR-10",
        "faster than standard training; all methods alike",
        ("cifar10-conv8",),
        methods=_FEW,
        instead="as 5b",
    ),
    Figure(
        "6b",
        "the same, CIFAR-10 → CIFAR-100",
        "faster than standard training and than naive",
        ("cifar-6to4",),
        methods=_MAIN,
        instead="as 5f",
    ),
    Figure(
        "6c",
        "the same, Cars",
        "as 6b",
        ("resnet20-flowers",),
        methods=_MAIN,
        instead="as 5d",
    ),
    Figure(
        "6d",
        "the same, CUB",
        "as 6b",
        ("mobilenet-flowers",),
        methods=_FEW,
        instead="as 5e",
    ),
    Figure(
        "7",
        "basins",
        "port + fine-tuning ends in the new base's basin, the permuted tuned model beyond a mild barrier",
        ("cifar-6to4", "resnet20-flowers"),
        "basins",
        methods=("fgmt",),
        instead="as 5d and 5f",
    ),
    Figure(
        "8",
        "generalisation is inherited",
        "from a base pre-trained on a tenth of the images; the better base's gap is inherited",
        ("cifar-6to4-tenth",),
        instead="as 5f",
    ),
    Figure(
        "9",
        "5a to 5f with actual trajectories",
        "more variance; fails for fine-tunings",
        ("mnist-mlp", "cifar10-conv8", "cifar-6to4", "resnet20-flowers"),
        methods=_ACTUAL,
        instead="as 5a, 5b, 5d, 5f",
    ),
    Figure(
        "table-3",
        "ensembles",
        "ported members with fewer epochs come close to a full ensemble, or above",
        ("cifar-6to4", "resnet20-flowers", "vit-6to4"),
        methods=("fgmt", "gmt", "fgmt-sign"),
        instead="steps instead of epochs",
    ),
)
FIGURES: dict[str, Figure] = {figure.name: figure for figure in _ALL}


def tabulate_figures(
    runs: list[Run], cosines: dict[str, list[dict[str, Any]]], basins: dict[str, list[dict[str, Any]]]
) -> str:
    """The map from the paper to this repository, with brief measurements and links to the rest."""
    rows = []
    for figure in _ALL:
        found = "; ".join(_found(figure, task, runs, cosines, basins) for task in figure.tasks) or EMPTY
        name = figure.name.replace("-", " ")
        rows.append([name, figure.subject, figure.shows, figure.command, found, figure.instead or EMPTY])
    head = ["figure", "subject", "the paper shows", "command", "measured here", "different here"]
    return make_table(head, rows).replace("---:", "---")


def _found(
    figure: Figure,
    task: str,
    runs: list[Run],
    cosines: dict[str, list[dict[str, Any]]],
    basins: dict[str, list[dict[str, Any]]],
) -> str:
    words: list[str] = []
    if figure.study == "cosine":
        for name in (name for name in cosines if name == task or name.rpartition("-")[0] == task):
            means = [mean(each[kind] for each in cosines[name]) for kind in ("identity", "matched")]
            words.append(f"{name.removeprefix(f'{task}-')}: {means[0]:.2f} → {means[1]:.2f}")
    elif figure.study == "basins":
        words = [
            f"barrier to {end} {spread(each['barriers'][end] for each in basins[task])}"
            for end in ("ported", "source")
            if task in basins
        ]
    elif figure.name.startswith("6"):
        for method in ("fgmt", "fgmt-sign"):
            pairs = [savings(run, 0.95) for run in select(runs, task, method) if run["after"]]
            ratio = ratio_of(pairs)
            words += [f"{method} needs {ratio:.2f} of the steps to 95%"] if ratio is not None else []
    else:
        for method in figure.methods or ("naive", "fgmt", "oracle"):
            known = select(runs, task, method)
            words += [f"{method} {spread(run['test']['port'] for run in known)}"] if known else []
    return f"[{task}](#{_anchor(figure)}) {', '.join(words) or MISSING}"


def _anchor(figure: Figure) -> str:
    studies = {"cosine": "do-two-networks-learn-alike", "basins": "basins"}
    sections = {
        "4": "trajectories-and-other-decisions",
        "5": "ports-along-the-trajectory",
        "6": "fine-tuning-on",
        "8": "what-is-inherited",
        "9": "trajectories-and-other-decisions",
        "t": "ensembles",
    }
    return studies.get(figure.study) or sections[figure.name[0]]
