"""How good some weights are: load them, estimate BatchNorm anew, score them on a split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_retarget.data import Split
from hf_retarget.data.images import Batch, derive_seed
from hf_retarget.evaluate import Score, evaluate
from hf_retarget.pipeline.clock import Clock
from hf_retarget.pipeline.drawn import Drawn
from hf_retarget.pipeline.inputs import Inputs
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import PortOptions
from hf_retarget.training.batchnorm import BatchNormReset, reset_batchnorm

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Judge:
    """One model, in which all weights that are to be scored take their turn."""

    inputs: Inputs
    options: PortOptions
    accelerator: Accelerator
    workers: int = 0
    progress: Progress = SILENT
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def drawn(self) -> Drawn:
        """Images for every step: each sees the same ones."""
        return Drawn(self.inputs.preprocess.input_size)

    @property
    def model(self) -> nn.Module:
        """The model, with the weights that were loaded last."""
        return self.inputs.model

    def load(self, weights: Tensors, parameters: Tensors | None = None) -> None:
        """Put a whole state dict into the model, and then, if given, other parameters."""
        self.model.load_state_dict(dict(weights))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():  # tied ones once: both names get the new value
                if parameters is not None:
                    parameter.copy_(parameters[name])

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights that are in the model."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def settle(self, parameters: Tensors) -> BatchNormReset:
        """Put ported parameters into the target, and estimate the statistics that fit them.

        Always from the target as it was: what was scored before leaves no trace.
        """
        self.load(self.inputs.heads.target, parameters)
        if not self.options.bn_batches:
            return BatchNormReset({}, {}, 0)
        options, train = self.options, self.inputs.data.train

        def draw() -> Iterable[Batch]:
            other = derive_seed(options.seed, "batchnorm")  # other images than those of the gradients
            return train.batches(options.batch_size, seed=other, count=options.bn_batches, workers=self.workers)

        with self.clock.stage("batchnorm"):
            batches = self.drawn.get("batchnorm", options.bn_batches * options.batch_size, draw)
            return reset_batchnorm(self.model, batches, accelerator=self.accelerator, progress=self.progress)

    def score(self, split: Split) -> Score:
        """How good the weights are that are in the model."""
        size = self.options.eval_batch
        with self.clock.stage("evaluation"):
            return evaluate(
                self.model,
                self.drawn.get(split.name, len(split), lambda: split.batches(size, workers=self.workers)),
                self.inputs.classes,
                accelerator=self.accelerator,
                progress=self.progress,
                total=-(-len(split) // size),
            )
