"""What tensors tell without their numbers: shapes that fit, and the type most of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor


def fits(tensor: Tensor, place: Tensor | None) -> bool:
    """Whether a tensor has the shape of the place it is meant for.

    Example:
        >>> fits(torch.zeros(2), torch.zeros(3)), fits(torch.zeros(2), None)
        (False, False)
    """
    return place is not None and place.shape == tensor.shape


def most_common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that most of the floating-point numbers have.

    Example:
        >>> most_common_dtype({"w": torch.zeros(9, dtype=torch.float16), "b": torch.zeros(3)})
        torch.float16
    """
    numbers: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] += tensor.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


def find_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is NaN, infinite or complex; None if there is none.

    Example:
        >>> find_not_finite({"w": torch.tensor([1.0]), "b": torch.tensor([float("nan")])})
        'b'
    """
    return next((name for name, tensor in weights.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # 8-bit floats have no `isfinite`
        tensor = tensor.float()
    return bool(tensor.isfinite().all())


def without_numbers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same names, shapes and types on the meta device, where they take no memory.

    Example:
        >>> without_numbers({"w": torch.zeros(2)})["w"].is_meta
        True
    """
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
