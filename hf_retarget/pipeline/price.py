"""What a port and what it is compared with cost, in gradients of a minibatch: the one place that counts them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_retarget.recipe import Recipe

_SIDES = {"fgmt": 2, "fgmt-sign": 2, "gmt": 2, "permuted-source": 2, "naive-sign": 1}
"""On how many sides a method takes gradients; the others take none."""
MASKED = ("fgmt-sign", "naive-sign")
"""Methods that mask their steps, and are compared with the mask alone."""


@dataclass(frozen=True)
class Price:
    """Minibatches are those of the port (`port.batch_size`)."""

    gradients: int
    """Of the port itself, on both sides together."""
    after: int
    """Minibatches of the fine-tuning after the port."""
    masked: int
    """Gradients of the port with the mask alone, which a masked port is compared with."""
    control: int
    """Steps of plain fine-tuning on as many images as the port and the fine-tuning after it see."""
    courses: int
    """Courses of steps that are scored on validation images: the port, and what makes steps beside it."""

    @property
    def total(self) -> int:
        """All minibatches that go forward and backward."""
        return self.gradients + self.after + self.masked + self.control


def count_gradients(method: str, steps: int, batches: int) -> int:
    """How many gradients of a minibatch a method takes, on all sides together.

    Example:
        >>> count_gradients("fgmt", 10, 5), count_gradients("gmt", 10, 5), count_gradients("naive", 10, 5)
        (100, 550, 0)
    """
    each = steps * (steps + 1) // 2 if method == "gmt" else steps
    return _SIDES.get(method, 0) * each * batches


def price_port(
    recipe: Recipe, train_images: int, *, steps: int | None = None, given: bool = False, oracle: bool = False
) -> Price:
    """The price of a port by a recipe on so many training images.

    `steps` are those that were made, if not all of the recipe's; with a `given` permutation there is nothing to match;
    with the real fine-tuning at hand, the `oracle` makes its steps, too.

    Example:
        >>> price_port(Recipe(), 1000)
        Price(gradients=100, after=0, masked=50, control=100, courses=3)
    """
    options, tuning = recipe.port, recipe.finetune
    made = options.steps if steps is None else steps
    gradients = 0 if given else count_gradients(options.method, made, options.grad_batches)
    after = -(-tuning.total_steps(train_images) * tuning.batch_size // options.batch_size)
    compared = options.control != "none"
    masks = compared and not given and options.method in MASKED
    beside = [
        compared and (given or options.method != "naive"),
        masks and options.method != "naive-sign",
        compared and oracle and options.method != "oracle",
    ]
    return Price(
        gradients=gradients,
        after=after,
        masked=count_gradients("naive-sign", options.steps, options.grad_batches) if beside[1] else 0,
        control=gradients + after if options.control == "full" else 0,
        courses=1 + sum(beside),
    )
