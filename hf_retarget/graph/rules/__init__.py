"""The rules, one file for each family of operators; importing this package registers them all."""

from hf_retarget.graph.rules import attention, index, layers, pointwise, recurrent, reduce, shape, spatial
from hf_retarget.graph.rules.registry import lookup, registered, rule

__all__ = [
    "attention",
    "index",
    "layers",
    "lookup",
    "pointwise",
    "recurrent",
    "reduce",
    "registered",
    "rule",
    "shape",
    "spatial",
]
