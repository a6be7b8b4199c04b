"""Signatures: how an operator relates the axes of its inputs and outputs, in the style of einops patterns.

    "n (g i) H W, (g o) i K L, (g o) -> n (g o) Y X"

Operands are separated by commas, axes by spaces. The same lower-case name means the same permutation; the axis of an
UPPER-CASE name is pinned, because its order matters. Parentheses denote products, `...` any number of axes that
broadcast, and `1` an axis of one element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from hf_retarget.errors import RuleError

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|[A-Za-z]\w*|1|\S)")

AxisPattern = tuple[str, ...]
"""The names whose product is the axis; in most cases a single name, none for `1`."""


@dataclass(frozen=True)
class TensorPattern:
    """The axes of one operand, before and after its ellipsis (if it has one)."""

    head: tuple[AxisPattern, ...]
    tail: tuple[AxisPattern, ...]
    ellipsis: bool

    def names(self) -> list[str]:
        """The names in all axes."""
        return [name for axis in (*self.head, *self.tail) for name in axis]


@dataclass(frozen=True)
class Signature:
    """A parsed signature."""

    inputs: tuple[TensorPattern, ...]
    outputs: tuple[TensorPattern, ...]


@cache
def parse(text: str) -> Signature:
    """Parse a signature; results are cached.

    Example:
        >>> parse("... i, o i, o -> ... o").inputs[1].head
        (('o',), ('i',))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"signature {text!r} has no '->'")
    try:
        signature = Signature(
            tuple(_parse_tensor(part) for part in left.split(",")),
            tuple(_parse_tensor(part) for part in right.split(",")),
        )
    except RuleError as error:
        raise RuleError(f"signature {text!r}: {error}") from None
    known = {name for tensor in signature.inputs for name in tensor.names()}
    for name in [name for tensor in signature.outputs for name in tensor.names()]:
        if name not in known and not pinned(name):
            raise RuleError(f"signature {text!r}: output axis '{name}' is not an axis of any input")
    return signature


def pinned(name: str) -> bool:
    """Whether a name in a signature denotes a pinned axis."""
    return name[0].isupper()


def _parse_tensor(text: str) -> TensorPattern:
    head: list[AxisPattern] = []
    tail: list[AxisPattern] = []
    ellipsis = False
    product: list[str] | None = None
    for token in _TOKEN.findall(text):
        axes = tail if ellipsis else head
        if token == ELLIPSIS:
            if ellipsis or product is not None:
                raise RuleError("only one '...' for each operand, outside parentheses")
            ellipsis = True
        elif token == "(":
            if product is not None:
                raise RuleError("parentheses do not nest")
            product = []
        elif token == ")":
            if product is None:
                raise RuleError("')' without '('")
            axes.append(tuple(product))
            product = None
        elif token == "1":
            axes.append(())
        elif not token[0].isalpha():
            raise RuleError(f"unexpected {token!r}")
        elif product is not None:
            product.append(token)
        else:
            axes.append((token,))
    if product is not None:
        raise RuleError("'(' without ')'")
    return TensorPattern(tuple(head), tuple(tail), ellipsis)
