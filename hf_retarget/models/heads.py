"""Classifiers of one size for both bases: what the fine-tuning started from, which no checkpoint on the Hub tells."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_retarget.errors import ModelError

Tensors = Mapping[str, Tensor]

POLICIES = ("auto", "zero", "shared", "given", "own")
"""`zero`: both bases get zeros. `shared`: both get one random head. `given`: both get the head that the fine-tuning
began with. `own`: each keeps its own. `auto`: `own` if the head was fine-tuned along, else `zero`."""

ALONG = 0.5
"""Above this cosine the tuned head is taken to come from the source's head; of unrelated heads it is near 0."""


@dataclass(frozen=True, eq=False)
class Heads:
    """The weights of both bases with heads of the tuned model's size."""

    source: dict[str, Tensor] = field(repr=False)
    target: dict[str, Tensor] = field(repr=False)
    policy: str
    """The one that was used, never `auto`."""
    why: str


def fit_heads(
    source: Tensors,
    tuned: Tensors,
    target: Tensors,
    names: Sequence[str],
    policy: str = "auto",
    *,
    fresh: Tensors | None = None,
    given: Tensors | None = None,
    labels_agree: bool | None = None,
) -> Heads:
    """Give both bases a head of the tuned model's size; `names` are the tensors of the head in `tuned`.

    `fresh` is the random head for `shared`, `given` the one for `given`; `labels_agree` is False if the labels of
    the three are known to differ.

    Example:
        >>> base, tuned = {"w": torch.ones(2), "fc": torch.ones(5, 2)}, {"w": torch.ones(2), "fc": torch.ones(3, 2)}
        >>> heads = fit_heads(base, tuned, base, ["fc"])
        >>> heads.policy, heads.target["fc"].shape
        ('zero', torch.Size([3, 2]))
    """
    _check(policy, names, tuned)
    why = "asked for"
    if policy == "auto":
        policy, why = _choose(source, tuned, target, names, labels_agree)
    if policy == "own":
        if differing := _differing(source, tuned, target, names):
            raise ModelError(f"head policy 'own' needs heads of one size, but {differing}; use 'zero'")
        return Heads(dict(source), dict(target), policy, why)
    if policy == "zero":
        head: Tensors = {name: torch.zeros_like(tuned[name]) for name in names}
    elif policy == "shared":
        head = _fitting(fresh, tuned, names, policy, "no random head was made; pass fresh=")
    else:
        head = _fitting(given, tuned, names, policy, "no head was given; name the file with the initial head")
    return Heads(_exchange(source, tuned, head), _exchange(target, tuned, head), policy, why)


def foresee_policy(
    source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str], labels_agree: bool | None = None
) -> tuple[str | None, str]:
    """What `auto` will come to, as far as shapes tell, and why; None if the weights decide.

    Example:
        >>> base, tuned = {"fc": torch.ones(5, 2, device="meta")}, {"fc": torch.ones(3, 2, device="meta")}
        >>> foresee_policy(base, tuned, base, ["fc"])[0]
        'zero'
    """
    _check("auto", names, tuned)
    if (found := _choose_by_shape(source, tuned, target, names, labels_agree)) is not None:
        return found
    return None, "the heads have one size: 'own' if the tuned head is close to the source's, else 'zero'"


def _check(policy: str, names: Sequence[str], tuned: Tensors) -> None:
    if policy not in POLICIES:
        near = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(POLICIES)}"
        raise ModelError(f"unknown head policy '{policy}'; {hint}")
    if not names:
        raise ModelError("the tuned model has no head that could be found; a port needs a classifier")
    if absent := [name for name in names if name not in tuned]:
        raise ModelError(f"the tuned model has no '{absent[0]}', which should belong to its head")


def _choose(
    source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str], labels_agree: bool | None
) -> tuple[str, str]:
    if (found := _choose_by_shape(source, tuned, target, names, labels_agree)) is not None:
        return found
    cosine = _cosine(source, tuned, names)
    if cosine > ALONG:
        return "own", f"the heads have one size, and the tuned head is close to the source's (cosine {cosine:.2f})"
    return "zero", f"the heads have one size, but the tuned head is not the source's (cosine {cosine:.2f})"


def _choose_by_shape(
    source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str], labels_agree: bool | None
) -> tuple[str, str] | None:
    if differing := _differing(source, tuned, target, names):
        return "zero", f"the heads differ in size: {differing}"
    return ("zero", "the heads have one size, but their labels differ") if labels_agree is False else None


def _differing(source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str]) -> str:
    for side, base in (("source", source), ("target", target)):
        for name in names:
            if name not in base:
                return f"the {side} has no '{name}'"
            if base[name].shape != tuned[name].shape:
                ours, theirs = list(tuned[name].shape), list(base[name].shape)
                return f"'{name}' is {theirs} in the {side} and {ours} in the tuned model"
    return ""


def _cosine(source: Tensors, tuned: Tensors, names: Sequence[str]) -> float:
    """Between the weight matrices of the heads; biases are small and say little."""
    matrices = [name for name in names if tuned[name].dim() > 1] or list(names)
    ours = torch.cat([tuned[name].double().flatten() for name in matrices])
    theirs = torch.cat([source[name].double().flatten() for name in matrices])
    length = float(ours.norm() * theirs.norm())
    return float(ours @ theirs) / length if length else 0.0


def _fitting(head: Tensors | None, tuned: Tensors, names: Sequence[str], policy: str, absent: str) -> Tensors:
    if head is None:
        raise ModelError(f"head policy '{policy}': {absent}")
    for name in names:
        if name not in head:
            raise ModelError(
                f"head policy '{policy}' needs '{name}', but the head has only {', '.join(head) or 'nothing'}"
            )
        if head[name].shape != tuned[name].shape:
            raise ModelError(
                f"head policy '{policy}': '{name}' is {list(head[name].shape)}, "
                f"but {list(tuned[name].shape)} in the tuned model"
            )
    if extra := [name for name in head if name not in names]:
        raise ModelError(f"head policy '{policy}': '{extra[0]}' is no part of the head ({', '.join(names)})")
    return head


def _exchange(base: Tensors, tuned: Tensors, head: Tensors) -> dict[str, Tensor]:
    """The weights of a base with another head, in the order of the tuned model; a head of its own is left behind."""
    order = [name for name in tuned if name in head or name in base]
    return {name: head[name].clone() if name in head else base[name] for name in order}
