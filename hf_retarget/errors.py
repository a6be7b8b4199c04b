"""Everything that can go wrong for a reason the user can act on.

    RetargetError
    ├── ModelError            a model reference that cannot be resolved or built, or models that do not fit together
    │   └── AdapterError          an adapter where a whole model is needed
    ├── DataError             images or labels that cannot be read, or do not fit the model
    ├── RecipeError           a recipe with an unknown field or a value that cannot be
    ├── PortError             a port that cannot start, go on or be saved
    │   ├── FinishedError         there is nothing to resume: the run is finished
    │   └── NotFiniteError        a weight, a statistic, a gradient or an answer is NaN or infinite
    ├── LockedError           another run is working on the same folder
    ├── PublishError          a model that cannot be pushed to the Hub, or did not arrive there as it is here
    ├── TraceError            a model that cannot be exported, or an example that does not fit it
    ├── RuleError             an operator rule that is malformed, or registered twice
    ├── MatchError            gradients, trajectories or options that cannot be matched
    └── PermutationError      a permutation, graph or tensor that do not belong together
        ├── GraphMismatchError    the fingerprints differ
        └── TensorMismatchError   a tensor has an unknown name or the wrong shape

A message says what happened, where, and what to do next. Inner code raises the fact, the layer above
adds the place, and the command line alone prints.
"""

from __future__ import annotations

from typing import Any


class RetargetError(Exception):
    """The root of all errors this package raises on purpose.

    Example:
        >>> try:
        ...     raise TraceError("the model has no parameters")
        ... except RetargetError as error:
        ...     print(error)
        the model has no parameters
    """


class ModelError(RetargetError):
    """A model reference could not be resolved or built, or models do not fit together."""


class AdapterError(ModelError):
    """An adapter was found where a whole model is needed."""

    def __init__(self, message: str, adapter: Any = None) -> None:
        super().__init__(message)
        self.adapter = adapter
        """The adapter, for those who can read one."""


class DataError(RetargetError):
    """Images or labels cannot be read, or do not fit the model."""


class RecipeError(RetargetError):
    """A recipe has an unknown field or a value that cannot be."""


class PortError(RetargetError):
    """A port cannot start, go on or be saved."""


class FinishedError(PortError):
    """A run that was to be resumed is finished already."""


class NotFiniteError(PortError):
    """A weight, a statistic, a gradient or an answer of a model is NaN or infinite."""


class LockedError(RetargetError):
    """Another run is working on the same folder."""


class PublishError(RetargetError):
    """A model cannot be pushed to the Hub, or did not arrive there as it is here."""


class TraceError(RetargetError):
    """A model could not be exported, or the example input does not fit it."""


class RuleError(RetargetError):
    """An operator rule is malformed or registered twice."""


class MatchError(RetargetError):
    """Gradients, a trajectory or options that cannot be matched."""


class PermutationError(RetargetError):
    """A permutation, a graph or a tensor do not belong together."""


class GraphMismatchError(PermutationError):
    """A permutation was made for another graph."""


class TensorMismatchError(PermutationError):
    """A tensor is unknown to the graph or has the wrong shape."""
