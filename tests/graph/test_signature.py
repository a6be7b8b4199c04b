"""Signatures: parsing, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from hf_retarget.errors import RuleError
from hf_retarget.graph.call import Signature, TensorPattern, parse, pinned


def tensor(*head: tuple[str, ...], tail: tuple[tuple[str, ...], ...] = (), ellipsis: bool = False) -> TensorPattern:
    return TensorPattern(tuple(head), tuple(tail), ellipsis)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n k, k m -> n m", Signature((tensor(("n",), ("k",)), tensor(("k",), ("m",))), (tensor(("n",), ("m",)),))),
        ("k, k ->", Signature((tensor(("k",)), tensor(("k",))), (tensor(),))),
        (
            "... i, o i -> ... o",
            Signature(
                (tensor(tail=(("i",),), ellipsis=True), tensor(("o",), ("i",))),
                (tensor(tail=(("o",),), ellipsis=True),),
            ),
        ),
        ("n c ... -> n c ...", Signature(*[(tensor(("n",), ("c",), ellipsis=True),)] * 2)),
        ("(g i) H -> (g i) Y", Signature((tensor(("g", "i"), ("H",)),), (tensor(("g", "i"), ("Y",)),))),
        ("..., 1 -> ...", Signature((tensor(ellipsis=True), tensor(())), (tensor(ellipsis=True),))),
        ("x1 x2 -> x2, x1", Signature((tensor(("x1",), ("x2",)),), (tensor(("x2",)), tensor(("x1",))))),
    ],
)
def test_parse(text, expected):
    assert parse(text) == expected


def test_spaces_do_not_matter():
    assert parse("(g i)   H,o->o") == parse("( g  i ) H , o -> o")


def test_signatures_are_cached():
    assert parse("a b -> b a") is parse("a b -> b a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n k, k m", "has no '->'"),
        ("n k -> n m", "output axis 'm' is not an axis of any input"),
        ("n -> (n m)", "output axis 'm' is not an axis of any input"),
        ("... n ... -> n", "only one '...' for each operand"),
        ("(... n) -> n", "only one '...' for each operand, outside parentheses"),
        ("((g i) o) -> g", "parentheses do not nest"),
        ("(g i -> g", r"'\(' without '\)'"),
        ("g i) -> g", r"'\)' without '\('"),
        ("n + k -> n", r"unexpected '\+'"),
        ("n .. -> n", r"unexpected '\.'"),
        ("2 n -> n", "unexpected '2'"),
    ],
)
def test_invalid_input_is_refused(text, message):
    with pytest.raises(RuleError, match=message) as error:
        parse(text)
    assert repr(text) in str(error.value), "the message quotes the signature"


def test_a_pinned_output_axis_needs_no_input():
    assert parse("n H -> n Y").outputs == (tensor(("n",), ("Y",)),)


@pytest.mark.parametrize(("name", "expected"), [("H", True), ("K1", True), ("h", False), ("x72", False)])
def test_upper_case_is_pinned(name, expected):
    assert pinned(name) is expected
