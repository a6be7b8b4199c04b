"""A finished port: the model, how it came about, and the folder it becomes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hf_retarget.devices import in_main_process
from hf_retarget.errors import PortError
from hf_retarget.files import write_json, write_text
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.models import save_model
from hf_retarget.pipeline.card import card_of_port, publish_recipe
from hf_retarget.pipeline.inputs import Inputs
from hf_retarget.pipeline.pictures import write_report
from hf_retarget.pipeline.steps import StepFigures
from hf_retarget.pipeline.workplace import Workplace
from hf_retarget.publish import Destination, Pushed, push_folder
from hf_retarget.recipe import Recipe


class _SavingPlace(Workplace):
    """For a result that is saved from Python: beside an unfinished run, which it leaves alone."""

    suffix = "saving"


@dataclass(frozen=True, eq=False)
class PortResult:
    """A ported model, and everything that is known about it."""

    model: nn.Module = field(repr=False)
    """The ported model on the CPU, ready to use; fine-tuned on if the recipe says so."""
    weights: dict[str, Tensor] = field(repr=False)
    """Its state dict, in float32."""
    history: tuple[StepFigures, ...] = field(repr=False)
    permutation: Permutation
    """That of the best step: good for any other fine-tuning between the same two bases."""
    best_step: int
    figures: dict[str, Any] = field(repr=False)
    """What port.json says."""
    recipe: Recipe = field(repr=False)
    graph: PermutationGraph = field(repr=False)
    inputs: Inputs = field(repr=False)
    dtype: torch.dtype | None = None
    """What the weights are stored as; as those of the new base if None."""
    thumbnails: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Test images that the report shows, by their number."""

    @property
    def verdict(self) -> str:
        """Whether it was worth it, in one line."""
        return str(self.figures["verdict"])

    def save(self, folder: str | Path, *, overwrite: bool = False, lock: bool = True) -> Path:
        """Write a folder that timm loads as it is; it appears all at once, or not at all."""
        place = _SavingPlace.at(folder)
        with place.held(overwrite=overwrite, lock=lock):

            def save() -> None:
                self.write(place.fresh_result())
                place.finish()

            in_main_process(save)
        return place.out

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        replace_card: bool = False,
        token: str | None = None,
    ) -> Pushed | None:
        """Push the model with its card and all figures in one commit, and read it back; None in other processes."""
        destination = Destination(repository, private, revision, commit_message, create_pr, replace_card, token)

        def push() -> Pushed:
            with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
                self.write(Path(place))
                return push_folder(place, destination)

        return in_main_process(push)

    def write(self, folder: Path) -> None:
        """Write all files into a folder that nobody looks at yet."""
        inputs = self.inputs
        save_model(
            folder,
            self.weights,
            inputs.target,
            num_classes=inputs.classes,
            labels=inputs.labels,
            dtype=self.dtype,
            config=asdict(inputs.preprocess),
        )
        try:
            self.permutation.save(folder / "permutation.safetensors")
            self.graph.save(folder / "graph.json")
            publish_recipe(self.recipe, folder / "recipe.yaml")
            write_json(folder / "port.json", self.figures)
            write_report(folder, self.figures, self.graph, self.thumbnails)
            write_text(folder / "README.md", card_of_port(self.figures, inputs.target, folder))
        except (OSError, SafetensorError) as error:
            raise PortError(f"cannot write to '{folder}': {error}") from error
