"""What a port would do, and what it would cost: sizes, groups, memory, gradients, time. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_retarget.matching.objective import Compression
from hf_retarget.pipeline.clock import peak_memory
from hf_retarget.pipeline.drawn import Drawn
from hf_retarget.pipeline.inputs import Inputs, Reference
from hf_retarget.pipeline.pose import IMAGES, StepGradients
from hf_retarget.pipeline.prepare import Prepared, prepare
from hf_retarget.pipeline.price import Price, count_gradients, price_port
from hf_retarget.pipeline.start import doing
from hf_retarget.recipe import PortOptions

FORMAT = "hf-retarget/plan/1"

_FORWARD = 1 / 3
"""What a forward pass costs, in gradients of as many images."""


@dataclass(frozen=True)
class Plan:
    """What a port would do."""

    architecture: str
    parameters: int
    classes: int
    head: str
    why: str
    groups: int
    held: tuple[str, ...]
    data: str
    images: Mapping[str, int]
    method: str
    steps: int
    gradients: int
    """Gradients of a minibatch, on both sides together."""
    control_steps: int
    finetune_steps: int
    compressed: bool
    memory: int
    """Bytes that the process will need at most: what one minibatch needed, and what the steps add to that."""
    seconds: float
    """Estimated from the gradient of one minibatch, without the search for permutations."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"format": FORMAT, **vars(self), "held": list(self.held), "notes": list(self.notes)}


def plan(src_base: Reference, src_ft: Reference, new_base: Reference, data: Any = None, **options: Any) -> Plan:
    """Load and check everything as a port would, time one minibatch, and stop; the arguments are those of `port`."""
    prepared = prepare(src_base, src_ft, new_base, data, **options)
    recipe, inputs, derived, task = prepared.recipe, prepared.inputs, prepared.derived, prepared.task
    with doing(prepared.judge.progress, "timing one minibatch"):
        each = _time_minibatch(prepared)
    method = "naive" if task.permutation else task.method
    price = price_port(
        recipe,
        len(inputs.data.train),
        steps=task.steps,
        given=task.permutation is not None,
        oracle=inputs.tuned_target is not None,
    )
    return Plan(
        architecture=inputs.target.architecture,
        parameters=_size(inputs),
        classes=inputs.classes,
        head=inputs.heads.policy,
        why=inputs.heads.why,
        groups=len(derived.graph.groups),
        held=derived.held,
        data=inputs.data.name,
        images={name: len(getattr(inputs.data, name)) for name in ("train", "validation", "test")},
        method=method,
        steps=task.steps,
        gradients=price.gradients,
        control_steps=price.control,
        finetune_steps=recipe.finetune.total_steps(len(inputs.data.train)),
        compressed=task.problem.options.compression is not None,
        memory=_memory(prepared),
        seconds=each * (price.total + _FORWARD * _forwards(inputs, recipe.port, task.steps, price)),
        notes=(*inputs.comparison.notes, *inputs.data.notes),
    )


def _size(inputs: Inputs) -> int:
    return sum(inputs.heads.target[name].numel() for name in inputs.names)


def _time_minibatch(prepared: Prepared) -> float:
    judge, port = prepared.judge, replace(prepared.recipe.port, grad_batches=1)
    gradient = StepGradients(prepared.inputs, port, judge.accelerator, judge.workers)
    began = time.perf_counter()
    gradient(prepared.task.problem.target, 1)
    return time.perf_counter() - began


def _forwards(inputs: Inputs, options: PortOptions, steps: int, price: Price) -> float:
    """Forward passes of a minibatch: for BatchNorm and validation at each step, and for the tests at the end."""
    data = inputs.data
    per_step = options.bn_batches + len(data.validation) / options.batch_size
    levels = {"none": 0, "naive": 2, "full": 3}[options.control]  # the bases as they are, and the control
    tests = price.courses + levels + bool(price.after) + (inputs.tuned_target is not None)
    return price.courses * steps * per_step + tests * len(data.test) / options.batch_size


def _memory(prepared: Prepared) -> int:
    """The peak so far, with everything loaded and the gradient of a minibatch taken, and what comes on top of it."""
    task, port = prepared.task, prepared.recipe.port
    method = "naive" if task.permutation else task.method
    drawn = Drawn(prepared.inputs.preprocess.input_size, room=IMAGES)
    images = drawn.size(port.grad_batches * port.batch_size)
    others = images - drawn.size(port.batch_size) if images <= drawn.room and count_gradients(method, 1, 1) else 0
    growth = estimate_growth(_size(prepared.inputs), task.steps, method, task.problem.options.compression)
    return (peak_memory() or 0) + others + growth


def estimate_growth(parameters: int, steps: int, method: str, compression: Compression | None) -> int:
    """Bytes that a port takes once everything is loaded and one gradient was taken.

    That is the source's gradient, the ported weights, the best step and its model; in a search the stacks, and as much
    again while they are compressed or permuted.

    Example:
        >>> estimate_growth(1_000_000, 10, "naive", None), estimate_growth(1_000_000, 10, "fgmt", None)
        (16000000, 176000000)
    """
    size = 4 * parameters
    stacks = 2 * (compression.sizes if compression else steps) * size
    searching = count_gradients(method, 1, 1) > 0
    return int(4 * size + (2 * stacks if searching else 0))
