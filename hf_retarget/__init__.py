"""hf-retarget: move a fine-tuning to a new base model.

    import hf_retarget as rt

    graph = rt.trace(model)             # which axes may be permuted together
    rt.check(model, graph).verdict      # ... and the proof that the function stays the same
"""

from hf_retarget.errors import (
    GraphMismatchError,
    ModelError,
    PermutationError,
    RetargetError,
    RuleError,
    TensorMismatchError,
    TraceError,
)
from hf_retarget.graph import Axis, Group, Permutation, PermutationGraph, PinnedAxis, UnknownOperator
from hf_retarget.graph.check import CheckResult, Control, check
from hf_retarget.graph.trace import trace

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "CheckResult",
    "Control",
    "Group",
    "GraphMismatchError",
    "ModelError",
    "Permutation",
    "PermutationError",
    "PermutationGraph",
    "PinnedAxis",
    "RetargetError",
    "RuleError",
    "TensorMismatchError",
    "TraceError",
    "UnknownOperator",
    "check",
    "trace",
]
