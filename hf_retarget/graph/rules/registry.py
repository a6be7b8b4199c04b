"""The registry of operator rules. Duplicates are refused; nothing is guessed for unknown operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch._ops import OpOverload, OpOverloadPacket

from hf_retarget.errors import RuleError
from hf_retarget.graph.call import Call, Result, Rule, parse

Operator = OpOverload | OpOverloadPacket
"""One overload (`aten.linear.default`), or a packet (`aten.linear`) for all of its overloads."""

_rules: dict[str, Rule] = {}


@overload
def rule(operator: Operator, signature: str, /, **sizes: Callable[[Call], int]) -> None: ...
@overload
def rule(*operators: Operator) -> Callable[[Rule], Rule]: ...
def rule(*arguments: Operator | str, **sizes: Callable[[Call], int]) -> Callable[[Rule], Rule] | None:
    """Register how an operator relates axes: a row with a signature, or a decorated function.

    In a row, `sizes` give the sizes of names that cannot be inferred from the operands.
    """
    *operators, last = arguments
    if isinstance(last, str):
        text = last
        parse(text)  # a malformed row fails at import, not in a trace
        _register(operators, lambda call: call.relate(text, None, **{name: size(call) for name, size in sizes.items()}))
        return None
    return lambda function: _register([*operators, last], function)


def _register(operators: list[Operator | str], function: Rule) -> Rule:
    for operator in operators:
        name = str(operator)
        if name in _rules:
            raise RuleError(f"'{name}' already has a rule")
        _rules[name] = function
    return function


def registered() -> list[str]:
    """The names of all operators that have a rule."""
    return sorted(_rules)


def lookup(operator: object) -> Rule | None:
    """The rule of an operator: its own, its packet's, or the pointwise one if torch tags it so."""
    if not isinstance(operator, OpOverload):
        return None
    packet = str(operator.overloadpacket)
    tagged = pointwise if torch.Tag.pointwise in operator.tags else None
    return _rules.get(str(operator)) or _rules.get(packet) or tagged


def pointwise(call: Call) -> Result:
    """All tensor arguments share their axes, aligned on the right."""
    return call.broadcast(call.shapes)
