"""The line through two sets of weights and the plane through three: where points lie, and what weights they have."""

from hf_retarget.landscape.basis import Basis, mix, span
from hf_retarget.landscape.grid import Grid, Point, lay_grid

__all__ = ["Basis", "Grid", "Point", "lay_grid", "mix", "span"]
