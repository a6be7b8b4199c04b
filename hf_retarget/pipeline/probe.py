"""Cheap signs of whether a port will pay: how far the fine-tuning went, and how alike the two bases are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_retarget.devices import choose_device
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.matching.methods import match
from hf_retarget.models import compare, load_checkpoint
from hf_retarget.pipeline.held import derive_graph
from hf_retarget.pipeline.inputs import Inputs, Reference, gather_inputs
from hf_retarget.pipeline.pose import StepGradients
from hf_retarget.pipeline.start import choose_preprocess, doing
from hf_retarget.progress import Progress
from hf_retarget.recipe import Recipe

Tensors = Mapping[str, Tensor]

_CAVEAT = "These are signs, not a forecast: no threshold has been validated, and only a port beside its control tells."


@dataclass(frozen=True)
class Probe:
    """Signs; cosines are between all parameters but those of the classifier, taken as one long vector."""

    delta: float
    """Norm of the fine-tuning, relative to that of the old base."""
    bases_before: float
    """Cosine between the two bases as they are."""
    bases_after: float
    """The same after the old base was permuted to match the new one by its weights."""
    gradients_before: float | None
    """Cosine between the gradients of both, on one minibatch, under the tuned model's classifier; None without data."""
    gradients_after: float | None

    @property
    def sentence(self) -> str:
        """What the signs say, plainly."""
        far = f"The fine-tuning moved the weights by {self.delta:.1%} of their norm"
        if self.bases_before > 0.9:
            bases = f"the bases are nearly the same weights (cosine {self.bases_before:.2f}), so a naive port may do"
        else:
            gain = self.bases_after - self.bases_before
            words = "brings them closer" if gain > 0.05 else "hardly brings them closer"
            bases = f"matching {words} (cosine of the bases {self.bases_before:.2f}, then {self.bases_after:.2f})"
        said = f"{far}; {bases}"
        if self.gradients_before is not None and self.gradients_after is not None:
            more = self.gradients_after > max(self.gradients_before, 0) + 0.02
            words = "agree more" if more else "do not agree more"
            said += f"; gradients {words} after it ({self.gradients_before:.2f}, then {self.gradients_after:.2f})"
        return f"{said}. {_CAVEAT}"


def probe(
    src_base: Reference,
    src_ft: Reference,
    new_base: Reference,
    data: Any,
    recipe: Recipe,
    loading: dict[str, Any],
    running: dict[str, Any],
) -> Probe:
    """Load the weights and measure; gradients only if there is data."""
    progress: Progress = running["progress"]
    if data is None:
        source, tuned, target = (load_checkpoint(each, **loading) for each in (src_base, src_ft, new_base))
        head = set(compare(source, tuned, target).head)
        model, size = target.build(tuned.num_classes), choose_preprocess(tuned, recipe.data.image_size).input_size
        weights = [each.in_float32() for each in (source, tuned, target)]
    else:
        inputs = gather_inputs(src_base, src_ft, new_base, data, recipe, progress=progress, **loading)
        head, model, size = set(inputs.comparison.head), inputs.model, inputs.preprocess.input_size
        weights = [inputs.heads.source, inputs.tuned.in_float32(), inputs.heads.target]
    names = [name for name, _ in model.named_parameters() if name not in head]
    old, new, other = ({name: side[name] for name in names} for side in weights)
    with doing(progress, "matching the weights"):
        graph = derive_graph(model, size, verify=False).graph
        permutation = match(graph, other, old).permutation
    before = after = None
    if data is not None:
        with doing(progress, "comparing gradients"):
            before, after = _compare_gradients(inputs, names, graph, permutation, recipe, running)
    delta = {name: new[name] - old[name] for name in names}
    return Probe(
        delta=_norm(delta) / max(_norm(old), 1e-30),
        bases_before=_cosine(other, old),
        bases_after=_cosine(other, graph.apply(permutation, old)),
        gradients_before=before,
        gradients_after=after,
    )


def _compare_gradients(
    inputs: Inputs,
    names: list[str],
    graph: PermutationGraph,
    permutation: Permutation,
    recipe: Recipe,
    running: dict[str, Any],
) -> tuple[float, float]:
    """Under the tuned model's classifier: with one of zeros, nothing would come through to the layers below."""
    accelerator = choose_device(running["device"], running["precision"])
    options = replace(recipe.port, grad_batches=1)
    gradient = StepGradients(inputs, options, accelerator, running["workers"])
    tuned = inputs.tuned.in_float32()
    head = {name: tuned[name] for name in inputs.names if name in inputs.comparison.head}

    def at(base: Tensors, classifier: Tensors) -> dict[str, Tensor]:
        return gradient({**inputs.parameters(base), **classifier}, 1)

    def rest(tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensors[name] for name in names}

    source = at(inputs.heads.source, head)
    plain = at(inputs.heads.target, head)
    carried = at(inputs.heads.target, graph.apply(permutation, head))
    before = _cosine(rest(plain), rest(source))
    return before, _cosine(rest(carried), rest(graph.apply(permutation, source)))


def _norm(tensors: Tensors) -> float:
    return float(sum(float(each.double().square().sum()) for each in tensors.values()) ** 0.5)


def _cosine(one: Tensors, other: Tensors) -> float:
    product = sum(float(torch.sum(each.double() * other[name].double())) for name, each in one.items())
    return product / max(_norm(one) * _norm(other), 1e-30)
