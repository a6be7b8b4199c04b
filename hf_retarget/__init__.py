"""hf-retarget: move a fine-tuning to a new base model.

import hf_retarget as rt

graph = rt.trace(model)             # which axes may be permuted together
rt.verify(model, graph).verdict      # ... and the proof that the function stays the same
rt.match(graph, target, source)     # the permutation that best maps one set of weights onto another

rt.port("old/", "tuned/", "new/", data="cub").save("ported/")      # all of it
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_retarget.comparison import PortComparison as PortComparison
    from hf_retarget.comparison import compare as compare
    from hf_retarget.document import PortDocument as PortDocument
    from hf_retarget.errors import *  # noqa: F403  all of them, and nothing else
    from hf_retarget.evaluation.evaluate import Evaluation as Evaluation
    from hf_retarget.evaluation.evaluate import evaluate as evaluate
    from hf_retarget.graph import Axis as Axis
    from hf_retarget.graph import Group as Group
    from hf_retarget.graph import Permutation as Permutation
    from hf_retarget.graph import PermutationGraph as PermutationGraph
    from hf_retarget.graph import PinnedAxis as PinnedAxis
    from hf_retarget.graph import UnknownOperator as UnknownOperator
    from hf_retarget.graph.trace import trace as trace
    from hf_retarget.graph.verify import NegativeControl as NegativeControl
    from hf_retarget.graph.verify import Verification as Verification
    from hf_retarget.graph.verify import verify as verify
    from hf_retarget.landscape.plane import plane as plane
    from hf_retarget.landscape.result import PlaneResult as PlaneResult
    from hf_retarget.matching.descent import Match as Match
    from hf_retarget.matching.methods import match as match
    from hf_retarget.models.reference import convert as convert
    from hf_retarget.porting.check import InputCheck as InputCheck
    from hf_retarget.porting.check import check as check
    from hf_retarget.porting.finetune import FinetuneResult as FinetuneResult
    from hf_retarget.porting.finetune import finetune as finetune
    from hf_retarget.porting.port import port as port
    from hf_retarget.porting.port_all import PortedAll as PortedAll
    from hf_retarget.porting.port_all import PortJob as PortJob
    from hf_retarget.porting.port_all import Shard as Shard
    from hf_retarget.porting.port_all import collect_ports as collect_ports
    from hf_retarget.porting.port_all import port_all as port_all
    from hf_retarget.porting.result import PortResult as PortResult
    from hf_retarget.porting.streamed import StreamedPort as StreamedPort
    from hf_retarget.provenance import PortCheck as PortCheck
    from hf_retarget.provenance import check_port as check_port
    from hf_retarget.recipe import Recipe as Recipe
    from hf_retarget.recipe import load_recipe as load_recipe
    from hf_retarget.successors import OutdatedModels as OutdatedModels
    from hf_retarget.successors import outdated as outdated
    from hf_retarget.training import TrajectoryRecorder as TrajectoryRecorder

# What needs torch is imported when it is first used: `hf-retarget --help` should not wait for it.
_MODULES = {
    "comparison": "PortComparison compare",
    "document": "PortDocument",
    "errors": """AdapterError DataError FinishedError GraphMismatchError LockedError MatchError ModelError
        NotFiniteError PermutationError PortError PublishError RecipeError RetargetError RuleError TensorMismatchError
        TraceError""",
    "evaluation.evaluate": "Evaluation evaluate",
    "graph": "Axis Group Permutation PermutationGraph PinnedAxis UnknownOperator",
    "graph.trace": "trace",
    "graph.verify": "NegativeControl Verification verify",
    "landscape.plane": "plane",
    "landscape.result": "PlaneResult",
    "matching.descent": "Match",
    "matching.methods": "match",
    "models.reference": "convert",
    "porting.check": "InputCheck check",
    "porting.finetune": "FinetuneResult finetune",
    "porting.port": "port",
    "porting.port_all": "PortJob PortedAll Shard collect_ports port_all",
    "porting.result": "PortResult",
    "porting.streamed": "StreamedPort",
    "provenance": "PortCheck check_port",
    "recipe": "Recipe load_recipe",
    "successors": "OutdatedModels outdated",
    "training": "TrajectoryRecorder",
}
_LAZY = {name: f"hf_retarget.{module}" for module, names in _MODULES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted(_LAZY, key=lambda name: (not name[0].isupper(), name))  # noqa: PLE0605  a list, as it should be


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_retarget' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
