"""Permutation graphs: which axes of a model may be permuted together without changing its function."""

from hf_retarget.graph.permutation import Axis, Block, Factor, Layout, Permutation
from hf_retarget.graph.permutation_graph import (
    Group,
    PermutationGraph,
    PinnedAxis,
    UnknownOperator,
    load_permutation,
    pin_tables,
)
from hf_retarget.graph.verify import load_graph
