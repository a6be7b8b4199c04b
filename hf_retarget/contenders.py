"""Everything that could be the answer to a port: one row each, with its words, colours, price and maker.

Choosing, scoring, resuming, the terminal, report, card, comparisons and port.json work through this list and know no
names. To add an idea is to add a row (CONTRIBUTING.md shows how). Importing this does not import torch: a row names
the functions that do its work by their import paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hf_retarget.errors import RetargetError

PORT, AFTER, BESIDE = "port", "after", "beside"
"""Roles in a contest: may win; continues from the winner; is compared with it."""


@dataclass(frozen=True)
class Asked:
    """What decides which contenders enter."""

    method: str
    """That of the recipe, or `given` for a permutation that was found before."""
    control: str = "full"
    has_tuned_target: bool = False
    trains_after: bool = False

    @property
    def compared(self) -> bool:
        """Whether the port is compared with anything."""
        return self.control != "none"


def _never(asked: Asked) -> bool:
    return False


def _free(steps: int) -> int:
    return 0


@dataclass(frozen=True)
class Contender:
    """One row. Its name is the key in port.json, and for a method the value of `--method`."""

    name: str
    label: str
    short: str
    """The label in a narrow column."""
    colours: tuple[str, str]
    """On light and on dark screens; no two contenders share one."""
    marker: str
    """In charts, as matplotlib writes it."""
    line: str = "-"
    step: str = ""
    """For a method: the function that takes its steps, `module:name`, from a problem and a state to the next state."""
    make: str = "hf_retarget.porting.makers:follow_trajectory"
    """The function that makes the weights: `module:name`, from a contest and this row to `Made`."""
    after: Callable[[Asked], bool] = _never
    """Whether it continues from the winner."""
    beside: Callable[[Asked], bool] = _never
    """Whether it is compared with the winner."""
    gradients: Callable[[int], int] = _free
    """How many gradients it takes for this many steps, on both sides together; each is one of `grad_batches`."""
    finds_permutation: bool = False
    """Whether it finds one that serves for other fine-tunings between the same bases."""
    without_matching: str = ""
    """The contender that does the same without matching: what the matching is worth is measured against it."""
    is_alternative: bool = False
    """Whether it is what a user would do instead, at the same price."""
    drawn: bool = True
    """Whether charts show it; tables always do."""

    @property
    def is_method(self) -> bool:
        """Whether it can be asked for with `--method`."""
        return bool(self.step)

    def resolve(self, path: str) -> Callable[..., Any]:
        """The function of an import path."""
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found


_CONTENDERS: dict[str, Contender] = {}


def register(contender: Contender) -> Contender:
    """Add a row; a name that is there already is refused."""
    if contender.name in _CONTENDERS:
        raise RetargetError(f"there is a contender '{contender.name}' already")
    _CONTENDERS[contender.name] = contender
    return contender


def contenders() -> tuple[Contender, ...]:
    """All of them, in the order of a table."""
    return tuple(_CONTENDERS.values())


def method_names() -> tuple[str, ...]:
    """What `--method` can be, sorted."""
    return tuple(sorted(each.name for each in contenders() if each.is_method))


def find_contender(name: str) -> Contender:
    """The row of this name; for one that this version does not know, a plain row."""
    return _CONTENDERS.get(name) or Contender(name, name, name, ("#6b7280", "#9ca3af"), "o")


def choose_contenders(asked: Asked) -> list[tuple[Contender, str]]:
    """Those that enter a contest, with their roles: first what may win, then what continues from it, then the rest.

    Example:
        >>> [(each.name, role) for each, role in choose_contenders(Asked("fgmt", control="naive"))]
        [('fgmt', 'port'), ('tuned', 'beside'), ('base', 'beside'), ('naive', 'beside')]
    """
    chosen = [(find_contender(asked.method), PORT)]
    chosen += [(each, AFTER) for each in contenders() if each.after(asked)]
    taken = {each.name for each, _ in chosen}
    return chosen + [(each, BESIDE) for each in contenders() if each.name not in taken and each.beside(asked)]


def is_masked(asked: Asked) -> bool:
    """Whether the method masks its steps, so that the mask alone is compared with it."""
    return find_contender(asked.method).without_matching == "naive-sign"


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
        beside=lambda asked: asked.compared,
    ),
    Contender(
        "naive-sign",
        label="mask alone, no matching",
        short="mask alone",
        colours=("#4d7c0f", "#a3e635"),
        marker="P",
        line=":",
        step=f"{_METHODS}:naive_sign",
        beside=lambda asked: asked.compared and is_masked(asked),
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
        without_matching="naive",
    ),
    Contender(
        "gmt",
        label="port by gmt",
        short="gmt",
        colours=("#0e7490", "#22d3ee"),
        marker="o",
        step=f"{_METHODS}:gmt",
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
        gradients=_per_step(2),
        finds_permutation=True,
        without_matching="naive-sign",
    ),
    Contender(
        "finetuned",
        label="port, fine-tuned on",
        short="fine-tuned on",
        colours=("#7c3aed", "#b794f6"),
        marker="D",
        make=f"{_MAKERS}:train_on",
        after=lambda asked: asked.trains_after,
    ),
):
    register(_row)
