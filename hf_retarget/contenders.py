"""The registry of contenders: everything that can be the answer to a port, with labels, colours, price and maker.

Choosing, scoring, resuming, the terminal, report, card, comparisons and port.json iterate over this list. To add an
idea is to add a row (see CONTRIBUTING.md). Importing this does not import torch, because rows name their functions by
import paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from hf_retarget.errors import RetargetError

PORT, AFTER, BESIDE = "port", "after", "beside"
"""Roles in a contest: may win, continues from the winner, or is compared with it."""

AUTO = "auto"
"""The method that tries several contenders and takes the best."""

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Factors of the fine-tuning that the naive line tries."""

FURTHER = (1.25, 1.5, 2.0)
"""Factors by which the best masked step is scaled up."""


@dataclass(frozen=True)
class Asked:
    """The request that decides which contenders enter."""

    method: str
    """The method of the recipe (`auto` or a contender), or `given` for a given permutation."""
    control: str = "full"
    has_tuned_target: bool = False
    trains_after: bool = False

    @property
    def compared(self) -> bool:
        """Whether the port is compared with anything."""
        return self.control != "none"


@dataclass(frozen=True)
class Sizes:
    """Numbers of images forwarded, from which the price without gradients is computed."""

    steps: int
    chosen_by: int
    """Images that choose among contenders."""
    batchnorm: int
    """Images for BatchNorm statistics; 0 without such layers."""
    head: int
    """Images on which a closed-form head is fitted and scored."""
    factors: int = len(FACTORS)
    """Number of factors tried by the naive line."""


def _never(asked: Asked) -> bool:
    return False


def _free(steps: int) -> int:
    return 0


def _score_once(sizes: Sizes) -> int:
    return sizes.chosen_by


def _score_steps(sizes: Sizes) -> int:
    return sizes.steps * (sizes.batchnorm + sizes.chosen_by)


def _score_course(sizes: Sizes) -> int:
    """The steps of a masked course, and the best of them scaled up."""
    return _score_steps(sizes) + len(FURTHER) * (sizes.batchnorm + sizes.chosen_by)


def _score_factors(sizes: Sizes) -> int:
    return sizes.factors * (sizes.batchnorm + sizes.chosen_by)


def _fit_head(sizes: Sizes) -> int:
    return sizes.head


def _fit_head_of_base(sizes: Sizes) -> int:
    """With the stored BatchNorm statistics, and with re-estimated ones."""
    return sizes.batchnorm + 2 * sizes.head if sizes.batchnorm else sizes.head


@dataclass(frozen=True)
class Contender:
    """A row of the registry. Its name is the key in port.json, and for a method the value of `--method`."""

    name: str
    label: str
    short: str
    """The label for narrow columns."""
    colours: tuple[str, str]
    """Colours on light and dark screens; unique among contenders."""
    marker: str
    """Marker in charts, in matplotlib's notation."""
    line: str = "-"
    step: str = ""
    """For a method: import path `module:name` of the function from a problem and a state to the next state."""
    make: str = "hf_retarget.porting.makers:follow_trajectory"
    """Import path `module:name` of the function that makes the weights, from a contest and this row to `Made`."""
    after: Callable[[Asked], bool] = _never
    """Whether it enters as a continuation of the winner."""
    beside: Callable[[Asked], bool] = _never
    """Whether it enters for comparison with the winner."""
    gradients: Callable[[int], int] = _free
    """Gradients taken on both sides for a number of steps, each over `grad_batches` minibatches."""
    forwards: Callable[[Sizes], int] = _score_once
    """Images forwarded, besides those of gradients and of the test."""
    place: int = 0
    """Rank among the contenders of `--method auto`, simplest first: on a tie, the simplest wins. 0: not among them."""
    course: str = ""
    """Name of the steps it shares with other contenders, whose cost counts once."""
    goes_further: bool = False
    """Whether the best of its steps is scaled up, since masked steps fall short."""
    refits: str = ""
    """Name of the contender whose head it refits."""
    finds_permutation: bool = False
    """Whether it finds a permutation that other fine-tunings between the same bases can reuse."""
    without_matching: str = ""
    """Name of its counterpart without matching, against which the value of matching is measured."""
    is_original: bool = False
    """Whether it is the tuned model itself, to which flips and shares of accuracy refer."""
    sets_targets: bool = False
    """Whether gradients aim at the targets that its head was fitted to."""
    is_alternative: bool = False
    """Whether it is what a user would do instead of a port, at the same price."""
    instead: str = ""
    """Advice if it is better than the port."""
    stands_alone: bool = False
    """Whether `--method` accepts it although it takes no steps."""
    drawn: bool = True
    """Whether it appears in charts; tables show all."""
    axis: str = "step"
    """What its steps are: a `step` along the trajectory, or a `factor` of the whole."""

    @property
    def may_replace(self) -> bool:
        """Whether it could replace the port: another port, or an alternative on the new base."""
        return bool(self.place or self.step or (self.instead and not self.is_original))

    @property
    def is_method(self) -> bool:
        """Whether `--method` accepts it."""
        return bool(self.step) or self.stands_alone

    def resolve(self, path: str) -> Callable[..., Any]:
        """Import the function at a path `module:name`."""
        found: Callable[..., Any] = resolve_name(path)
        return found


_CONTENDERS: dict[str, Contender] = {}


def register(contender: Contender) -> Contender:
    """Add a row; names must be unique."""
    if contender.name in _CONTENDERS:
        raise RetargetError(f"there is a contender '{contender.name}' already")
    _CONTENDERS[contender.name] = contender
    return contender


def contenders() -> tuple[Contender, ...]:
    """All contenders, in table order."""
    return tuple(_CONTENDERS.values())


def method_names() -> tuple[str, ...]:
    """The values of `--method`: `auto`, and the names of methods, sorted."""
    return (AUTO, *sorted(each.name for each in contenders() if each.is_method))


def find_contender(name: str) -> Contender:
    """The row of this name, or a generic one if this version does not know it."""
    return _CONTENDERS.get(name) or Contender(name, name, name, ("#6b7280", "#9ca3af"), "o")


def choose_contenders(asked: Asked) -> list[tuple[Contender, str]]:
    """The contenders that enter a contest, with their roles: those that may win, continuations, and the rest.

    Example:
        >>> [(each.name, role) for each, role in choose_contenders(Asked("fgmt", control="none", trains_after=True))]
        [('fgmt', 'port'), ('finetuned', 'after')]
    """
    may_win = [each for each in contenders() if each.place] if asked.method == AUTO else [find_contender(asked.method)]
    chosen = [(each, PORT) for each in may_win]
    chosen += [(each, AFTER) for each in contenders() if each.after(asked)]
    taken = {each.name for each, _ in chosen}
    return chosen + [(each, BESIDE) for each in contenders() if each.name not in taken and each.beside(asked)]


def _per_step(sides: int) -> Callable[[int], int]:
    return lambda steps: sides * steps


_METHODS = "hf_retarget.matching.methods"
_MAKERS = "hf_retarget.porting.makers"

for _row in (
    Contender(
        "tuned",
        label="tuned model, on the old base",
        short="tuned model",
        colours=("#be185d", "#f472b6"),
        marker="*",
        make=f"{_MAKERS}:keep_tuned",
        beside=lambda asked: asked.compared,
        is_original=True,
        instead="keep the tuned model",
    ),
    Contender(
        "tuned-head",
        label="tuned model, new head",
        short="tuned + head",
        colours=("#db2777", "#fbcfe8"),
        marker="*",
        make=f"{_MAKERS}:refit_tuned",
        beside=lambda asked: asked.compared,
        forwards=_fit_head,
        drawn=False,
    ),
    Contender(
        "old-head",
        label="old base, closed-form head",
        short="old base + head",
        colours=("#57534e", "#d6d3d1"),
        marker="x",
        make=f"{_MAKERS}:refit_source",
        beside=lambda asked: asked.compared,
        forwards=_fit_head_of_base,
        drawn=False,
    ),
    Contender(
        "base",
        label="new base as it is",
        short="new base",
        colours=("#78716c", "#a8a29e"),
        marker="x",
        make=f"{_MAKERS}:keep_base",
        beside=lambda asked: asked.compared,
        drawn=False,  # mostly at chance, and the same for all methods
    ),
    Contender(
        "naive",
        label="naive port, no matching",
        short="naive",
        colours=("#c2410c", "#fb923c"),
        marker="s",
        line="--",
        step=f"{_METHODS}:naive",
        instead="port without matching (--method naive)",
        beside=lambda asked: asked.compared and asked.method != AUTO,
        forwards=_score_steps,
    ),
    Contender(
        "naive-line",
        label="naive port, scaled",
        short="naive, scaled",
        colours=("#ea580c", "#fdba74"),
        marker="s",
        line="--",
        make=f"{_MAKERS}:follow_line",
        axis="factor",
        forwards=_score_factors,
        place=1,
    ),
    Contender(
        "naive-head",
        label="naive port, new head",
        short="naive + head",
        colours=("#9a3412", "#fed7aa"),
        marker="s",
        make=f"{_MAKERS}:refit_entered",
        forwards=_fit_head,
        place=2,
        refits="naive-line",
    ),
    Contender(
        "head",
        label="new base, closed-form head",
        short="head",
        colours=("#15803d", "#4ade80"),
        marker="d",
        make=f"{_MAKERS}:refit_target",
        beside=lambda asked: asked.compared,
        forwards=_fit_head_of_base,
        place=3,
        sets_targets=True,
        instead="fit a head on the new base (--method head)",
        stands_alone=True,
    ),
    Contender(
        "matched",
        label="matched port, masked",
        short="matched",
        colours=("#1e40af", "#bfdbfe"),
        marker="o",
        make=f"{_MAKERS}:follow_course",
        gradients=_per_step(2),
        forwards=_score_course,
        finds_permutation=True,
        without_matching="naive-line",
        place=6,
        course="matched",
        goes_further=True,
    ),
    Contender(
        "matched-head",
        label="matched port, masked, new head",
        short="matched + head",
        colours=("#312e81", "#c7d2fe"),
        marker="o",
        make=f"{_MAKERS}:refit_entered",
        forwards=_fit_head,
        finds_permutation=True,
        without_matching="naive-head",
        place=7,
        course="matched",
        refits="matched",
    ),
    Contender(
        "whole",
        label="matched port, whole",
        short="whole",
        colours=("#0284c7", "#7dd3fc"),
        marker="o",
        make=f"{_MAKERS}:follow_course",
        gradients=_per_step(2),
        forwards=_score_steps,
        finds_permutation=True,
        without_matching="naive-line",
        place=4,
        course="matched",
    ),
    Contender(
        "whole-head",
        label="matched port, whole, new head",
        short="whole + head",
        colours=("#075985", "#bae6fd"),
        marker="o",
        make=f"{_MAKERS}:refit_entered",
        forwards=_fit_head,
        finds_permutation=True,
        without_matching="naive-head",
        place=5,
        course="matched",
        refits="whole",
    ),
    Contender(
        "naive-sign",
        label="mask alone, no matching",
        short="mask alone",
        colours=("#4d7c0f", "#a3e635"),
        marker="P",
        line=":",
        step=f"{_METHODS}:naive_sign",
        forwards=_score_steps,
        beside=lambda asked: asked.compared and find_contender(asked.method).without_matching == "naive-sign",
        gradients=_per_step(1),
    ),
    Contender(
        "oracle",
        label="port with the oracle's permutation",
        short="oracle",
        colours=("#a16207", "#eab308"),
        marker="^",
        line="-.",
        step=f"{_METHODS}:oracle",
        forwards=_score_steps,
        beside=lambda asked: asked.compared and asked.has_tuned_target,
        without_matching="naive",
    ),
    Contender(
        "plain",
        label="plain fine-tuning, same price",
        short="plain",
        colours=("#0f766e", "#2dd4bf"),
        marker="v",
        line="--",
        make=f"{_MAKERS}:train_plainly",
        beside=lambda asked: asked.control == "full",
        is_alternative=True,
        instead="fine-tune the new base directly",
    ),
    Contender(
        "tuned-target",
        label="real fine-tuning of the new base",
        short="real fine-tuning",
        colours=("#854d0e", "#facc15"),
        marker="D",
        make=f"{_MAKERS}:keep_tuned_target",
        beside=lambda asked: asked.has_tuned_target,
    ),
    Contender(
        "rebasin",
        label="port by rebasin",
        short="rebasin",
        colours=("#0369a1", "#38bdf8"),
        marker="o",
        step=f"{_METHODS}:rebasin",
        forwards=_score_steps,
        finds_permutation=True,
        without_matching="naive",
    ),
    Contender(
        "permuted-source",
        label="tuned model, permuted",
        short="permuted-source",
        colours=("#9d174d", "#f9a8d4"),
        marker="o",
        step=f"{_METHODS}:permuted_source",
        forwards=_score_steps,
        gradients=_per_step(2),
        without_matching="naive",
    ),
    Contender(
        "given",
        label="port with a given permutation",
        short="given permutation",
        colours=("#3730a3", "#a5b4fc"),
        marker="o",
        make=f"{_MAKERS}:follow_given_permutation",
        forwards=_score_steps,
        without_matching="naive",
    ),
    Contender(
        "gmt",
        label="port by gmt",
        short="gmt",
        colours=("#0e7490", "#22d3ee"),
        marker="o",
        step=f"{_METHODS}:gmt",
        forwards=_score_steps,
        gradients=lambda steps: steps * (steps + 1),  # both sides, all gradients again at every step
        finds_permutation=True,
        without_matching="naive",
    ),
    Contender(
        "fgmt",
        label="port by fgmt",
        short="fgmt",
        colours=("#1d4ed8", "#93c5fd"),
        marker="o",
        step=f"{_METHODS}:fgmt",
        forwards=_score_steps,
        gradients=_per_step(2),
        finds_permutation=True,
        without_matching="naive",
    ),
    Contender(
        "fgmt-sign",
        label="port by fgmt-sign",
        short="fgmt-sign",
        colours=("#2563eb", "#60a5fa"),
        marker="o",
        step=f"{_METHODS}:fgmt_sign",
        forwards=_score_steps,
        gradients=_per_step(2),
        finds_permutation=True,
        without_matching="naive-sign",
    ),
    Contender(
        "finetuned",
        label="port, fine-tuned further",
        short="fine-tuned further",
        colours=("#7c3aed", "#b794f6"),
        marker="D",
        make=f"{_MAKERS}:train_on",
        after=lambda asked: asked.trains_after,
    ),
):
    register(_row)
