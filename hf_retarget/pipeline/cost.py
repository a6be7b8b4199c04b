"""What a port would cost, from the shapes of a model: gradients, memory, and time at the least."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from hf_retarget.devices import choose_device
from hf_retarget.pipeline.plan import estimate_growth
from hf_retarget.pipeline.pose import choose_compression
from hf_retarget.pipeline.price import price_port
from hf_retarget.recipe import Recipe

_SIZE = 1024
"""Rows of the matrices whose product tells how fast this machine is."""

_LOADED = 7
"""Three checkpoints, the model, a gradient and its sums in float64, in sizes of the model: what there is before a port
begins to grow."""

_GRADIENT = 3
"""What a gradient costs, in forward passes."""


@dataclass(frozen=True)
class Cost:
    """What a port takes, as far as shapes tell."""

    gradients: int
    """Gradients of a minibatch, on both sides together."""
    control: int
    """Steps of the plain fine-tuning that the port is compared with."""
    batch_size: int
    memory: int
    """Bytes for weights, gradients and stacks; libraries and what goes through the model at once come on top."""
    input: int
    """Bytes of a minibatch of images."""
    flops: int | None
    """Of one image through the model; None if they could not be counted."""
    speed: float | None
    """Floating-point operations a second, of a product of two matrices on this machine."""
    seconds: float | None
    """For all gradients at that speed, which networks reach only in part: at the least, so to speak."""


def estimate_cost(
    model: nn.Module,
    input_size: tuple[int, int, int],
    recipe: Recipe,
    device: str | None = None,
    train_images: int | None = None,
) -> Cost:
    """Count what a port by this recipe would compute. The model needs no weights.

    Fine-tuning in epochs is counted if the number of training images is known.

    Example:
        >>> from hf_retarget.models import empty_model
        >>> estimate_cost(empty_model("test_resnet"), (3, 32, 32), Recipe()).gradients
        100
    """
    options = recipe.port
    parameters = sum(each.numel() for each in model.parameters())
    price = price_port(recipe, train_images or 0)
    compression = choose_compression(options, options.steps, parameters)
    memory = _LOADED * 4 * parameters + estimate_growth(parameters, options.steps, options.method, compression)
    flops = count_flops(model, input_size)
    speed = seconds = None
    if flops is not None:
        speed = measure_speed(choose_device(device).device)
        seconds = price.total * options.batch_size * _GRADIENT * flops / speed
    room = options.batch_size * prod(input_size) * 4
    return Cost(price.gradients, price.control, options.batch_size, memory, room, flops, speed, seconds)


def count_flops(model: nn.Module, input_size: tuple[int, int, int]) -> int | None:
    """Floating-point operations for one image, counted on tensors without numbers; None if the model needs numbers.

    Example:
        >>> count_flops(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2))
        120
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        twin = copy.deepcopy(model).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            twin(torch.zeros(1, *input_size, device="meta"))
    except Exception:  # whatever the model's own code raises when it meets tensors without numbers
        return None
    return int(counter.get_total_flops())


def measure_speed(device: torch.device) -> float:
    """Floating-point operations a second: the best of some products of matrices.

    Example:
        >>> measure_speed(torch.device("cpu")) > 0
        True
    """
    left = torch.ones(_SIZE, _SIZE, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float((left @ left)[0, 0])  # asking for a number waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best
