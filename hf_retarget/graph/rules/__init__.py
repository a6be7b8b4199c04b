"""The rules, one file for each family of operators; importing this package registers them all."""

from hf_retarget.graph.rules import layers, pointwise, reduce, shape, spatial
from hf_retarget.graph.rules.registry import lookup, registered, rule

__all__ = ["layers", "lookup", "pointwise", "reduce", "registered", "rule", "shape", "spatial"]
