"""port.json: its types, version and JSON schema, and how older versions are read. Importing this imports no torch.

`python -m hf_retarget.document docs/port.schema.json` writes the schema.
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
from hf_retarget.files import write_json
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json, refuse_large
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
    """One step along the trajectory; `top1` and `loss` are measured on validation images."""

    step: int
    far: float | None
    """λ, the share of the way; None on an actual trajectory, where it is not defined."""
    top1: float
    loss: float | None
    objective: float = 0.0
    sweeps: int = 0
    moved: float = 0.0
    """Share of the neurons that the permutation moves."""
    seconds: dict[str, float] = field(default_factory=dict)
    objectives: tuple[float, ...] = ()
    """The objective after each sweep of the search."""
    cosines: dict[str, float | None] | None = None
    """Cosines between the gradients of both sides at this step: `before`, `unseen` and `after` matching."""

    def __post_init__(self) -> None:
        _check_accuracies(self.top1)


CLEAR = 2.0
"""A difference of more than this many standard errors counts as significant."""


@dataclass(frozen=True)
class Lead:
    """The lead of one model over another on the same images, and its standard error."""

    value: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether the difference is significant."""
        return abs(self.value) > CLEAR * self.error

    @property
    def is_behind(self) -> bool:
        """Whether the first model is significantly worse."""
        return self.is_clear and self.value < 0

    @property
    def sentence(self) -> str:
        """The lead in words.

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
    """Scores and price of one contender."""

    name: str
    role: str
    """`port`: may win. `after`: continues from the winner. `beside`: compared with the winner."""
    gradients: int
    """Minibatch gradients taken."""
    validation: float
    """Accuracy on the images that choose among contenders, of the best step if there are steps."""
    test: ScoreFigures
    forwards: float = 0.0
    """Forward-only minibatches, for BatchNorm, validation and closed-form heads."""
    detail: str = ""
    """What was chosen, for display: a factor, the targets of a head."""
    also: ScoreFigures | None = None
    """Scores on the second set of images."""
    flips: tuple[int, int] | None = None
    """Test images that only the tuned model gets right, and that only this one gets right."""
    lead: Lead | None = None
    """Lead of the result over it on the test images."""
    best_step: int | None = None
    steps: tuple[StepFigures, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    """(Training images used so far, validation accuracy), if gradients were taken."""
    seconds: float = field(default=0.0, compare=False)
    """Time to make and score it; shared work counts for the first."""

    def __post_init__(self) -> None:
        _check_accuracies(self.validation, *(top1 for _, top1 in self.curve))
        _check_counts(gradients=self.gradients, forwards=self.forwards)
        if self.role not in (PORT, AFTER, BESIDE):
            raise ValueError(f"there is no role '{self.role}'")
        if self.best_step is not None and not 1 <= self.best_step <= len(self.steps):
            raise ValueError(f"its best step is {self.best_step} of {len(self.steps)}")

    @property
    def row(self) -> Contender:
        """Its row in the registry."""
        return find_contender(self.name)

    @property
    def price(self) -> float:
        """The price in gradients of a minibatch; a forward pass is a third of one."""
        return self.gradients + self.forwards / 3


@dataclass(frozen=True)
class RelationFacts:
    """How the bases are related, measured on their backbones."""

    cosine: float
    """Cosine between the weights of the old and the new base."""
    drift: float | None
    """‖new base − old base‖ / ‖tuned model − old base‖; None if the tuned model is the old base."""
    word: str
    """`same lineage`, `drifted` or `independent`."""
    tensors: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Cosine and drift of each compared tensor."""
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
        """The relation in words."""
        far = "" if self.drift is None else f", {self.drift:.2g} times as far apart as the fine-tuning is long"
        return f"{self.word} (cosine {self.cosine:.3f}{far})"


@dataclass(frozen=True)
class GateFacts:
    """The result of one gate, a check before any verdict."""

    name: str
    looks_at: str
    found: str | None = None
    """What is wrong and what to do; empty if all is well, None if it could not be evaluated."""


@dataclass(frozen=True)
class ModelFacts:
    """One of the input models."""

    reference: str
    architecture: str
    classes: int
    location: str | None = None
    """A hash of the path, if the model was local."""
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
        """The name for display; of a local path only the last part, since reports may be published."""
        return self.reference if self.revision else Path(self.reference).name or self.reference


@dataclass(frozen=True)
class DataFacts:
    """The input images."""

    name: str
    classes: int
    images: dict[str, int]
    fingerprint: str
    location: str | None = None
    revision: str | None = None
    labels: tuple[str, ...] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    made: str = ""
    """The preprocessing, for display."""

    def __post_init__(self) -> None:
        _check_counts(classes=self.classes, **self.images)
        if self.labels is not None and len(self.labels) != self.classes:
            raise ValueError(f"it has {len(self.labels)} labels for {self.classes} classes")

    @property
    def class_names(self) -> list[str]:
        """The labels, or the class numbers."""
        return [str(each) for each in self.labels or range(self.classes)]


@dataclass(frozen=True)
class PermutationFacts:
    """The permutation of the winner."""

    moved: float
    """Share of the neurons it moves."""
    given: bool = False
    origin: str | None = None
    """The folder of the port it was taken from."""


@dataclass(frozen=True)
class AdapterFacts:
    """The adapter that was saved instead of the model (`--save-as lora`)."""

    rank: int
    """The rank of most layers; others are in adapter_config.json."""
    energy: float
    """Share of the energy (squared norm) kept of what the port adds to the backbone of the new base."""
    layers: int
    """Number of linear and convolutional layers with two factors."""
    whole: tuple[str, ...]
    """Modules saved in full: heads, norms with their statistics, grouped convolutions …"""
    left_out: dict[str, float]
    """Tensors an adapter cannot hold, with their shares of the energy."""
    size: int
    """Size in bytes."""
    test: ScoreFigures | None = None
    """Scores of the adapter as loaded by PEFT; None without images."""
    lead: Lead | None = None
    """Lead of the adapter over the port."""

    @property
    def sentence(self) -> str:
        """The adapter in words."""
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
    """Losses of language models on texts of the fine-tuning's domain."""

    name: str
    texts: int
    tokens: int
    losses: dict[str, float]
    """Loss per token of `source`, `tuned`, `target` and `port`."""
    gain: Lead
    """By how much the tuned model's loss is lower than the old base's."""
    kept: Lead | None = None
    """The port's gain over the new base as a share of that; None without a significant gain."""
    why: str = ""
    """Why there is no share, if so."""


@dataclass(frozen=True)
class PortDocument:
    """The content of port.json: everything known about a finished port."""

    format: str
    version: str
    verdict: str
    winner: str
    """Name of the contender chosen on validation images."""
    contenders: tuple[ContenderFigures, ...]
    """Empty without images (`--data none`)."""
    steps_planned: int
    models: dict[str, ModelFacts]
    """The models `source`, `tuned` and `target`, and `tuned_target` if given."""
    data: DataFacts
    recipe: dict[str, Any]
    head: dict[str, Any]
    graph: dict[str, Any]
    """The permutation graph; empty if it was not needed."""
    permutation: PermutationFacts
    relation: RelationFacts | None = None
    text: TextFacts | None = None
    """Losses of language models (`--text`)."""
    gates: tuple[GateFacts, ...] = ()
    """Results of the checks before the verdict."""
    matching_lead: Lead | None = None
    """Lead of the winner over its counterpart without matching on the test images."""
    targets: str = "labels"
    """Targets of gradients and heads: `labels`, `teacher` or `both`."""
    labelled: bool = True
    """Whether test scores are accuracies; without labels, they are agreement with the tuned model."""
    also: DataFacts | None = None
    """The second set of images."""
    flipped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of test images where only the tuned model is right (`negative`) or only the result (`positive`)."""
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
    """Everything the result depends on, compared by `--resume`."""
    files: dict[str, str] = field(default_factory=dict, compare=False)
    """The sha256 of each other file, except card and report, which may be edited."""

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
            raise PortError("this port was made without images and has no scores; hf-retarget evaluate computes them")
        return found

    @property
    def result(self) -> ContenderFigures:
        """The contender that was saved: the winner, or its continuation."""
        return next((each for each in self.contenders if each.role == AFTER), self.port)

    @property
    def original(self) -> ContenderFigures | None:
        """The tuned model, if anything was compared with it."""
        return next((each for each in self.contenders if each.row.is_original), None)

    @property
    def alternative(self) -> ContenderFigures | None:
        """What a user would do instead of a port, at the same price."""
        return next((each for each in self.contenders if each.row.is_alternative), None)

    @property
    def unmatched(self) -> ContenderFigures | None:
        """The winner's counterpart without matching."""
        return self.find(self.port.row.without_matching)

    @property
    def rival(self) -> ContenderFigures | None:
        """What the result is compared with image by image: the alternative, else a port without matching."""
        plain = (each for each in self.contenders if each.role == BESIDE and each.steps)
        return (
            self.alternative or self.unmatched or next((each for each in plain if not each.row.without_matching), None)
        )

    @property
    def trail(self) -> ContenderFigures:
        """The contender whose steps led to the winner: the winner, or the one whose head it refits."""
        return self.find(self.port.row.refits) or self.port

    @property
    def best(self) -> StepFigures | None:
        """The best step of the trail."""
        return self.trail.steps[self.trail.best_step - 1] if self.trail.best_step else None

    @property
    def measure(self) -> str:
        """The name of the scores: `accuracy`, or without labels `agreement` with the tuned model."""
        return "accuracy" if self.labelled else "agreement"

    @property
    def table(self) -> list[ContenderFigures]:
        """The contenders in table order, with names unknown to this version last."""
        order = {each.name: place for place, each in enumerate(contenders())}
        return sorted(self.contenders, key=lambda each: order.get(each.name, len(order)))

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1 / max(1, self.data.classes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return asdict(self)


def read_document(path: str | Path) -> PortDocument:
    """Read a port.json of this or an older version; PortError if it is invalid."""
    path = Path(path)
    try:
        return parse_document(read_json(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError as error:
        raise PortError(f"there is no '{path}'; name the folder of a finished port") from error
    except (OSError, ValueError) as error:
        raise PortError(f"'{path}' cannot be read: {error}; make the port again") from error


def parse_document(content: Any) -> PortDocument:
    """Parse JSON values into a document; ValueError says what is wrong."""
    kind = content.get("format") if isinstance(content, dict) else type(content).__name__
    if kind in PortDocument.older:
        try:
            content = {**upgrade(content), "format": FORMAT}
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from error
    elif kind != FORMAT:
        raise ValueError(f"it is not a port: its format is {kind!r}, not {FORMAT!r}")
    from pydantic import ValidationError

    refuse_large(content)
    try:
        # A lone surrogate, as in an undecodable file name, is not valid JSON. Unknown keys are ignored.
        return _adapter().validate_json(json.dumps(content, ensure_ascii=False).encode(errors="replace"), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{what} (in '{where}')" if where else what) from error


def make_schema() -> dict[str, Any]:
    """Derive the JSON schema of port.json from the types."""
    described = _adapter().json_schema()
    described["properties"]["format"] = {"const": FORMAT}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": FORMAT}


@cache
def _adapter() -> TypeAdapter[PortDocument]:
    from pydantic import TypeAdapter  # deferred: most commands read no document

    return TypeAdapter(PortDocument)


if __name__ == "__main__":
    write_json(sys.argv[1], make_schema())
