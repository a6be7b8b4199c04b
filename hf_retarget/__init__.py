"""hf-retarget: move a fine-tuning to a new base model.

import hf_retarget as rt

graph = rt.trace(model)             # which axes may be permuted together
rt.verify(model, graph).verdict      # ... and the proof that the function stays the same
rt.match(graph, target, source)     # the permutation that best maps one set of weights onto another

rt.port("old/", "tuned/", "new/", data="cub").save("ported/")      # all of it
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hf_retarget.errors import (
    DataError,
    FinishedError,
    GraphMismatchError,
    LockedError,
    MatchError,
    ModelError,
    NotFiniteError,
    PermutationError,
    PortError,
    PublishError,
    RecipeError,
    RetargetError,
    RuleError,
    TensorMismatchError,
    TraceError,
)

if TYPE_CHECKING:
    from hf_retarget.comparison import PortComparison, compare_ports
    from hf_retarget.graph import Axis, Group, Permutation, PermutationGraph, PinnedAxis, UnknownOperator
    from hf_retarget.graph.trace import trace
    from hf_retarget.graph.verify import NegativeControl, Verification, verify
    from hf_retarget.matching.descent import Match
    from hf_retarget.matching.methods import match
    from hf_retarget.pipeline.check import InputCheck, check
    from hf_retarget.pipeline.jobs import PortJob
    from hf_retarget.pipeline.plane import plane
    from hf_retarget.pipeline.plane_result import PlaneResult
    from hf_retarget.pipeline.port import port
    from hf_retarget.pipeline.port_all import PortedAll, port_all
    from hf_retarget.pipeline.result import PortResult
    from hf_retarget.recipe import Recipe, load_recipe
    from hf_retarget.training.recorder import TrajectoryRecorder

# What needs torch is imported when it is first used: `hf-retarget --help` should not wait for it.
_LAZY = {
    **dict.fromkeys(("NegativeControl", "Verification", "verify"), "hf_retarget.graph.verify"),
    **dict.fromkeys(
        ("Axis", "Group", "Permutation", "PermutationGraph", "PinnedAxis", "UnknownOperator"), "hf_retarget.graph"
    ),
    **dict.fromkeys(("InputCheck", "check"), "hf_retarget.pipeline.check"),
    **dict.fromkeys(("PortComparison", "compare_ports"), "hf_retarget.comparison.groups"),
    "Match": "hf_retarget.matching.descent",
    "PlaneResult": "hf_retarget.pipeline.plane_result",
    "PortJob": "hf_retarget.pipeline.jobs",
    "PortResult": "hf_retarget.pipeline.result",
    **dict.fromkeys(("PortedAll", "port_all"), "hf_retarget.pipeline.port_all"),
    "TrajectoryRecorder": "hf_retarget.training.recorder",
    **dict.fromkeys(("Recipe", "load_recipe"), "hf_retarget.recipe"),
    "match": "hf_retarget.matching.methods",
    "plane": "hf_retarget.pipeline.plane",
    "port": "hf_retarget.pipeline.port",
    "trace": "hf_retarget.graph.trace",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_retarget' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


__version__ = "0.1.0"

__all__ = [
    "Axis",
    "DataError",
    "FinishedError",
    "GraphMismatchError",
    "Group",
    "InputCheck",
    "LockedError",
    "Match",
    "MatchError",
    "ModelError",
    "NegativeControl",
    "NotFiniteError",
    "Permutation",
    "PermutationError",
    "PermutationGraph",
    "PinnedAxis",
    "PlaneResult",
    "PortComparison",
    "PortError",
    "PortJob",
    "PortResult",
    "PortedAll",
    "PublishError",
    "Recipe",
    "RecipeError",
    "RetargetError",
    "RuleError",
    "TensorMismatchError",
    "TraceError",
    "TrajectoryRecorder",
    "UnknownOperator",
    "Verification",
    "check",
    "compare_ports",
    "load_recipe",
    "match",
    "plane",
    "port",
    "port_all",
    "trace",
    "verify",
]
