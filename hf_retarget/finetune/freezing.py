"""Which parts of a model stay as they are while the rest is fine-tuned."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from hf_retarget.errors import RecipeError


def frozen_parts(model: nn.Module, freeze: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """The parameters and modules under the given names; `blocks.1` is not the beginning of `blocks.10`.

    The modules are there so that their BatchNorm statistics and dropout can be kept still, too.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> [len(part) for part in frozen_parts(model, ["0"])]
        [2, 1]
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for prefix in freeze:
        if not any(_is_under(name, [prefix]) for name in parameters):
            known = sorted({*modules, *parameters} - {""})
            near = difflib.get_close_matches(prefix, known, n=3) or known[:3]
            raise RecipeError(f"freeze: the model has no parameter under '{prefix}'; there are {', '.join(near)}, …")
    frozen = [parameter for name, parameter in parameters.items() if _is_under(name, freeze)]
    if not any(parameter.requires_grad for name, parameter in parameters.items() if not _is_under(name, freeze)):
        raise RecipeError(f"no parameter is left to train (freeze: {', '.join(freeze) or 'nothing'}); freeze fewer")
    return frozen, [module for name, module in modules.items() if _is_under(name, freeze)]


def _is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
