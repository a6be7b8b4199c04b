"""What a port and its contenders cost: the one place that counts gradients, and estimates of memory and time."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from hf_retarget.contenders import AFTER, PORT, Asked, choose_contenders, find_contender
from hf_retarget.matching.objective import Compression
from hf_retarget.porting.inputs import Given, choose_compression
from hf_retarget.recipe import Recipe
from hf_retarget.run import Run

_SIZE = 1024
"""Rows of the matrices whose product shows how fast this machine is."""

_LOADED = 7
"""Three checkpoints, the model, a gradient and its sums in float64, in sizes of the model: what there is before a port
begins to grow."""

_GRADIENT = 3
"""What a gradient costs, in forward passes."""


@dataclass(frozen=True)
class Price:
    """In minibatches of the port (`port.batch_size`)."""

    gradients: int
    """Of the port itself, on both sides together."""
    after: int
    """Of the fine-tuning after the port."""
    beside: int
    """Gradients of the contenders that are compared with the port, without the alternative."""
    alternative: int
    """Steps of plain fine-tuning on as many images as the port and the fine-tuning after it see."""
    courses: int
    """Contenders that take steps, each scored on validation images at every step."""
    models: int
    """Contenders in all, each scored on the test images."""

    @property
    def total(self) -> int:
        """All minibatches that go forward and backward."""
        return self.gradients + self.after + self.beside + self.alternative


def price_port(recipe: Recipe, train_images: int, *, steps: int | None = None, asked: Asked | None = None) -> Price:
    """The price of a port by a recipe on this many training images.

    `steps` are those that were made, if not all of the recipe's; `asked` says which contenders enter.

    Example:
        >>> price_port(Recipe(), 1000)
        Price(gradients=100, after=0, beside=50, alternative=100, courses=3, models=6)
    """
    asked = asked or Given().asked(recipe)
    options, tuning = recipe.port, recipe.finetune
    entering = choose_contenders(asked)
    made = options.steps if steps is None else steps
    gradients = find_contender(asked.method).gradients(made) * options.grad_batches
    after = -(-tuning.total_steps(train_images) * tuning.batch_size // options.batch_size)
    beside = [each for each, role in entering if role not in (PORT, AFTER)]
    instead = any(each.is_alternative for each in beside)
    return Price(
        gradients=gradients,
        after=after,
        beside=sum(each.gradients(options.steps) for each in beside) * options.grad_batches,
        alternative=gradients + after if instead else 0,
        courses=1 + sum(each.is_method for each in beside),
        models=len(entering) - bool(instead and not gradients + after),
    )


@dataclass(frozen=True)
class Cost:
    """What a port takes, as far as shapes show."""

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
    """For all gradients at that speed, which networks reach only in part: a lower bound."""


def estimate_cost(
    model: nn.Module, input_size: tuple[int, int, int], recipe: Recipe, run: Run, train_images: int | None = None
) -> Cost:
    """Count what a port by this recipe would compute. The model needs no weights.

    Fine-tuning in epochs is counted if the number of training images is known.

    Example:
        >>> from hf_retarget.models import empty_model
        >>> estimate_cost(empty_model("test_resnet"), (3, 32, 32), Recipe(), Run()).gradients
        100
    """
    options = recipe.port
    parameters = sum(each.numel() for each in model.parameters())
    price = price_port(recipe, train_images or 0)
    compression = choose_compression(options, options.steps, parameters)
    searches = find_contender(options.method).gradients(1) > 0
    memory = _LOADED * 4 * parameters + estimate_growth(parameters, options.steps, compression, searches=searches)
    flops = count_flops(model, input_size)
    speed = seconds = None
    if flops is not None:
        speed = measure_speed(run.accelerator.device)
        seconds = price.total * options.batch_size * _GRADIENT * flops / speed
    room = options.batch_size * prod(input_size) * 4
    return Cost(price.gradients, price.alternative, options.batch_size, memory, room, flops, speed, seconds)


def estimate_growth(parameters: int, steps: int, compression: Compression | None, *, searches: bool) -> int:
    """Bytes that a port takes once everything is loaded and one gradient was taken.

    That is the source's gradient, the ported weights, the best step and its model; in a search the stacks, and as much
    again while they are compressed or permuted.

    Example:
        >>> [estimate_growth(1_000_000, 10, None, searches=each) for each in (False, True)]
        [16000000, 176000000]
    """
    size = 4 * parameters
    stacks = 2 * (compression.sizes if compression else steps) * size
    return int(4 * size + (2 * stacks if searches else 0))


def count_flops(model: nn.Module, input_size: tuple[int, int, int]) -> int | None:
    """Floating-point operations for one image, counted on meta tensors; None if the model needs real numbers.

    Example:
        >>> count_flops(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2))
        120
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        twin = copy.deepcopy(model).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            twin(torch.zeros(1, *input_size, device="meta"))
    except Exception:  # whatever the model's own code raises when it meets meta tensors
        return None
    return int(counter.get_total_flops())


def measure_speed(device: torch.device) -> float:
    """Floating-point operations a second: the best of a few products of matrices."""
    left = torch.ones(_SIZE, _SIZE, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float((left @ left)[0, 0])  # asking for a number waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best
