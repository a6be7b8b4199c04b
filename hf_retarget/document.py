"""port.json: its type, its version, its JSON schema, and how older versions are read. Importing this imports no torch.

    python -m hf_retarget.document docs/port.schema.json

writes the schema, which a test compares with the types below.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_retarget.contenders import AFTER, BESIDE, PORT, Contender, contenders, find_contender
from hf_retarget.document_v1 import upgrade
from hf_retarget.errors import PortError
from hf_retarget.files import to_json, write_json
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json
from hf_retarget.words import percent, size

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = "hf-retarget/port/2"
_NAMED = 3  # tensors in a sentence


def _check_accuracies(*values: float | None) -> None:
    for value in values:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"an accuracy is {value}")


def _check_counts(**values: float) -> None:
    if negative := [name for name, value in values.items() if value < 0]:
        raise ValueError(f"its {negative[0]} are {values[negative[0]]}")


@dataclass(frozen=True)
class StepFigures:
    """One step along the trajectory; `top1` and `loss` are those on the validation images."""

    step: int
    far: float | None
    """λ, the share of the way; None on an actual trajectory, which has no straight line to measure it on."""
    top1: float
    loss: float | None
    objective: float = 0.0
    sweeps: int = 0
    moved: float = 0.0
    """Share of the neurons that the permutation moves."""
    seconds: dict[str, float] = field(default_factory=dict)
    objectives: tuple[float, ...] = ()
    """After each sweep of the search."""
    cosines: dict[str, float | None] | None = None
    """Of the gradients of both sides at this step: `before`, `unseen` and `after` matching."""

    def __post_init__(self) -> None:
        _check_accuracies(self.top1)


CLEAR = 2.0
"""Standard errors from which a difference is taken for more than chance."""


@dataclass(frozen=True)
class Lead:
    """By how much one model is ahead of another on the same images, and the standard error of that."""

    value: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether one of them is shown to be better."""
        return abs(self.value) > CLEAR * self.error

    @property
    def sentence(self) -> str:
        """For people.

        Example:
            >>> Lead(0.02, 0.015).sentence
            '+2.0 points (±1.5, not shown to differ)'
        """
        words = "" if self.is_clear else ", not shown to differ"
        return f"{100 * self.value:+.1f} points (±{100 * self.error:.1f}{words})"


@dataclass(frozen=True)
class ScoreFigures:
    """Scores on the test images."""

    top1: float
    top5: float | None
    loss: float | None
    images: int
    per_class: tuple[float | None, ...] = ()
    confusion: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        _check_accuracies(self.top1, self.top5, *self.per_class)
        _check_counts(images=self.images)


@dataclass(frozen=True)
class ContenderFigures:
    """What one contender achieved, and at what price."""

    name: str
    role: str
    """`port`: may win. `after`: continues from the winner. `beside`: is compared with it."""
    gradients: int
    """Gradients of a minibatch that it took."""
    validation: float
    """Accuracy on the images that contenders are chosen by, of the best step if there are steps."""
    test: ScoreFigures
    forwards: float = 0.0
    """Minibatches that only went forward: for BatchNorm, validation and closed-form heads."""
    detail: str = ""
    """What was chosen for it, in words: a factor, the targets of a head."""
    also: ScoreFigures | None = None
    """Scores on the second set of images."""
    flips: tuple[int, int] | None = None
    """Test images that only the tuned model has right, and that only this one has right."""
    lead: Lead | None = None
    """How far the result is ahead of it on the test images."""
    best_step: int | None = None
    steps: tuple[StepFigures, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    """Validation accuracy over the training images spent so far, where gradients were taken."""
    seconds: float = field(default=0.0, compare=False)
    """To make it and score it; what is shared counts for the first."""

    def __post_init__(self) -> None:
        _check_accuracies(self.validation, *(top1 for _, top1 in self.curve))
        _check_counts(gradients=self.gradients, forwards=self.forwards)
        if self.role not in (PORT, AFTER, BESIDE):
            raise ValueError(f"there is no role '{self.role}'")
        if self.best_step is not None and not 1 <= self.best_step <= len(self.steps):
            raise ValueError(f"its best step is {self.best_step} of {len(self.steps)}")

    @property
    def row(self) -> Contender:
        """Its words and colours."""
        return find_contender(self.name)

    @property
    def price(self) -> float:
        """What it cost, in gradients of a minibatch: a forward pass is a third of one."""
        return self.gradients + self.forwards / 3


@dataclass(frozen=True)
class RelationFacts:
    """How the bases are related, measured on their backbones."""

    cosine: float
    """Of the old and the new base, weight by weight."""
    drift: float | None
    """‖new base − old base‖ / ‖tuned model − old base‖; None if the tuned model is the old base."""
    word: str
    """`same lineage`, `drifted` or `independent`."""
    tensors: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Cosine and drift of each tensor that was looked at."""
    apart: float | None = None
    """‖new base − old base‖ / ‖old base‖."""
    length: float | None = None
    """‖tuned model − old base‖ / ‖old base‖."""
    to_new: float | None = None
    """‖tuned model − new base‖ / ‖old base‖."""
    resemblance: float | None = None
    """Cosine of the old base and the tuned model: the median over these tensors."""

    @property
    def sentence(self) -> str:
        """For people."""
        far = "" if self.drift is None else f", {self.drift:.2g} times as far apart as the fine-tuning is long"
        return f"{self.word} (cosine {self.cosine:.3f}{far})"


@dataclass(frozen=True)
class GateFacts:
    """One thing that was looked at before any verdict."""

    name: str
    looks_at: str
    found: str | None = None
    """What is wrong, and what to do; empty if all is well, None if it could not be seen."""


@dataclass(frozen=True)
class ModelFacts:
    """One of the models that went in."""

    reference: str
    architecture: str
    classes: int
    location: str | None = None
    """A hash of the path, where it was one."""
    library: str = "timm"
    options: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    hub_id: str | None = None
    base_models: tuple[str, ...] = ()
    license: str | None = None
    license_link: str | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """What people call it; of a local path only the last part, because a report may be read by anybody."""
        return self.reference if self.revision else Path(self.reference).name or self.reference


@dataclass(frozen=True)
class DataFacts:
    """The images that went in."""

    name: str
    classes: int
    images: dict[str, int]
    fingerprint: str
    location: str | None = None
    revision: str | None = None
    labels: tuple[str, ...] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    made: str = ""
    """What was done to images, in words."""

    def __post_init__(self) -> None:
        _check_counts(classes=self.classes, **self.images)
        if self.labels is not None and len(self.labels) != self.classes:
            raise ValueError(f"it has {len(self.labels)} labels for {self.classes} classes")

    @property
    def class_names(self) -> list[str]:
        """The labels, or the numbers of the classes."""
        return [str(each) for each in self.labels or range(self.classes)]


@dataclass(frozen=True)
class PermutationFacts:
    """The permutation of the winner."""

    moved: float
    """Share of the neurons that it moves."""
    given: bool = False
    origin: str | None = None
    """The folder of the port that it was taken from."""


@dataclass(frozen=True)
class AdapterFacts:
    """The adapter that was saved instead of the model (`--save-as lora`)."""

    rank: int
    """That of most layers; others are in adapter_config.json."""
    energy: float
    """Share of the energy (the squared norm) of what the port adds to the new base's backbone that it keeps."""
    layers: int
    """Linear and convolutional layers with two factors each."""
    whole: tuple[str, ...]
    """Modules that are saved as they are: heads, norms with their statistics, grouped convolutions …"""
    left_out: dict[str, float]
    """Tensors that an adapter cannot hold, with their shares of the energy."""
    size: int
    """Bytes."""
    test: ScoreFigures | None = None
    """Of the adapter as PEFT loads it onto the new base; None without images."""
    lead: Lead | None = None
    """Of the adapter over the port."""

    @property
    def sentence(self) -> str:
        """For people."""
        kept = f"it keeps {percent(self.energy)} of the energy of what the port adds to the new base"
        words = [f"As an adapter of rank {self.rank} ({size(self.size)}), {kept}"]
        if self.test and self.lead:
            score = f"it scores {percent(self.test.top1)} on the test images"
            words += [f"as PEFT loads it, {score}, {self.lead.sentence} against the port"]
        if self.left_out:
            most = sorted(self.left_out.items(), key=lambda each: -each[1])
            more = f" and {len(most) - _NAMED} more" if len(most) > _NAMED else ""
            named = ", ".join(f"{name} ({percent(share)})" for name, share in most[:_NAMED])
            words += [f"left out, because PEFT cannot hold them: {named}{more}"]
        return "; ".join(words) + "."


@dataclass(frozen=True)
class TextFacts:
    """How well language models predict the texts that a fine-tuning was for."""

    name: str
    texts: int
    tokens: int
    losses: dict[str, float]
    """Loss per token of `source`, `tuned`, `target` and `port`."""
    gain: Lead
    """How much lower the tuned model's loss is than the old base's."""
    kept: Lead | None = None
    """The share of that gain by which the port is better than the new base; None if there is no clear gain."""
    why: str = ""
    """Why there is no share."""


@dataclass(frozen=True)
class PortDocument:
    """Everything that is known about a finished port."""

    format: str
    version: str
    verdict: str
    winner: str
    """The name of the contender that was chosen on the validation images."""
    contenders: tuple[ContenderFigures, ...]
    """None if there were no images to score anything on (`--data none`)."""
    steps_planned: int
    models: dict[str, ModelFacts]
    """source, tuned and target; tuned_target if it was given."""
    data: DataFacts
    recipe: dict[str, Any]
    head: dict[str, Any]
    graph: dict[str, Any]
    """Empty if nothing had to be matched."""
    permutation: PermutationFacts
    relation: RelationFacts | None = None
    text: TextFacts | None = None
    """Losses of language models (`--text`)."""
    gates: tuple[GateFacts, ...] = ()
    """What was looked at before the verdict."""
    matching_lead: Lead | None = None
    """How far the winner is ahead of the same without matching on the test images."""
    targets: str = "labels"
    """What gradients and heads were fitted to: `labels`, `teacher` or `both`."""
    labelled: bool = True
    """Whether test scores are accuracies; without labels they are agreement with the tuned model."""
    also: DataFacts | None = None
    """The second set of images."""
    flipped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of the test images on which result and tuned model differ: `negative`, where only the tuned is right."""
    matching: dict[str, Any] = field(default_factory=dict)
    batchnorm: dict[str, Any] = field(default_factory=dict)
    adapter: AdapterFacts | None = None
    samples: dict[str, Any] | None = None
    device: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    peak_memory: int | None = None
    command: str = ""
    next_step: str = ""
    """The command that follows the verdict."""
    versions: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """All that the result depends on: what `--resume` compares."""
    files: dict[str, str] = field(default_factory=dict, compare=False)
    """The sha256 of each file beside port.json, but for card and report, which may be edited."""

    older: ClassVar[tuple[str, ...]] = ("hf-retarget/port/1",)

    def __post_init__(self) -> None:
        if (self.contenders or self.winner) and self.find(self.winner) is None:
            raise ValueError(f"its winner '{self.winner}' is not among its contenders")
        if len({each.name for each in self.contenders}) < len(self.contenders):
            raise ValueError("two of its contenders have the same name")
        if not {"source", "tuned", "target"} <= self.models.keys():
            raise ValueError("it does not name its three models")
        _check_counts(steps_planned=self.steps_planned)
        if not 0 <= sum(self.seconds.values()) < math.inf:
            raise ValueError("its seconds are not a time")

    def find(self, name: str) -> ContenderFigures | None:
        """The contender of this name, if it entered."""
        return next((each for each in self.contenders if each.name == name), None)

    @property
    def port(self) -> ContenderFigures:
        """The winner."""
        found = self.find(self.winner)
        if found is None:
            raise PortError("this port was made without images, so nothing was scored; hf-retarget evaluate does")
        return found

    @property
    def result(self) -> ContenderFigures:
        """What was saved: what continued from the winner, or the winner itself."""
        return next((each for each in self.contenders if each.role == AFTER), self.port)

    @property
    def alternative(self) -> ContenderFigures | None:
        """What a user would have done instead, at the same price."""
        return next((each for each in self.contenders if each.row.is_alternative), None)

    @property
    def unmatched(self) -> ContenderFigures | None:
        """The winner without its matching."""
        return self.find(self.port.row.without_matching)

    @property
    def rival(self) -> ContenderFigures | None:
        """What the result is compared with, image by image: the alternative, else a port without matching."""
        plain = (each for each in self.contenders if each.role == BESIDE and each.steps)
        return (
            self.alternative or self.unmatched or next((each for each in plain if not each.row.without_matching), None)
        )

    @property
    def trail(self) -> ContenderFigures:
        """The contender whose steps led to the winner: itself, or the one whose head it refits."""
        return self.find(self.port.row.refits) or self.port

    @property
    def best(self) -> StepFigures | None:
        """The best of these steps."""
        return self.trail.steps[self.trail.best_step - 1] if self.trail.best_step else None

    @property
    def measure(self) -> str:
        """What scores are: accuracy, or agreement with the tuned model where there are no labels."""
        return "accuracy" if self.labelled else "agreement"

    @property
    def table(self) -> list[ContenderFigures]:
        """The contenders in the order of a table; those that this version does not know come last."""
        order = {each.name: place for place, each in enumerate(contenders())}
        return sorted(self.contenders, key=lambda each: order.get(each.name, len(order)))

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1 / max(1, self.data.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_document(path: str | Path) -> PortDocument:
    """Read a port.json of this or an older version; PortError says what is wrong with it."""
    path = Path(path)
    try:
        return parse_document(read_json(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError as error:
        raise PortError(f"there is no '{path}'; is its folder a finished port?") from error
    except (OSError, ValueError) as error:
        raise PortError(f"'{path}' cannot be read: {error}; make the port again") from error


def parse_document(content: Any) -> PortDocument:
    """The document of plain JSON values; ValueError says what is wrong with it."""
    kind = content.get("format") if isinstance(content, dict) else type(content).__name__
    if kind in PortDocument.older:
        try:
            content = {**upgrade(content), "format": FORMAT}
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from error
    elif kind != FORMAT:
        raise ValueError(f"it is no port: its format is {kind!r}, not {FORMAT!r}")
    from pydantic import ValidationError

    try:
        # Half a surrogate, as in a file name that cannot be decoded, is no JSON. Unknown keys are ignored.
        return _adapter().validate_json(json.dumps(content, ensure_ascii=False).encode(errors="replace"), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{what} (in '{where}')" if where else what) from error


def make_schema() -> dict[str, Any]:
    """The JSON schema of port.json, derived from the types."""
    described = _adapter().json_schema()
    described["properties"]["format"] = {"const": FORMAT}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": FORMAT}


@cache
def _adapter() -> TypeAdapter[PortDocument]:
    from pydantic import TypeAdapter  # not at once: most commands read no document

    return TypeAdapter(PortDocument)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_json(sys.argv[1], make_schema())
    else:
        sys.stdout.write(to_json(make_schema()) + "\n")
