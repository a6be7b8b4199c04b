"""The price of a port: the one place that counts gradients and forward passes, and estimates memory and time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_retarget.contenders import AFTER, AUTO, FACTORS, PORT, Asked, Contender, Sizes, choose_contenders
from hf_retarget.data import BatchCache
from hf_retarget.document import RelationFacts
from hf_retarget.evaluation.batchnorm import has_batchnorm
from hf_retarget.evaluation.refit import HEAD_IMAGES
from hf_retarget.matching.gradients import Gradients
from hf_retarget.matching.objective import Compression
from hf_retarget.models.relation import INDEPENDENT
from hf_retarget.porting.inputs import STEP_IMAGES, Given, Inputs, choose_compression
from hf_retarget.recipe import PortOptions, Recipe
from hf_retarget.run import Run, peak_memory

_TRIED = (2, 16, 64)
"""Random images on which a gradient is timed: more, while that promises to take little time and memory."""
_SLOW, _LARGE = 6.0, 1e9  # seconds, bytes

_LOADED = 7
"""Memory in use before the first step, in sizes of the model: three checkpoints, the model, a gradient, and its sum in
float64."""

GRADIENT = 3
"""Cost of a gradient, in forward passes."""

FEW = 200
"""Below this number of validation images, `auto` also chooses on training images."""

SEARCH = 5 / 3
"""Maximum cost of choosing start, targets and learning rate of a fine-tuning: five trials of a third of its steps."""


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images, as far as they are known."""

    train: int = 0
    validation: int = 0
    test: int = 0
    has_batchnorm: bool = False

    def sizes(self, recipe: Recipe, steps: int, *, auto: bool) -> Sizes:
        """Numbers of images that a contender forwards, with `auto` or another method."""
        options, chosen_by = recipe.port, self.validation
        head = min(self.train, HEAD_IMAGES) + chosen_by
        if auto and self.validation < FEW and recipe.data.validation_split is None:
            chosen_by = head = min(self.train + self.validation, HEAD_IMAGES)  # fitted and judged on the same images
        reset = options.bn_batches * options.batch_size if self.has_batchnorm else 0
        return Sizes(steps, chosen_by, reset, head, 1 if options.alpha else len(FACTORS))


def count_images(inputs: Inputs) -> ImageCounts:
    """Count the images of a port."""
    data = inputs.data
    return ImageCounts(len(data.train), len(data.validation), len(data.test), has_batchnorm(inputs.model))


@dataclass(frozen=True)
class Price:
    """The price of a port, in minibatches of `port.batch_size`."""

    gradients: int
    """Gradients of all contenders that may win, on both sides; shared steps count once."""
    forwards: float
    """Forward-only minibatches of all contenders that may win; each costs a third of a gradient."""
    after: int
    """Steps of the fine-tuning after the port."""
    beside: float
    """Cost of the contenders compared with the port, without the alternative, in gradients."""
    alternative: int
    """Steps of plain fine-tuning at the price of the port and the fine-tuning after it."""
    test: float
    """Minibatches of test images, forward only."""

    @property
    def total(self) -> float:
        """The total, in gradients of a minibatch."""
        paid = self.gradients + self.beside + (1 + SEARCH) * (self.after + self.alternative)
        return paid + (self.forwards + self.test) / GRADIENT


def price_port(
    recipe: Recipe,
    images: ImageCounts,
    *,
    steps: int | None = None,
    asked: Asked | None = None,
    entered: Sequence[Contender] | None = None,
    answered: int = 0,
) -> Price:
    """Compute the price of a port.

    `steps`: steps taken, if not all of the recipe's. `asked`: decides which contenders enter. `entered`: those that
    entered and may win. `answered`: number of images labelled by the tuned model.

    Example:
        >>> price = price_port(Recipe().override(**{"port.method": "fgmt"}), ImageCounts(1280, 256, 256))
        >>> price.gradients, price.forwards, price.alternative
        (100, 20.0, 107)
    """
    asked = asked or Given().asked(recipe)
    options, tuning = recipe.port, recipe.finetune
    entering = choose_contenders(asked)
    may_win = [each for each, role in entering if role == PORT] if entered is None else list(entered)
    beside = [each for each, role in entering if role not in (PORT, AFTER)]
    made = options.steps if steps is None else steps

    def count(rows: Sequence[Contender], steps: int) -> tuple[int, float]:
        courses = {each.course or each.name: each.gradients(steps) for each in rows if each.gradients(1)}
        passes = sum(each.forwards(images.sizes(recipe, steps, auto=asked.method == AUTO)) for each in rows)
        return sum(courses.values()) * options.grad_batches, passes / options.batch_size

    gradients, forwards = count(may_win, made)
    forwards += answered / options.batch_size
    others, looks = count(beside, options.steps)
    after = -(-tuning.total_steps(images.train) * tuning.batch_size // options.batch_size)
    instead = any(each.is_alternative for each in beside)
    return Price(
        gradients=gradients,
        forwards=forwards,
        after=after,
        beside=others + looks / GRADIENT,
        alternative=math.ceil(gradients + forwards / GRADIENT + after) if instead else 0,
        test=len(entering) * images.test / options.batch_size,
    )


def price_unmatched(recipe: Recipe, images: ImageCounts, relation: RelationFacts | None) -> Price | None:
    """The price if matching turns out to be unnecessary; None if it cannot."""
    asked = Given().asked(recipe)
    if asked.method != AUTO or relation is None or relation.word == INDEPENDENT:
        return None
    free = [each for each, role in choose_contenders(asked) if role == PORT and not each.gradients(1)]
    return price_port(recipe, images, entered=free)


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a port, from a few random images; `port --dry-run` uses a real minibatch."""

    gradients: int
    """Minibatch gradients on both sides."""
    control: int
    """Steps of the plain fine-tuning that the port is compared with."""
    batch_size: int
    memory: int
    """Peak bytes of the process; without activations if the model could not be run."""
    seconds: float | None
    """Upper bound, without the search for permutations and reading images; None if the model could not be run."""
    seconds_unmatched: float | None = None
    """The same if matching turns out to be unnecessary; None if it cannot."""


def estimate_cost(
    model: nn.Module,
    input_size: tuple[int, ...],
    recipe: Recipe,
    run: Run,
    images: ImageCounts | None = None,
    relation: RelationFacts | None = None,
) -> Cost:
    """Estimate an upper bound of memory and time; a model on the meta device is not run.

    Epochs of fine-tuning and forward passes count only if the numbers of images are known.

    Example:
        >>> from hf_retarget.models import empty_model
        >>> estimate_cost(empty_model("test_resnet"), (3, 32, 32), Recipe(), Run()).gradients
        100
    """
    options = recipe.port
    parameters = sum(each.numel() for each in model.parameters())
    images = replace(images or ImageCounts(), has_batchnorm=has_batchnorm(model))
    price, unmatched = price_port(recipe, images), price_unmatched(recipe, images, relation)
    compression = choose_compression(options, options.steps, parameters)
    searches = price.gradients > 0
    memory = (peak_memory() or 0) + _LOADED * 4 * parameters
    memory += estimate_growth(parameters, options.steps, compression, searches=searches)
    memory += BatchCache(input_size).size(options.batch_size)
    memory += estimate_other_images(options, input_size, searches=searches)
    seconds = cheap = None
    if not any(each.is_meta for each in model.parameters()) and (found := _try(model, input_size, run)):
        memory += int(found[1] * min(options.micro_batch or options.batch_size, options.batch_size))
        minibatch = found[0] * options.batch_size
        seconds, cheap = minibatch * price.total, minibatch * unmatched.total if unmatched else None
    return Cost(price.gradients, price.alternative, options.batch_size, memory, seconds, cheap)


def _try(model: nn.Module, input_size: tuple[int, ...], run: Run) -> tuple[float, float] | None:
    """Seconds and bytes per image of a gradient; None if the model fails on random images."""
    weights = dict(model.named_parameters())
    own = {each.untyped_storage().data_ptr() for each in weights.values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    compute = Gradients(model.to(run.accelerator.device), cross_entropy, None, run.accelerator)
    found: tuple[float, float] | None = None
    for images in _TRIED:
        if found and (found[0] * images > _SLOW or found[1] * images > _LARGE):
            break
        kept.clear()
        draw = torch.Generator().manual_seed(0)  # leaves the caller's random state alone
        batch = torch.randn(images, *input_size, generator=draw), torch.zeros(images, dtype=torch.long)
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                compute(weights, [batch])  # also warms up
            began = time.perf_counter()
            compute(weights, [batch])
        except Exception:  # the model's own code may raise anything
            return None
        found = (time.perf_counter() - began) / images, sum(kept.values()) / images
    return found


def estimate_growth(parameters: int, steps: int, compression: Compression | None, *, searches: bool) -> int:
    """Bytes a port needs on top of everything loaded and one gradient.

    These are the source's gradient, the ported weights, the best step and its model; in a search, twice the stacks,
    which are copied while they are compressed or permuted.

    Example:
        >>> [estimate_growth(1_000_000, 10, None, searches=each) for each in (False, True)]
        [16000000, 176000000]
    """
    size = 4 * parameters
    stacks = 2 * (compression.sizes if compression else steps) * size
    return int(4 * size + (2 * stacks if searches else 0))


def estimate_other_images(options: PortOptions, input_size: tuple[int, ...], *, searches: bool) -> int:
    """Bytes of cached images in a step, besides one minibatch."""
    cache = BatchCache(input_size, limit=STEP_IMAGES)
    images = cache.size(options.grad_batches * options.batch_size)
    return images - cache.size(options.batch_size) if images <= cache.limit and searches else 0
