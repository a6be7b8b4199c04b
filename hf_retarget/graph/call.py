"""The language of rules: `Call`, one call of an operator, and signatures, which relate its inputs and outputs.

A signature is written in the style of einops patterns:

    "n (g i) H W, (g o) i K L, (g o) -> n (g o) Y X"

Operands are separated by commas, axes by spaces. The same lower-case name means the same permutation; the axis of an
UPPER-CASE name is pinned, because its order matters. Parentheses denote products, `...` any number of axes that
broadcast, and `1` an axis of one element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hf_retarget.errors import RuleError, TraceError
from hf_retarget.graph import axes as algebra
from hf_retarget.graph.axes import Misaligned, Pin, Product, Shape, axis_of, flat, size_of

Result = Shape | list[Shape]
"""The result of a rule: the axes of the output tensor, or a list of those of several outputs."""

Rule = Callable[["Call"], Result]


@dataclass(frozen=True)
class Value:
    """A traced tensor: its axes or, if it does not depend on anything that may be permuted, its value."""

    shape: Shape = ()
    constant: Tensor | None = None


class Call:
    """One call of an operator in a trace."""

    def __init__(
        self, node: fx.Node, arguments: dict[str, Any], where: str, held: list[Shape], spaces: list[Shape]
    ) -> None:
        self.node = node
        self.arguments = arguments
        self.where = where
        self._held = held
        self._spaces = spaces
        self._shapes: dict[int, Shape] = {}

    # ------------------------------------------------------------------ arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that is not a tensor, by its name in the operator's schema."""
        return self.arguments.get(name, default)

    def shape(self, value: Any) -> Shape:
        """The axes of an argument, which is given by name, as a value, or as axes.

        A constant pins the axes along which it varies; the others are fresh.
        """
        value = self.arguments[value] if isinstance(value, str) else value
        if isinstance(value, tuple):
            return value
        if not isinstance(value, Value):
            raise RuleError(f"{self.where}: expected a tensor, found {value!r}")
        if value.constant is None:
            return value.shape
        if id(value) not in self._shapes:
            self._shapes[id(value)] = constant_shape(value.constant, Pin("constant", self.where))
        return self._shapes[id(value)]

    @property
    def tensors(self) -> list[Value]:
        """All tensor arguments in order, including those inside lists."""
        return [value for value in pytree.tree_leaves(list(self.arguments.values())) if isinstance(value, Value)]

    @property
    def shapes(self) -> list[Shape]:
        """The axes of all tensor arguments."""
        return [self.shape(value) for value in self.tensors]

    @property
    def sizes(self) -> list[int]:
        """The size of the output, or of its first tensor if there are several."""
        return self.all_sizes[0]

    @property
    def all_sizes(self) -> list[list[int]]:
        """The size of every output tensor."""
        outputs = [output for output in pytree.tree_leaves(self.node.meta["val"]) if isinstance(output, Tensor)]
        if any(not isinstance(size, int) for output in outputs for size in output.shape):
            raise TraceError(f"the output size of {self.where} depends on the data; such a model cannot be traced")
        return [list(output.shape) for output in outputs]

    # ------------------------------------------------------------------ verbs

    def fresh(self, size: int) -> Product:
        """A new free axis."""
        return axis_of(size)

    def pinned(self, size: int, reason: str = "spatial") -> Product:
        """A new pinned axis."""
        return axis_of(size, Pin(reason, self.where))

    def pin(self, axis: Product, reason: str = "spatial") -> None:
        """Pin an axis."""
        algebra.pin(axis, Pin(reason, self.where))

    def mix(self, shape: Shape, dims: Iterable[int], reason: str = "spatial") -> None:
        """Pin axes whose positions the operator mixes, so that nothing may vary along them."""
        mixed = {dim % len(shape) for dim in dims}
        for dim in mixed:
            self.pin(shape[dim], reason)
        self.hold(tuple(axis for dim, axis in enumerate(shape) if dim not in mixed))

    def hold(self, shape: Shape) -> None:
        """Declare a tensor that exists only inside the operator, such as the statistics of a softmax."""
        self._held.append(shape)

    def span(self, space: Shape) -> None:
        """Declare the index space of a contraction; an axis that is contracted with itself is listed twice."""
        self._spaces.append(space)

    def unify(self, first: Product, *others: Product) -> Product:
        """Make axes share one permutation; an axis of one element broadcasts."""
        for other in others:
            if not flat(first):
                first = other
            elif flat(other):
                try:
                    algebra.unify(first, other)
                except Misaligned:
                    self.pin((*first, *other), "misaligned")
        return first

    def broadcast(self, shapes: Iterable[Shape]) -> Shape:
        """Unify several shapes, aligned at the right."""
        shapes = list(shapes)
        rank = max((len(shape) for shape in shapes), default=0)
        padded = [((),) * (rank - len(shape)) + tuple(shape) for shape in shapes]
        return tuple(self.unify(*axes) for axes in zip(*padded, strict=True))

    def regroup(self, axes: Sequence[Product], sizes: Sequence[int]) -> list[Product]:
        """Reshape neighbouring axes to `sizes`; pin them if they do not fit."""
        merged = [atom for axis in axes for atom in axis]
        if size_of(merged) != prod(sizes):
            raise RuleError(f"{self.where}: cannot reshape {size_of(merged)} elements to {list(sizes)}")
        try:
            return algebra.regroup(merged, sizes)
        except Misaligned:
            self.pin(tuple(merged), "misaligned")
            return [self.pinned(size, "misaligned") for size in sizes]

    def narrow(self, shape: Shape, dim: int, start: int, length: int) -> Shape:
        """The shape of ``x[..., start : start + length, ...]``."""
        try:
            piece, keys = algebra.narrow(shape[dim], start, length)
        except Misaligned:
            self.mix(shape, [dim], "misaligned")
            return (*shape[:dim], self.pinned(length, "misaligned"), *shape[dim + 1 :])
        others = list(shape)
        for key in keys:
            others = [algebra.specialise(axis, key) for axis in others]
        others[dim] = piece
        return tuple(others)

    def concatenate(self, shapes: Sequence[Shape], dim: int) -> Shape:
        """The shape of a concatenation: a sum along `dim`, and families over its parts elsewhere."""
        shapes = [shape for shape in shapes if size_of(shape[dim])] or list(shapes[:1])
        if len(shapes) == 1:
            return shapes[0]
        axis = algebra.sum_of([shape[dim] for shape in shapes])
        result: list[Product] = []
        for other, axes in enumerate(zip(*shapes, strict=True)):
            if other == dim:
                result.append((axis,))
            elif any(leaf.pin is not None for each in axes for leaf in algebra.leaves(each)):
                result.append(self.unify(*axes))
            elif all(flat(each) == flat(axes[0]) for each in axes):
                result.append(tuple(flat(axes[0])))
            else:
                result.append((algebra.family(axis, axes),))
        return tuple(result)

    # ------------------------------------------------------------------ signatures

    def relate(self, signature: str, operands: Sequence[Any] | None = None, **sizes: int) -> Result:
        """Apply a signature to the tensor arguments (or to `operands`, where None means absent)."""
        parsed = parse(signature)
        if operands is None:
            schema = self.node.target._schema.arguments  # type: ignore[union-attr]
            operands = [self.get(argument.name) for argument in schema if "Tensor" in str(argument.type)]
        names: dict[str, Product] = {}
        batch: list[Shape] = []
        for pattern, operand in zip(parsed.inputs, operands, strict=False):
            if operand is not None:
                self._bind(pattern, self.shape(operand), names, batch, sizes)
        for name, size in sizes.items():
            names.setdefault(name, self.pinned(size) if pinned(name) else self.fresh(size))
        common = self.broadcast(batch)
        self.span((*common, *names.values()))
        outputs = [
            self._build(pattern, size, names, common)
            for pattern, size in zip(parsed.outputs, self.all_sizes, strict=True)
        ]
        return outputs[0] if isinstance(self.node.meta["val"], Tensor) else outputs

    def _bind(
        self,
        pattern: TensorPattern,
        shape: Shape,
        names: dict[str, Product],
        batch: list[Shape],
        sizes: dict[str, int],
    ) -> None:
        end = len(shape) - len(pattern.tail)
        if len(shape) < len(pattern.head) + len(pattern.tail) or (not pattern.ellipsis and end != len(pattern.head)):
            raise RuleError(f"{self.where}: an operand has {len(shape)} axes, its rule expects {pattern}")
        middle = shape[len(pattern.head) : end]
        if pattern.ellipsis:
            batch.append(middle)
        kept: list[Product] = list(middle)
        for axis_pattern, axis in zip(
            (*pattern.head, *pattern.tail), (*shape[: len(pattern.head)], *shape[end:]), strict=True
        ):
            parts = [axis]
            if len(axis_pattern) > 1:
                parts = self.regroup([axis], self._factor_sizes(axis_pattern, size_of(axis), names, sizes))
            for name, part in zip(axis_pattern, parts, strict=False):
                if pinned(name):
                    self.pin(part)
                else:
                    kept.append(part)
                names[name] = self.unify(names[name], part) if name in names else part

        if any(map(pinned, pattern.names())):
            self.hold(tuple(kept))  # pinned axes are mixed: nothing varies along them

    def _factor_sizes(
        self, pattern: Sequence[str], total: int, names: dict[str, Product], sizes: dict[str, int]
    ) -> list[int]:
        known = {n: sizes[n] if n in sizes else size_of(names[n]) for n in pattern if n in sizes or n in names}
        unknown = [name for name in pattern if name not in known]
        rest, remainder = divmod(total, prod(known.values()))
        if len(unknown) > 1 or remainder or (not unknown and rest != 1):
            raise RuleError(f"{self.where}: cannot divide an axis of {total} into {' × '.join(pattern)} with {known}")
        return [known.get(name, rest) for name in pattern]

    def _build(self, pattern: TensorPattern, sizes: list[int], names: dict[str, Product], batch: Shape) -> Shape:
        middle = batch if pattern.ellipsis else ()
        count = len(pattern.head) + len(middle) + len(pattern.tail)
        if count != len(sizes):
            raise RuleError(f"{self.where}: the output has {len(sizes)} axes, its rule gives {count}")

        def product(axis: Sequence[str], size: int) -> Product:
            if len(axis) == 1 and pinned(axis[0]):
                known = names.get(axis[0])
                return known if known is not None and size_of(known) == size else self.pinned(size)
            return tuple(atom for name in axis for atom in names[name])

        start = len(pattern.head)
        tail = map(product, pattern.tail, sizes[start + len(middle) :])
        return (*map(product, pattern.head, sizes[:start]), *middle, *tail)


def constant_shape(value: Tensor, why: Pin) -> Shape:
    """The axes of a constant: pinned where it varies, free where it is uniform."""
    known = not value.is_meta and value.numel() > 0
    shape: list[Product] = []
    for dim, size in enumerate(value.shape):
        uniform = known and bool((value == value.narrow(dim, 0, 1)).all())
        shape.append(axis_of(size, None if uniform else why))
    return tuple(shape)


# ---- signatures

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
