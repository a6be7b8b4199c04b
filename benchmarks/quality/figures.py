"""The paper's figures and tables: what each shows, what stands for it here, and the command that makes it."""

from __future__ import annotations

from dataclasses import dataclass

from quality.tables import make_table

_GPU = "on a GPU machine, see below"


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper."""

    name: str
    subject: str
    shows: str
    tasks: tuple[str, ...] = ()
    study: str = ""
    """`cosine` or `basins`, where it is not a matter of ports alone."""
    methods: tuple[str, ...] = ()
    """All of the task if empty."""
    instead: str = ""
    """What is different here."""

    @property
    def command(self) -> str:
        """How to make it."""
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
    Figure("5a", "ports along the trajectory, MNIST", "FGMT ≈ GMT ≈ oracle", ("mnist-mlp",), methods=_MAIN),
    Figure(
        "5b",
        "the same, CIFAR-10",
        "FGMT ≈ GMT ≈ oracle; naive works, too",
        ("cifar10-conv8",),
        methods=_MAIN,
        instead="a quarter of the width, 9,000 images, 20 epochs",
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
        methods=_MAIN,
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
        ("resnet20-flowers", "resnet20-flowers-back"),
        methods=_MAIN,
        instead="as 5d",
    ),
    Figure(
        "6d",
        "the same, CUB",
        "as 6b",
        ("mobilenet-flowers", "mobilenet-flowers-back"),
        methods=_FEW,
        instead="as 5e",
    ),
    Figure(
        "7",
        "basins",
        "port + fine-tuning ends in the target's basin, the permuted source beyond a mild barrier",
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


def tabulate_figures() -> str:
    """The map from the paper to this repository; what was measured is where the links lead."""
    rows = []
    for figure in _ALL:
        link = " ".join(f"[{task}](#{_anchor(figure, task)})" for task in figure.tasks) or "–"
        name = figure.name.replace("-", " ")
        rows.append([name, figure.subject, figure.shows, figure.command, link, figure.instead or "–"])
    head = ["figure", "subject", "the paper shows", "command", "measured here", "different here"]
    return make_table(head, rows).replace("---:", "---")


def _anchor(figure: Figure, task: str) -> str:
    place = {"cosine": "do-two-networks-learn-alike", "basins": "basins"}.get(figure.study)
    number = figure.name[0]
    if place:
        return place
    sections = {"4": "trajectories-and-other-decisions", "6": "fine-tuning-on", "8": "what-is-inherited"}
    sections |= {"9": "trajectories-and-other-decisions", "t": "ensembles"}
    return sections.get(number, "ports-along-the-trajectory")
