"""The exceptions of this package, for everything the user can act on.

    RetargetError
    ├── ModelError
    │   └── AdapterError
    ├── DataError
    ├── RecipeError
    ├── PortError
    │   ├── FinishedError
    │   └── NotFiniteError
    ├── LockedError
    ├── PublishError
    ├── TraceError
    ├── RuleError
    ├── MatchError
    └── PermutationError
        ├── GraphMismatchError
        └── TensorMismatchError

A message says what happened, where, and what to do next. Inner code states the fact, the layer above adds the place,
and only the command line prints.
"""

from __future__ import annotations

from typing import Any


class RetargetError(Exception):
    """The base class of all errors that this package raises on purpose.

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
        """The adapter, for callers that can use one."""


class DataError(RetargetError):
    """Images or labels cannot be read, or do not fit the model."""


class RecipeError(RetargetError):
    """A recipe has an unknown field or an invalid value."""


class PortError(RetargetError):
    """A port cannot start, continue or be saved."""


class FinishedError(PortError):
    """There is nothing to resume: the run is finished."""


class NotFiniteError(PortError):
    """A weight, a statistic, a gradient or an output of a model is NaN or infinite."""


class LockedError(RetargetError):
    """Another run is working on the same folder."""


class PublishError(RetargetError):
    """A model cannot be pushed to the Hub, or the pushed files differ from the local ones."""


class TraceError(RetargetError):
    """A model could not be exported, or the example input does not fit it."""


class RuleError(RetargetError):
    """An operator rule is malformed, or registered more than once."""


class MatchError(RetargetError):
    """Gradients, a trajectory or options cannot be used for matching."""


class PermutationError(RetargetError):
    """A permutation, a graph and a tensor do not belong together."""


class GraphMismatchError(PermutationError):
    """A permutation was made for another graph."""


class TensorMismatchError(PermutationError):
    """A tensor is unknown to the graph or has the wrong shape."""
