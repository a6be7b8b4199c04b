"""Heads: one for the classes of a fine-tuning, or one of equal size for both bases of a port.

Checkpoints on the Hub do not contain the head that their fine-tuning started from, so a port has to choose one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.models.checkpoint import Checkpoint
from hf_retarget.models.compare import head_names
from hf_retarget.models.weights import describe_differences, seeded
from hf_retarget.names import SIDES, START_HEADS
from hf_retarget.words import nearest

Tensors = Mapping[str, Tensor]

ALONG = 0.5
"""Cosine above which the tuned head is assumed to come from the old base's head; unrelated heads are near 0."""


# ---- for a fine-tuning


def check_head(head: str) -> None:
    """Refuse an unknown kind of head."""
    if head not in START_HEADS:
        hint = nearest(head, START_HEADS) or f"; choose one of {', '.join(START_HEADS)}"
        raise ModelError(f"unknown head '{head}'{hint}")


def choose_head(
    checkpoint: Checkpoint, classes: int, labels: tuple[str, ...] | None, head: str = "auto"
) -> tuple[str, str]:
    """The kind of head for data with these classes and labels, never `auto`, and the reason."""
    check_head(head)
    if head in ("fresh", "zero"):
        return head, "as requested"
    if classes != checkpoint.num_classes:
        reason = f"the model has {checkpoint.num_classes} classes, the data {classes}"
        if head == "keep":
            raise ModelError(f"the head of '{checkpoint.reference}' cannot be kept: {reason}; use 'fresh' or 'zero'")
        return "zero", reason
    if head == "auto" and checkpoint.labels and labels and match_names(labels, checkpoint.labels) is None:
        return "zero", "the labels of model and data differ"
    return "keep", "as requested" if head == "keep" else "the classes of model and data agree"


def make_model(checkpoint: Checkpoint, classes: int, head: str, seed: int = 0) -> nn.Module:
    """The model of a checkpoint with a head of the given kind for this number of classes."""
    if head == "keep":
        return checkpoint.build()
    old = set(head_names(checkpoint))
    rest = {name: tensor for name, tensor in checkpoint.weights.items() if name not in old}
    model = replace(checkpoint, weights=rest).build(classes, seed=seed)
    names = set(head_names(replace(checkpoint, weights=model.state_dict(), num_classes=classes)))
    if not names:
        raise ModelError(f"no classifier was found in '{checkpoint.reference}'; add one to the model")
    if checkpoint.module is not None:
        _reset(model, names, seed)  # a copied module keeps its head if the number of classes is the same
    if head == "zero":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.zero_()
    return model


def match_names(labels: Sequence[str], model_labels: Sequence[str]) -> list[int] | None:
    """The model's number of each label, by name; None if the labels differ in more than case, `_` and `-`.

    Example:
        >>> match_names(["ankle boot", "bag"], ["Bag", "Ankle_boot"]), match_names(["ant"], ["bee"])
        ([1, 0], None)
    """
    ours, theirs = simplify_names(labels, model_labels)
    place = {name: number for number, name in enumerate(theirs)}
    return [place[name] for name in ours] if set(ours) == set(theirs) else None


def simplify_names(*labels: Sequence[str]) -> list[list[str]]:
    """Normalise case, `_` and `-` in lists of labels, unless that would make some of them equal."""
    plain = [[" ".join(re.split(r"[_\s-]+", each.casefold())).strip() for each in names] for names in labels]
    return plain if all(len(set(names)) == len(names) for names in plain) else [list(names) for names in labels]


def _reset(model: nn.Module, names: set[str], seed: int) -> None:
    for where in sorted({name.rpartition(".")[0] for name in names}):
        layer: Any = model.get_submodule(where)
        if not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(f"the head '{where}' ({type(layer).__name__}) cannot be reset; keep it, or use 'zero'")
        with seeded(seed):
            layer.reset_parameters()


# ---- for a port


@dataclass(frozen=True, eq=False)
class Heads:
    """The weights of both bases with heads of the size of the tuned model's."""

    source: dict[str, Tensor] = field(repr=False)
    target: dict[str, Tensor] = field(repr=False)
    policy: str
    """The policy used, never `auto`."""
    why: str


def fit_heads(
    source: Tensors,
    tuned: Tensors,
    target: Tensors,
    names: Sequence[str],
    policy: str = "auto",
    *,
    head: Tensors | None = None,
    labels_agree: bool | None = None,
) -> Heads:
    """Give both bases a head of the tuned model's size; `names` are the tensors of the head in `tuned`.

    `zero`: both get zeros. `shared`: both get `head`, a random one. `given`: both get `head`, the one that the
    fine-tuning started from. `own`: each keeps its own. `auto`: `own` if the tuned head comes from the old base's,
    else `zero`. `labels_agree` is False if the labels of the three are known to differ.

    Example:
        >>> base, tuned = {"w": torch.ones(2), "fc": torch.ones(5, 2)}, {"w": torch.ones(2), "fc": torch.ones(3, 2)}
        >>> heads = fit_heads(base, tuned, base, ["fc"])
        >>> heads.policy, heads.target["fc"].shape
        ('zero', torch.Size([3, 2]))
    """
    why = "as requested"
    if policy == "auto":
        foreseen, why = foresee_policy(source, tuned, target, names, labels_agree)
        policy, why = (foreseen, why) if foreseen else _choose_by_cosine(source, tuned, names)
    if policy == "own":
        if differing := _find_difference(source, tuned, target, names):
            raise ModelError(f"head policy 'own' needs heads of one size, but {differing}; use 'zero'")
        return Heads(dict(source), dict(target), policy, why)
    if policy == "zero":
        head = {name: torch.zeros_like(tuned[name]) for name in names}
    elif head is None:
        absent = {"shared": "no random head was made; pass head=", "given": "no head was given; name its file"}
        raise ModelError(f"head policy '{policy}': {absent[policy]}")
    if differing := describe_differences(head, {name: tuned[name] for name in names}):
        raise ModelError(f"head policy '{policy}': the head does not fit the tuned model: {differing}")
    return Heads(_exchange(source, tuned, head), _exchange(target, tuned, head), policy, why)


def foresee_policy(
    source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str], labels_agree: bool | None = None
) -> tuple[str | None, str]:
    """What `auto` will choose given shapes and labels, and why; None if the weights decide.

    Example:
        >>> base, tuned = {"fc": torch.ones(5, 2, device="meta")}, {"fc": torch.ones(3, 2, device="meta")}
        >>> foresee_policy(base, tuned, base, ["fc"])[0]
        'zero'
    """
    if differing := _find_difference(source, tuned, target, names):
        return "zero", f"the heads differ in size: {differing}"
    if labels_agree is False:
        return "zero", "the heads have equal size, but their labels differ"
    return None, "the heads have equal size: 'own' if the tuned head is close to the old base's, else 'zero'"


def _choose_by_cosine(source: Tensors, tuned: Tensors, names: Sequence[str]) -> tuple[str, str]:
    """Compare the weight matrices of the heads; biases carry little information."""
    matrices = [name for name in names if tuned[name].dim() > 1] or list(names)
    ours = torch.cat([tuned[name].double().flatten() for name in matrices])
    theirs = torch.cat([source[name].double().flatten() for name in matrices])
    length = float(ours.norm() * theirs.norm())
    cosine = float(ours @ theirs) / length if length else 0.0
    if cosine > ALONG:
        return (
            "own",
            f"the heads have equal size, and the tuned one is close to the old base's (cosine {cosine:.2f})",
        )
    return "zero", f"the heads have equal size, but the tuned one is not the old base's (cosine {cosine:.2f})"


def _find_difference(source: Tensors, tuned: Tensors, target: Tensors, names: Sequence[str]) -> str:
    for side, base in ((SIDES["source"], source), (SIDES["target"], target)):
        for name in names:
            if name not in base:
                return f"the {side} has no '{name}'"
            if base[name].shape != tuned[name].shape:
                ours, theirs = list(tuned[name].shape), list(base[name].shape)
                return f"'{name}' is {theirs} in the {side} and {ours} in the tuned model"
    return ""


def _exchange(base: Tensors, tuned: Tensors, head: Tensors) -> dict[str, Tensor]:
    """The weights of a base with another head, in the order of the tuned model."""
    order = [name for name in tuned if name in head or name in base]
    return {name: head[name].clone() if name in head else base[name] for name in order}
